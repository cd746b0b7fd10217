"""The checks for authors find every broken rule, and name it with the input that broke it.

That our own parts pass them is tested in tests/sparsify.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_safusion import ResidualMemory, Segments, Selection, TopK
from lightning_safusion.testing import check_memory, check_sparsifier


class Changed(TopK):
    """The right selection, which a broken rule changes."""

    def select(self, x: Tensor, segments: Segments, step: int) -> Selection:  # type: ignore[override]  # no survey
        indices, values = self.change(*self.selected(x, segments), segments, step)
        return Selection(indices, values, len(indices))

    def selected(self, x: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        found = super().select(x, segments, 0)
        return found.indices, found.values

    def change(self, indices: Tensor, values: Tensor, segments: Segments, step: int) -> tuple[Tensor, Tensor]:
        return indices, values


class Unsorted(Changed):
    def change(self, indices: Tensor, values: Tensor, segments: Segments, step: int) -> tuple[Tensor, Tensor]:
        return indices.flip(0), values.flip(0)


class Rounded(Changed):
    def change(self, indices: Tensor, values: Tensor, segments: Segments, step: int) -> tuple[Tensor, Tensor]:
        return indices, values.bfloat16().float()


class Empty(Changed):
    estimates = True  # type: ignore[assignment]

    def change(self, indices: Tensor, values: Tensor, segments: Segments, step: int) -> tuple[Tensor, Tensor]:
        return indices[1:] if len(indices) > 1 else indices, values[1:] if len(indices) > 1 else values


class Fewer(Changed):
    def change(self, indices: Tensor, values: Tensor, segments: Segments, step: int) -> tuple[Tensor, Tensor]:
        ends = np.cumsum(np.minimum(segments.quotas, segments.sizes))
        keep = torch.ones(len(indices), dtype=torch.bool)
        keep[ends[segments.quotas > 1] - 1] = False
        return indices[keep], values[keep]


class TooMany(Changed):
    def selected(self, x: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        live = np.flatnonzero((segments.quotas > 1) & (segments.sizes > segments.quotas))
        more = segments.quotas.copy()
        if len(live) > 1:  # as many as may be, but not where they may
            more[live[0]], more[live[1]] = more[live[0]] + 1, more[live[1]] - 1
        return super().selected(x, Segments(segments.edges, more, segments.keys, segments.shapes))


class Writes(Changed):
    def selected(self, x: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        x += 1
        return super().selected(x, segments)


class Draws(Changed):
    def change(self, indices: Tensor, values: Tensor, segments: Segments, step: int) -> tuple[Tensor, Tensor]:
        torch.rand(1)
        return indices, values


class OfItsOwn(Changed):
    def selected(self, x: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        noise = torch.from_numpy(np.random.default_rng().standard_normal(len(x)).astype(np.float32))
        indices, _ = super().selected(noise, segments)
        return indices, x[indices]


class Forgets(Changed):
    """Selects from the sum of all steps, which no checkpoint has."""

    total: Tensor | float = 0.0

    def selected(self, x: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        self.total = self.total + x.nan_to_num(0, 0, 0)
        indices, _ = super().selected(self.total, segments)
        return indices, x[indices]


class Pickled(Changed):
    def state_dict(self) -> dict[str, Any]:
        return {"threshold": Fewer()}


class NoRoom(Changed):
    def quota(self, numel: int, shape: tuple[int, ...], density: float) -> int:
        return int(numel * density)


class Raises(Changed):
    def selected(self, x: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        if x.isnan().any():
            raise ArithmeticError("a threshold is not a number")
        return super().selected(x, segments)


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (Unsorted, "positions that are not ascending"),
        (Rounded, "values are those of the span"),
        (Empty, "a segment with a quota sends at least one"),
        (Fewer, "estimates is False, so exactly the quotas"),
        (TooMany, "a segment sends at most its quota"),
        (Writes, "select must not change its input"),
        (Draws, "select must not draw from a global random generator"),
        (OfItsOwn, "a twin with the same input and steps selects the same"),
        (Forgets, "what state_dict returned makes a new one select"),
        (Pickled, "Weights only load failed"),
        (Raises, "a threshold is not a number"),
    ],
)
def test_every_broken_rule_of_a_compressor_is_named(kind: type[Changed], rule: str) -> None:
    told = rf"(?s){kind.__name__}: .*{rule}.*Input: case \d+, \d steps, segments of \d+ "
    with pytest.raises(AssertionError, match=told):
        check_sparsifier(kind)


def test_one_without_room_for_an_element_is_named() -> None:
    with pytest.raises(AssertionError, match=r"NoRoom: quota\(1, \(1,\), 0\.001\) is 0, and must be from 1 to 1"):
        check_sparsifier(NoRoom)


class Loses(ResidualMemory):
    def commit(self, start: int, indices: Tensor, sent: Tensor) -> None:
        self.views([0])[0].mul_(0.99)
        super().commit(start, indices, sent)


class Assigns(ResidualMemory):
    def __init__(self) -> None:
        super().__init__()
        self.conserves = False

    def commit(self, start: int, indices: Tensor, sent: Tensor) -> None:
        self.accumulated(start, 64)[indices] = 0


class Keeps(ResidualMemory):
    def withdraw(self, tensor: int, grad: Tensor) -> None: ...


class Stays(ResidualMemory):
    def permute(self, order: Sequence[int], edges: Sequence[int]) -> None: ...


class Begins(ResidualMemory):
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Scales(ResidualMemory):
    def compensate(self, ids: Sequence[int], grads: Sequence[Tensor], dense: Sequence[bool], norms: Tensor) -> None:
        super().compensate(ids, [grad.mul_(2) for grad in grads], dense, norms)


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (Loses, "it says that it conserves"),
        (Assigns, "commit changes elements that were sent"),
        (Keeps, "withdraw undoes compensate"),
        (Stays, "permute moves the state"),
        (Begins, "what state_dict returned restores"),
        (Scales, "compensate must not change gradients"),
    ],
)
def test_every_broken_rule_of_a_memory_is_named(kind: type[ResidualMemory], rule: str) -> None:
    with pytest.raises(AssertionError, match=f"{kind.__name__}: .*{rule}"):
        check_memory(kind)
