"""The flat gradient space of a job: order, quotas, residual, buffers and planning numbers of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from torch import Tensor

from lightning_safusion.comm.wire.formats import message_bytes
from lightning_safusion.fusion.buffers import Buffer, BufferPool
from lightning_safusion.fusion.layout import Layout
from lightning_safusion.fusion.plans.costs import JobShape
from lightning_safusion.fusion.plans.plan import Group
from lightning_safusion.fusion.quota import TensorQuotas, tensor_quotas
from lightning_safusion.sparsify.schedule import check_density
from lightning_safusion.sparsify.selection.survey import Selector

# Elements of the buffer by which bytes of an entry are measured: positions in spans of billions have other formats.
_LONGEST = 1 << 24


class GradientSpace:
    """What changes together when tensors change their order or the density changes.

    Args:
        layout: The tensors; the memory of the pool is bound to it.
        pool: The buffers.
        selector: The compressor.

    Attributes:
        layout: The tensors in their present order.
        quotas: What each may send at the present density.
        memory: Error feedback.
        device: Where gradients live.
    """

    def __init__(self, layout: Layout, pool: BufferPool, selector: Selector) -> None:
        self.layout = layout
        self.pool = pool
        self.memory = pool.memory
        self.device = pool.device
        self.selector = selector
        self.quotas: TensorQuotas = tensor_quotas(layout, selector.sparsifier, 1.0)

    @cached_property
    def shape(self) -> JobShape:
        """What planning gets of the job, in the order and at the density in force."""
        return JobShape(
            numels=tuple(np.diff(self.layout.edges).tolist()),
            widths=tuple(spec.dtype.itemsize for spec in self.layout.specs),
            quotas=tuple(self.quotas.counts.tolist()),
            world_size=self.pool.transport.world_size,
            entry_bytes=self._entry_bytes(),
            hybrid=self.pool.collective.dense_lane,
            device=str(self.device),
        )

    def _entry_bytes(self) -> float:
        """Bytes of an entry, position included, in a buffer with the model's mean density."""
        sparse = ~self.quotas.dense
        entries = int(self.quotas.counts[sparse].sum())
        if not entries:
            return 0.0
        numel = int(np.diff(self.layout.edges)[sparse].sum())
        scale = min(1.0, _LONGEST / numel)
        numel, entries = max(1, int(numel * scale)), max(1, int(entries * scale))
        return message_bytes(self.pool.wire, numel, entries) / entries

    def accumulated(self) -> Tensor:
        """float32 [D]: what the error feedback holds of each element, in the order of ``layout``; not a copy."""
        return self.memory.accumulated(0, self.layout.numel)

    def buffer(self, group: Group) -> Buffer:
        """The persistent buffer of a group, in the order and at the density in force."""
        return self.pool.buffers.get(group) or self.pool.build(group, self.layout, self.quotas)

    def set_density(self, density: float) -> None:
        """Sets the density of the next windows.

        Raises:
            TypeError: If it is not a number.
            ValueError: If it is outside (0, 1].
        """
        self._renew(check_density(density))

    def reorder(self, order: Sequence[int]) -> None:
        """Moves everything to a layout in which place ``j`` holds the tensor that was at place ``order[j]``."""
        self.layout = self.layout.reordered(order)
        self.memory.permute(order, self.layout.edges.tolist())
        self._renew(self.quotas.density)

    def _renew(self, density: float) -> None:
        self.quotas = tensor_quotas(self.layout, self.selector.sparsifier, density)
        self.__dict__.pop("shape", None)
        self.pool.forget()
