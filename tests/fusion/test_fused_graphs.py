"""Selections that are replayed, as CUDA graphs are: the same numbers, and nothing of a window in the graph.

No device is here to capture a graph. A stand-in does what one does: it notes what is started, with its arguments,
without doing it, and does it when it is replayed.

Covers: all-gather and shards, pooled quotas, units of the update; gradients that move; notices; a device that captures
    nothing; the switch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from lab.gpu.buffers import DECAY, Case, Rank
from lightning_safusion.kernels.cuda import buffer, graphs, owners
from lightning_safusion.kernels.cuda.graphs import Recorded, Work, recorded
from tests.cluster import Cluster, specs
from tests.fusion.test_fused import HOST, compare_in
from tests.quick import slow

SHAPES = ((30, 20), (40,), (1,), (90,))


class Tape(TorchDispatchMode):
    """What was started, and was not done."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[Work] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.zero_.default:
            self.started.append(partial(func, *args))
            return args[0]
        assert func.is_view, f"{func} cannot be in a graph"
        return func(*args, **(kwargs or {}))


class Tapes:
    """Takes the place of a device's graphs.

    Attributes:
        captured, replayed: How many were.
    """

    def __init__(self, launch: Callable[..., None]) -> None:
        self._launch, self._open = launch, threading.local()
        self.captured = self.replayed = 0

    def launch(self, *arguments: Any, **constants: Any) -> None:
        tape = getattr(self._open, "tape", None)
        if tape is None:
            self._launch(*arguments, **constants)
        else:
            tape.started.append(partial(self._launch, *arguments, **constants))

    def capture(self, work: Work) -> Work:
        self._open.tape = tape = Tape()
        try:
            with tape:
                work()
        finally:
            self._open.tape = None
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            for start in tape.started:
                start()

        return replay


@pytest.fixture
def tapes(make_fused: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch) -> Tapes:
    made = Tapes(buffer.launch)
    monkeypatch.setattr(buffer, "launch", made.launch)
    for module in (buffer, owners):
        monkeypatch.setattr(module, "recorded", lambda device: Recorded(made.capture))
    return made


def windows(
    cluster: Cluster, steps: int, moved_at: int = -1, freed_at: int = -1, moments: list[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Means and residuals of all windows; gradients lie in the same memory, but for once, and so do moments, which
    become others then, and what buffers share."""
    grads, found = cluster.random_grads(0), []

    def run(rank: int) -> None:
        for index in cluster.order:
            cluster.controllers[rank].push(index, grads[rank][index], True)
        cluster.controllers[rank].drain()

    for step in range(steps):
        if step == moved_at:
            grads = cluster.random_grads(step)
            if moments:
                moments[:] = [moment.flip(0) for moment in moments]
        if step == freed_at:
            for controller in cluster.controllers:
                controller._free_shared()
        for ours, new in zip(grads, cluster.random_grads(step), strict=True):
            for grad, values in zip(ours, new, strict=True):
                grad.copy_(values)
        cluster.each(run)
        found += [grad.clone() for own in grads for grad in own] + cluster.residuals()
    return found


@pytest.mark.parametrize(
    ("workers", "by_update", "options"),
    [
        (1, True, {"collective": "sharded", "wire": "q4", "memory": "decoupled"}),
        *slow([(2, False, {"quota": "pooled"}), (2, True, {"memory": "decoupled"})]),
    ],
)
def test_replays_give_the_numbers_of_launches(
    make_fused: Callable[..., Cluster], tapes: Tapes, workers: int, by_update: bool, options: Any
) -> None:
    options = {"collective": "allgather", "wire": "eliasfano-q4"} | options
    clusters = [make_fused(workers, specs(SHAPES), deferred=deferred, **options) for deferred in (True, False)]
    moments = compare_in(clusters) if by_update else []
    ours = windows(clusters[0], 5, 2, moments=moments)
    moments[:] = [moment.flip(0) for moment in moments]  # as they were
    theirs = windows(clusters[1], 5, 2, moments=moments)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert tapes.captured >= 2 * workers  # by each, again when gradients had moved
    assert tapes.replayed > tapes.captured


def test_notices_are_in_the_message_of_their_window_only(tapes: Tapes) -> None:
    rank, read = Rank.of(Case((100, 40)), 0, 1), []
    rank.kernels.locate(rank.grads, None)
    for notices in (0, 0, 0, 4, 0, 0, 0):
        rank.kernels.select(DECAY, None)
        rank.kernels.pack(notices)
        read.append(int(rank.kernels.sent[len(rank.grads)]))
    assert read == [0, 0, 0, 4, 0, 0, 0]
    assert tapes.captured == 3  # the selection; the message without notices, twice


@pytest.mark.slow
def test_memory_that_was_freed_is_in_no_graph(make_fused: Callable[..., Cluster], tapes: Tapes) -> None:
    options = {"collective": "sharded", "wire": "q4", "memory": "decoupled"}
    clusters = [make_fused(2, specs(SHAPES), deferred=deferred, **options) for deferred in (True, False)]
    ours, theirs = (windows(cluster, 6, freed_at=3) for cluster in clusters)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert tapes.captured >= 2 * 2  # again when it was other memory


def test_a_device_that_captures_nothing_starts_kernels(caplog: pytest.LogCaptureFixture) -> None:
    def broken(work: Work) -> Work:
        raise RuntimeError("operation not permitted when stream is capturing")

    done: list[int] = []
    work = Recorded(broken)
    for _ in range(4):
        work.run("key", lambda: done.append(1))
    assert len(done) == 4
    assert [record.message for record in caplog.records if "not permitted" in record.message] == [
        "kernels are started one by one, because CUDA makes no graph of them: operation not permitted when stream is "
        "capturing"
    ]


def test_a_capture_that_fails_leaves_the_allocator_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused:
        def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
            """Begins."""

        def capture_end(self) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    ended: list[Any] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Refused)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *args: ended.append(args), raising=False)
    with pytest.raises(RuntimeError, match="previous error"):
        graphs.capture(lambda: None)
    assert ended == [(1, (0, 7))]


def test_a_graph_is_not_used_after_the_device_was_told_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[torch.Tensor] = []

    def capture(work: Work) -> Work:
        used.append(rank.kernels.located.addresses)  # a graph has its address
        return lambda: None

    monkeypatch.setattr(buffer, "recorded", lambda device: Recorded(capture))
    rank = Rank.of(Case((100, 40)), 0, 1, [0, 0])
    kernels, weighing, moved = rank.kernels, rank.weighing, [grad.clone() for grad in rank.grads]
    for grads in (rank.grads, rank.grads, rank.grads, moved, moved):
        kernels.locate(grads, weighing)
        kernels.select(DECAY, weighing)
    assert len(used) == 2
    assert used[-1] is kernels.located.addresses
    assert used[0] is not used[1]


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    for value, device, on in (("0", cuda, False), ("1", cuda, True), ("1", HOST, False)):
        monkeypatch.setenv(graphs.SWITCH, value)
        assert (recorded(device)._capture is not None) == on
    monkeypatch.delenv(graphs.SWITCH)
    assert recorded(cuda)._capture is None
    monkeypatch.setenv(graphs.SWITCH, "yes")
    with pytest.raises(ValueError, match=r"SAFUSION_CUDA_GRAPHS is 'yes': 1 starts"):
        recorded(cuda)
