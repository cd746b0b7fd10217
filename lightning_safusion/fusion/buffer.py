"""One fusion buffer: which tensors it holds, its collective, and what this rank put into it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.exchange import Exchange, Part, TensorFlag
from lightning_safusion.fusion.layout import Layout
from lightning_safusion.fusion.plan import Group
from lightning_safusion.sparsify.base import Segments, Selection
from lightning_safusion.sparsify.survey import Foresight, History
from lightning_safusion.sparsify.view import device_constant


@dataclass(eq=False)
class FusionBuffer:
    """One group's persistent buffer, and what this rank put into it in the current window.

    Args:
        group: Places of its tensors.
        start: First element in the flat space.
        stop: Element after its last.
        segments: Cut for selection; None if it travels dense.
        exchange: Its collective.
        dense: bool [T], tensors that travel whole.
        dtypes: What the gradients arrive in.
        selection: What was selected, until it is packed.
        absent: Tensors of which nothing was selected, as they are not fresh or travel outside the compressed path.
        constants: What has been worked out for it.
    """

    group: Group
    start: int
    stop: int
    segments: Segments | None
    exchange: Exchange
    dense: np.ndarray
    dtypes: frozenset[torch.dtype]
    selection: Selection | None = None
    absent: list[int] = field(default_factory=list)
    constants: dict[Hashable, Any] = field(default_factory=dict)
    _packed: np.ndarray | Selection | None = None

    @cached_property
    def narrow(self) -> bool:
        """Whether gradients have fewer bits than the memory, so that a mean may not fit."""
        return any(dtype.itemsize < 4 for dtype in self.dtypes)

    @cached_property
    def exact(self) -> bool:
        """Whether all gradients are what the memory holds, float32."""
        return self.dtypes == {torch.float32}

    @cached_property
    def all_fresh(self) -> Tensor:
        """uint8 [T]: the flags of almost every step."""
        return device_constant(np.full(len(self.places), int(TensorFlag.FRESH), np.uint8), self.exchange.device)

    @cached_property
    def history(self) -> History | None:
        """Thresholds that earlier selections from it predict; None if it travels dense."""
        return None if self.segments is None else History(self.segments)

    @cached_property
    def foresight(self) -> Foresight | None:
        """Finds elements while gradients are added; None where nothing is selected from what is in host memory."""
        if self.history is None or self.exchange.selects_itself or self.exchange.device.type != "cpu":
            return None
        return Foresight(self.history, self.exchange.spec.edges)

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of its tensors."""
        return np.diff(self.exchange.spec.edges).tolist()

    @property
    def places(self) -> range:
        """Places of its tensors."""
        return range(self.group.start, self.group.stop)

    @property
    def sparse(self) -> bool:
        """Whether the message of the last window holds selected elements."""
        return self._packed is not None or self.exchange.selects_itself

    def pack(self, flags: Tensor, x: Tensor, notices: int) -> None:
        """Writes this rank's part into the message.

        Args:
            flags: uint8 [T], of its tensors.
            x: float32 [N], residual plus gradient.
            notices: What this rank tells all others (bits of ``Notice``).
        """
        self.exchange.encode(x, Part(self.selection, flags, self.absent, notices))
        self._packed, self.selection = self.selection, None
        if self._packed is not None and self.exchange.device.type == "cpu":
            self._packed = self._counts(self._packed)  # the message holds the rest; a device would be waited for

    def _counts(self, selection: Selection) -> np.ndarray:
        """int64 [T], elements of each tensor that were selected."""
        positions = selection.positions[: int(selection.count)].cpu().numpy()
        return np.diff(np.searchsorted(positions, np.asarray(self.exchange.spec.edges, positions.dtype)))

    def selected(self) -> np.ndarray:
        """int64 [T]: elements that each tensor sent in the last window (waits for the device)."""
        edges = np.asarray(self.exchange.spec.edges)
        counts = np.where(self.dense, np.diff(edges), 0)
        if isinstance(self._packed, Selection):
            counts += self._counts(self._packed)
        elif self._packed is not None:
            counts += self._packed
        elif self.exchange.selects_itself:
            counts += np.diff(np.searchsorted(self.exchange.sent()[0].cpu().numpy(), edges))
        counts[self.absent] = 0
        return counts


def dense_runs(
    layout: Layout, group: Group, edges: tuple[int, ...], dense: np.ndarray
) -> tuple[tuple[int, int, torch.dtype], ...]:
    """Neighbouring dense tensors of one dtype, merged."""
    tensors = [(bool(dense[i]), layout.specs[group.start + i].dtype) for i in range(len(dense))]
    runs = []
    for (whole, dtype), members in groupby(range(len(dense)), key=lambda i: tensors[i]):
        ids = list(members)
        if whole and edges[ids[-1] + 1] > edges[ids[0]]:
            runs.append((edges[ids[0]], edges[ids[-1] + 1], dtype))
    return tuple(runs)
