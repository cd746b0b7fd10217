"""How many bytes a window moves between the device and its memory, counted from the kernels' own loads and stores.

Memory moves in sectors of 32 bytes. What a program reads that it has read or written before comes from a cache.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lab.gpu.buffers import DECAY, HOST, Case, Rank, gather
from lightning_safusion.kernels.cuda import launch
from lightning_safusion.kernels.cuda.buffer import Weighing
from lightning_safusion.kernels.cuda.chosen import PlacedKernels, ThresholdKernels
from lightning_safusion.kernels.cuda.packer import Packer
from lightning_safusion.kernels.cuda.window import WindowKernels
from lightning_safusion.sparsify.basic import TopK
from lightning_safusion.tools.plan import work
from lightning_safusion.tools.plan.paths import FusedShards
from tests.kernels.cuda.buffers import Owner, kernels_of

pytestmark = [
    pytest.mark.slow,  # the interpreter counts every access
    pytest.mark.skipif(torch.cuda.is_available(), reason="counts in the interpreter"),
]

SECTOR = 32


class Traffic:
    """Sectors of some tensors that the kernels move, by kernel."""

    def __init__(self, builder: Any) -> None:
        self.bytes: dict[str, int] = defaultdict(int)
        #: Counted only from :func:`write` on, as other kernels have something else there.
        self.entries = torch.empty(0)
        self._builder, self._runs = builder, [(0, 0)]
        self._kernel, self._program, self._known = "", -1, {0}

    def follow(self, *tensors: Tensor) -> None:
        """Counts accesses to these."""
        self._runs = [_run(tensor) for tensor in tensors]

    def begin(self, kernel: str) -> None:
        self._kernel, self._program = kernel, -1
        if kernel == "write":
            self._runs.append(_run(self.entries))

    def moved(self, addresses: np.ndarray, mask: np.ndarray, both: bool = False, written: bool = False) -> None:
        if self._builder.grid_idx[0] != self._program:
            self._program, self._known = self._builder.grid_idx[0], set()
        places = np.broadcast_to(addresses, np.broadcast_shapes(addresses.shape, mask.shape))[
            np.broadcast_to(mask, np.broadcast_shapes(addresses.shape, mask.shape)).astype(bool)
        ].astype(np.int64)
        inside = np.zeros(len(places), bool)
        for start, stop in self._runs:
            inside |= (places >= start) & (places < stop)
        for sector in np.unique(places[inside] // SECTOR).tolist():
            for kind in ("read", "write"):
                key = (kind, sector)
                wanted = both or (kind == "write") == written
                if wanted and key not in self._known and not (kind == "read" and ("write", sector) in self._known):
                    self.bytes[self._kernel] += SECTOR
                if wanted:
                    self._known.add(key)


def _run(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    builder = pytest.importorskip("triton.runtime.interpreter").interpreter_builder
    found, start = Traffic(builder), launch.launch
    load, store, change = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw

    def loaded(ptrs: Any, mask: Any, *rest: Any) -> Any:
        found.moved(ptrs.data, mask.data)
        return load(ptrs, mask, *rest)

    def stored(ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        found.moved(ptrs.data, mask.data, written=True)
        return store(ptrs, value, mask, *rest)

    def changed(operation: Any, ptr: Any, value: Any, mask: Any, *rest: Any) -> Any:
        found.moved(ptr.data, mask.data, both=True)
        return change(operation, ptr, value, mask, *rest)

    def launched(kernel: Any, *arguments: Any, **constants: Any) -> None:
        found.begin(kernel.fn.__name__)
        start(kernel, *arguments, **constants)

    monkeypatch.setattr(builder, "create_masked_load", loaded)
    monkeypatch.setattr(builder, "create_masked_store", stored)
    monkeypatch.setattr(builder, "create_atomic_rmw", changed)
    monkeypatch.setattr(launch, "launch", launched)
    return found


def follow(traffic: Traffic, packer: Packer, known: Sequence[Tensor]) -> None:
    """Counts accesses to these, to what a packer has between two kernels, and to what its owner holds."""
    space, take = packer.workspace, packer.take

    def followed(more: Sequence[int] = (), **options: bool) -> list[Tensor]:
        held = take(more, **options)
        traffic.entries = packer.entries
        traffic.follow(*known, packer._lists, *held)
        return held

    def zeroed(sizes: Sequence[int], zeros: int, take: Any = space.take) -> list[Tensor]:
        traffic.bytes["zero"] += 4 * sum(sizes[:zeros])
        views: list[Tensor] = take(sizes, zeros)
        return views

    packer.take, space.take = followed, zeroed  # type: ignore[method-assign]


def counted(traffic: Traffic, stages: Sequence[dict[str, work.Work]], elements: float, most: float) -> None:
    """The kernels move the bytes that the package counts, and no more than ``most`` per element."""
    each = {name: count / elements for name, count in traffic.bytes.items()}
    print({name: round(count, 2) for name, count in each.items()}, round(sum(each.values()), 2))
    assert sum(each.values()) <= most
    told: Counter[str] = Counter()
    for stage in stages:
        told.update({name: part.nbytes / elements for name, part in stage.items()})
    for name, count in each.items():
        assert count == pytest.approx(told[name], abs=0.15), name


@pytest.mark.parametrize(
    ("moments", "density", "workers", "most"), [(None, 0.1, 2, 33), ([0, 0], 0.02, 2, 32), ([0, 0], 0.1, 8, 42)]
)
def test_bytes_of_an_element(
    traffic: Traffic, moments: list[int] | None, density: float, workers: int, most: float
) -> None:
    case = Case((40_000, 20_000), density, world_size=workers)
    *others, rank = ranks = [Rank.of(case, number, 3, moments) for number in range(workers)]
    for other in others:
        other.kernels.sent.copy_(other.message(*other.expected()))
    weighing = rank.weighing
    rank.kernels.locate(rank.grads, weighing)
    own = [moment for moment in rank.moments or [] if moment is not None]
    keys = [] if weighing is None else [weighing.keys]
    known = [rank.memory, rank.kernels.sent, rank.kernels.received, *rank.grads, *keys, *own]
    follow(traffic, rank.kernels.packer, known)
    rank.kernels.select(DECAY, weighing)
    rank.kernels.pack(0)
    gather(ranks)
    window = WindowKernels(HOST)
    rank.kernels.decode(DECAY, window.status)
    window.commit([rank.kernels])
    elements = float(sum(case.sizes))
    span = work.Span(elements, density * elements, len(case.sizes), by_update=moments is not None)
    stages = work.selection(span), work.decoding(span, workers), work.commitment(span)
    counted(traffic, stages, elements, most)


def test_bytes_of_an_element_that_is_chosen_or_exceeds_a_threshold(traffic: Traffic) -> None:
    case = Case((40_000, 20_000), 0.1)
    rank, elements, segments = Rank.of(case, 0, 3), float(sum(case.sizes)), case.segments
    span = work.Span(elements, 0.1 * elements, len(case.sizes))
    selection = TopK().select(rank.memory, segments, 0)
    placing = kernels_of(PlacedKernels, rank)
    placing.locate(rank.grads, None)
    placing.add(DECAY)
    parts = selection.indices, selection.values, placing.packer.entries, placing.sent
    traffic.bytes.clear()
    traffic.follow(*parts)
    placing.place(selection)
    assert traffic.bytes["place"] == pytest.approx(work.placement(span)["write"].nbytes, rel=0.15)
    estimating = kernels_of(ThresholdKernels, rank)
    estimating.locate(rank.grads, None)
    view = estimating.add(DECAY, None, segments)
    traffic.bytes.clear()
    traffic.follow(rank.memory)
    view.moments()
    for _ in range(3):
        view.count_above(torch.zeros(len(case.sizes)))
    assert sum(traffic.bytes.values()) == pytest.approx(work.estimation(span, 2).nbytes, rel=0.01)


@pytest.mark.parametrize(
    ("workers", "by_update", "most"),
    [
        (2, False, 54),
        (2, True, 62),  # more than the budget of 56: the default takes shards from 16 workers on
        (8, True, 57),  # tensors are short, and their candidates not listed
    ],
)
def test_bytes_of_an_element_where_owners_reduce(traffic: Traffic, workers: int, by_update: bool, most: float) -> None:
    sizes, density = (40_000, 20_000), 0.1
    owner, numel = Owner(workers, sizes, density), sum(sizes)
    kernels, mail, weighing = owner.kernels, owner.mail, None
    known = [kernels.memory, mail.sending, mail.arriving, mail.delivering, mail.gathered, kernels._sums, *owner.grads]
    if by_update:  # roots of 1, so that keys are the elements, as the CPU's are
        moments, keys = [torch.ones(size) for size in sizes], torch.empty(numel, dtype=torch.int32)
        weighing, known = Weighing(moments, [1e-8] * 2, keys), [*known, keys, *moments]
    # an owner holds its sums and, where they differ, their keys
    for packer in (kernels.packer, kernels._owner):
        follow(traffic, packer, known)
    owner.check(weighing)
    span = work.Span(numel, density * numel, len(sizes), by_update=by_update)
    path = FusedShards(workers, owner.exchange.scattered, owner.exchange.gathered)
    counted(traffic, (path.selection(span), path.decoding(span, workers), path.commitment(span)), numel, most)
