"""Checks of parts of your own, to call in a test of yours: ``check_sparsifier(MyCompressor)``."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.sparsify.base import Segments, Selection, Sparsifier, check_selection, span_segments
from lightning_safusion.sparsify.basic import TopK
from lightning_safusion.sparsify.memory.contract import Memory

__all__ = ["check_memory", "check_sparsifier"]

#: Values of finite spans, and of all.
FINITE = ("plain", "bfloat16", "ties", "zeros", "few non-zeros", "constant", "denormals", "rising", "heavy tail")
KINDS = (*FINITE, "NaN", "infinities")
_SIZES = (0, 1, 2, 5, 32, 300, 1024, 3000)
_DENSITIES = (0.001, 0.01, 0.1, 0.3, 0.9)


def check_sparsifier(make: Callable[[], Sparsifier], cases: int = 100) -> None:
    """Checks that a compressor keeps the rules of :class:`Sparsifier`: what it selects is valid for any span, depends
    on nothing but its input, its state and the step, and its state survives a checkpoint.

    Spans have ties, zeros, denormals, infinities and NaN, and are cut in many ways, some with a pool; they are the same
    in every call, small ones first.

    Args:
        make: Its class, or whatever else makes one without arguments.
        cases: How many jobs of one to three steps.

    Raises:
        AssertionError: If a rule is broken; names it, and the input that broke it.
    """
    sparsifier = make()
    name = type(sparsifier).__name__
    known_as = getattr(sparsifier, "name", None)
    _keep(isinstance(known_as, str), f"{name}: name is a text, for reports and settings; it is", known_as)
    for n, density in product(_SIZES, _DENSITIES):
        quota = sparsifier.quota(n, (n,), density)
        bounds = f"from {min(1, n)} to {n}"
        _keep(min(1, n) <= quota <= n, f"{name}: quota({n}, ({n},), {density}) is {quota}, and must be", bounds)
    for number in range(cases):
        case = _Case.draw(number, number / cases, sparsifier)
        try:
            _check_case(make, case)
        except Exception as error:  # what select raises is a broken rule as well
            raise AssertionError(f"{name}: {error!r}. Input: {case}") from error


@dataclass(frozen=True)
class _Case:
    """Spans of consecutive steps, float32 [N] each, and how all of them are cut."""

    number: int
    kinds: Sequence[str]
    segments: Segments
    spans: Sequence[Tensor]

    @classmethod
    def draw(cls, number: int, place: float, sparsifier: Sparsifier) -> _Case:
        """Case ``number``, at a place in [0, 1) of all of them, which bounds its size."""
        rng = np.random.default_rng(number)
        few = _SIZES[: 4 + int(4 * place) + 1]
        sizes = rng.choice(few, rng.integers(1, 6)).tolist()
        shapes = [(rows, n // rows) if n % (rows := int(rng.choice([1, 4]))) == 0 else (n,) for n in sizes]
        quotas = [int(rng.choice([0, min(1, n), n // 100, n // 9, n // 3, n])) for n in sizes]
        if type(sparsifier).quota is not Sparsifier.quota:  # it needs the room that it asks for
            density = float(rng.choice(_DENSITIES))
            asked = [sparsifier.quota(n, shape, density) for n, shape in zip(sizes, shapes, strict=True)]
            quotas = [quota if rng.random() < 0.8 else 0 for quota in asked]
        edges = np.cumsum([0, *sizes], dtype=np.int64)
        pool = int(rng.choice([0, 0, 0, 20]))
        segments = Segments(edges, np.array(quotas, np.int64), tuple(range(len(sizes))), tuple(shapes), pool)
        kinds = rng.choice(KINDS, len(sizes)).tolist()
        spans = [
            torch.from_numpy(np.concatenate([values_of(kind, n, rng) for kind, n in zip(kinds, sizes, strict=True)]))
            for _ in range(rng.integers(1, 4))
        ]
        return cls(number, kinds, segments, spans)

    def __str__(self) -> str:
        parts = [
            f"{size} {kind} as {shape}, quota {quota}"
            for size, kind, shape, quota in zip(
                self.segments.sizes, self.kinds, self.segments.shapes, self.segments.quotas, strict=True
            )
        ]
        pool = f" and a pool of {self.segments.pool}" if self.segments.pool else ""
        return f"case {self.number}, {len(self.spans)} steps, segments of {'; '.join(parts)}{pool}"


def _check_case(make: Callable[[], Sparsifier], case: _Case) -> None:
    one, other, segments = make(), make(), case.segments
    for step, x in enumerate(case.spans):
        before, generators = x.clone(), _generators()
        selection = one.select(x, segments, step)
        _keep(_same_bits(x, before), "select must not change its input, and did in step", step)
        _keep(generators == _generators(), "select must not draw from a global random generator, and did in step", step)
        counts = check_selected(selection, x, segments)
        if not one.estimates and not segments.pool:
            exact = np.minimum(segments.quotas, segments.sizes)
            _keep((counts == exact).all(), "estimates is False, so exactly the quotas are selected; it gave", counts)
        again = other.select(x, segments, step)
        _keep(_alike(selection, again), "a twin with the same input and steps selects the same, and did not in", step)
    stored = io.BytesIO()
    torch.save(one.state_dict(), stored)
    stored.seek(0)
    resumed = make()
    resumed.load_state_dict(torch.load(stored, weights_only=True))
    x, step = case.spans[0], len(case.spans)
    goes_on = _alike(one.select(x, segments, step), resumed.select(x, segments, step))
    _keep(goes_on, "what state_dict returned makes a new one select as this one would, and did not in step", step)


def check_selected(selection: Selection, x: Tensor, segments: Segments) -> np.ndarray:
    """Checks a selection from ``x`` (float32 [N]): its positions, the bits of its values, and every quota.

    Returns:
        int64 [M], how many elements of each segment.

    Raises:
        AssertionError, TypeError, ValueError: If a rule is broken.
    """
    check_selection(selection, segments, "tested")
    count = int(selection.count)
    indices, values = selection.indices[:count], selection.values[:count]
    _keep(_same_bits(values, x[indices]), "values are those of the span at the positions; they are", values)
    counts: np.ndarray = np.diff(np.searchsorted(indices.numpy(), segments.edges))
    return counts


def check_memory(make: Callable[[], Memory]) -> None:
    """Checks that a memory keeps the rules of :class:`Memory`: what it says about conserving is true, padding does no
    harm, a withdrawn gradient leaves no trace, and its state moves with its tensors and survives a checkpoint.

    Args:
        make: Its class, or whatever else makes one without arguments.

    Raises:
        AssertionError: If a rule is broken; names it.
    """
    for check in (_check_sums, _check_padding, _check_withdrawn, _check_moved):
        try:
            check(make)
        except Exception as error:
            raise AssertionError(f"{type(make()).__name__}: {error}") from error


_EDGES = (0, 6, 7, 20, 20, 64)  # of the tensors that memories are checked with
_ALL = range(len(_EDGES) - 1)


def _bound(make: Callable[[], Memory], steps: int = 0) -> Memory:
    memory = make()
    memory.bind(_EDGES, torch.device("cpu"))
    for step in range(steps if memory.state_dict() else 0):  # one without a state knows this window alone
        _compensate(memory, _gradients(step))
    return memory


def _gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(stop - start, generator=generator, dtype=torch.float32) for start, stop in pairwise(_EDGES)]


def _compensate(memory: Memory, grads: Sequence[Tensor], ids: Sequence[int] = _ALL) -> None:
    given = [grad.clone() for grad in grads]
    memory.compensate(ids, grads, [False] * len(grads), torch.stack([grad.norm() for grad in grads]))
    _keep(all(map(torch.equal, grads, given)), "compensate must not change", "gradients")


def _check_sums(make: Callable[[], Memory]) -> None:
    memory = _bound(make)
    given, used = torch.zeros(64, dtype=torch.float64), torch.zeros(64, dtype=torch.float64)
    for step in range(20):
        grads = _gradients(step)
        given += torch.cat(grads)
        _compensate(memory, grads)
        x = memory.accumulated(0, 64)
        _keep(x.dtype == torch.float32 and x.shape == (64,), "accumulated is float32 [N], and not", x.dtype)
        chosen = TopK().select(x, span_segments(64, 5), step).indices
        sent = x[chosen].bfloat16().float()
        used += memory.received(0, 64, torch.zeros(64, dtype=torch.float32).index_add_(0, chosen, sent)).double()
        memory.commit(0, chosen, sent)
        memory.settle(0, 64)
    apart = float((used + memory.accumulated(0, 64) - given).abs().max())
    rule = "it says that it conserves: what the optimizer gets and what is left are all gradients, but for"
    _keep(apart < 1e-4 or not memory.conserves, rule, apart)


def _check_padding(make: Callable[[], Memory]) -> None:
    memory = _bound(make)
    _compensate(memory, _gradients(0))
    before = memory.accumulated(0, 64).clone()
    # position 0 is padding only, position 3 is both sent and repeated by padding
    memory.commit(
        7,
        torch.tensor([3, 0, 3, 0], dtype=torch.int64),
        torch.cat([before[10:11], torch.zeros(3, dtype=torch.float32)]),
    )
    others = torch.arange(64) != 10
    after = memory.accumulated(0, 64)
    _keep(torch.equal(after[others], before[others]), "commit changes elements that were sent, and changed", "others")


def _check_withdrawn(make: Callable[[], Memory]) -> None:
    memory, twin, later = _bound(make, 3), _bound(make, 3), _gradients(9)
    _compensate(memory, later)
    for tensor in _ALL:
        memory.withdraw(tensor, later[tensor])
    for what in ("at once", "after the next gradient"):
        apart = (memory.accumulated(0, 64) - twin.accumulated(0, 64)).abs().max()
        _keep(float(apart) < 1e-4, f"withdraw undoes compensate; {what} it is off by", float(apart))
        _compensate(memory, _gradients(4))
        _compensate(twin, _gradients(4))


def _check_moved(make: Callable[[], Memory]) -> None:
    memory = _bound(make, 2)
    if not memory.state_dict():
        return
    order = [4, 2, 0, 3, 1]
    sizes = [_EDGES[i + 1] - _EDGES[i] for i in order]
    edges: list[int] = np.cumsum([0, *sizes]).tolist()
    moved = torch.cat([memory.accumulated(_EDGES[i], _EDGES[i + 1]) for i in order])
    memory.permute(order, edges)
    _keep(torch.equal(memory.accumulated(0, 64), moved), "permute moves the state with its tensors; it gave", edges)
    resumed = make()
    resumed.bind(edges, torch.device("cpu"))
    resumed.load_state_dict({name: value.clone() for name, value in memory.state_dict().items()})
    for each in (memory, resumed):
        _compensate(each, [torch.ones(sizes[1], dtype=torch.float32)], [1])
    same = torch.equal(memory.accumulated(0, 64), resumed.accumulated(0, 64))
    _keep(same, "what state_dict returned restores the memory; it differs after", "one more gradient")


def _keep(kept: Any, rule: str, found: object) -> None:
    if not kept:
        raise AssertionError(f"{rule} {found}")


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))  # NaN and -0 too


def _alike(one: Selection, other: Selection) -> bool:
    return torch.equal(one.indices[: int(one.count)], other.indices[: int(other.count)])


def _generators() -> tuple[object, ...]:
    return torch.get_rng_state().numpy().tobytes(), repr(np.random.get_state()), random.getstate()


def values_of(kind: str, size: int, rng: np.random.Generator) -> np.ndarray:
    """float32 [size] of a kind of :data:`KINDS`."""
    x = rng.standard_normal(size).astype(np.float32)
    makers: Mapping[str, Callable[[], np.ndarray]] = {
        "bfloat16": lambda: torch.from_numpy(x).bfloat16().float().numpy(),
        "ties": lambda: np.round(2 * x),
        "zeros": lambda: x * 0,  # of both signs
        "few non-zeros": lambda: np.where(rng.random(size) < 0.005, x, -0.0).astype(np.float32),
        "constant": lambda: np.full(size, -0.5, np.float32),
        "denormals": lambda: (np.arange(size) % 50 * 1e-44).astype(np.float32),
        "rising": lambda: np.arange(size, dtype=np.float32),
        "heavy tail": lambda: -(np.abs(x) ** 5),
        "NaN": lambda: np.where(rng.random(size) < 0.02, np.float32(np.nan), x),
        "infinities": lambda: np.where(rng.random(size) < 0.02, np.float32(-np.inf), x),
    }
    return makers[kind]() if kind in makers else x
