from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

from lab.virtual.transport import LocalTransport, local_transports
from lightning_safusion.comm import calibrate as calibration
from lightning_safusion.comm.calibrate import calibrate
from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.comm.transport.interface import LaterWork, ReduceOp, Work
from lightning_safusion.comm.transport.torch_backend import SoloTransport, default_transport
from lightning_safusion.fusion import build
from tests.cluster import Cluster, settings
from tests.comm.exchanges import in_threads
from tests.process_group import run_ranks

CPU = torch.device("cpu")


class Clock(threading.local):
    """A virtual clock for every thread, so that no test depends on the speed of the machine."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowTransport(LocalTransport):
    """A virtual worker on a network of known speed; remembers the sizes that it gathered."""

    def __init__(self, transport: LocalTransport, clock: Clock, cost: LinearCost) -> None:
        super().__init__(transport.rank, transport._exchange)
        self.clock = clock
        self.cost = cost
        self.sizes: list[int] = []

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        self.sizes.append(tensor.nbytes)
        self.clock.now += self.cost(tensor.nbytes)
        return super().all_gather(output, tensor)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        self.clock.now += 2 * self.cost(tensor.nbytes)
        return super().all_reduce(tensor, op)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def calibrate_all(ranks: list[SlowTransport], budget_s: float) -> list[dict[str, LinearCost]]:
    return in_threads(ranks, lambda transport: calibrate(transport, CPU, budget_s))


def on_gloo(rank: int) -> dict[str, LinearCost]:
    return calibrate(default_transport(), CPU, budget_s=0.2)


def test_ranks_agree_bit_for_bit() -> None:
    first, *others = run_ranks(3, on_gloo)
    assert all(first == other for other in others)
    assert set(first) == {"allgather", "allreduce"}
    for cost in first.values():
        assert min(cost.fixed, cost.per_byte) >= 0


def test_an_engine_begins_with_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, LinearCost]] = []
    monkeypatch.setattr(build, "calibrate", lambda *given: found.append(calibrate(*given)) or found[-1])
    cluster = Cluster(2, lambda: settings(collective="auto", fusion="adaptive"), measure=True)
    cluster.close()
    assert found[0] == found[1]


def test_recovers_the_speed_of_a_network(clock: Clock) -> None:
    true = LinearCost(1e-3, 2e-8)  # 50 MB/s
    ranks = [SlowTransport(transport, clock, true) for transport in local_transports(3)]
    results = calibrate_all(ranks, budget_s=10.0)
    assert set(ranks[0].sizes) == {4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20}
    for result in results:
        assert result == results[0]
        assert result["allgather"].fixed == pytest.approx(1e-3)
        assert result["allgather"].per_byte == pytest.approx(2e-8)
        assert result["allreduce"].fixed == pytest.approx(2e-3)
        assert result["allreduce"].per_byte == pytest.approx(4e-8)


def test_the_slowest_rank_counts(clock: Clock) -> None:
    costs = [LinearCost(1e-5, 1e-10), LinearCost(5e-3, 1e-9)]
    ranks = [SlowTransport(t, clock, cost) for t, cost in zip(local_transports(2), costs, strict=True)]
    results = calibrate_all(ranks, budget_s=10.0)
    assert results[0] == results[1]
    assert results[0]["allgather"].fixed == pytest.approx(5e-3)
    assert results[0]["allgather"].per_byte == pytest.approx(1e-9)


@pytest.mark.parametrize(
    ("per_byte", "largest"),
    [
        (1e-5, 16 << 10),  # the slope needs two sizes
        (1e-7, 1 << 20),  # 16 KiB take hardly longer than 4: on a busy machine that could be any slope, or none
    ],
)
def test_stops_growing_when_operations_are_slow(clock: Clock, per_byte: float, largest: int) -> None:
    ranks = [SlowTransport(transport, clock, LinearCost(0.06, per_byte)) for transport in local_transports(2)]
    results = calibrate_all(ranks, budget_s=100.0)
    assert ranks[0].sizes == ranks[1].sizes
    assert max(ranks[0].sizes) == largest
    assert all(ranks[0].sizes.count(size) == 1 for size in set(ranks[0].sizes) if size > 4 << 10)
    assert results[0]["allgather"].per_byte == pytest.approx(per_byte)


def test_the_budget_of_rank_0_bounds_the_time(clock: Clock) -> None:
    costs = [LinearCost(0.01, 0.0), LinearCost(0.001, 0.0)]  # by its own clock, rank 1 has time left
    ranks = [SlowTransport(t, clock, cost) for t, cost in zip(local_transports(2), costs, strict=True)]
    calibrate_all(ranks, budget_s=0.3)
    assert ranks[0].sizes == ranks[1].sizes
    assert len(ranks[0].sizes) * 0.03 <= 0.3 + 0.03  # the warm-up is not part of the budget
    assert len(set(ranks[0].sizes)) >= 2


class LatencyBound(SlowTransport):
    """A library that takes as long for any message up to a MiB, as NCCL nearly does."""

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        return super().all_gather(output, tensor) if tensor.nbytes > 1 << 20 else self._at_once(tensor)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        if tensor.nbytes <= 1 << 20:
            self.clock.now += self.cost.fixed
            return LocalTransport.all_reduce(self, tensor, op)
        return super().all_reduce(tensor, op)

    def _at_once(self, tensor: Tensor) -> Work:
        self.sizes.append(tensor.nbytes)
        self.clock.now += self.cost.fixed
        return LaterWork(lambda: None)


def test_devices_are_timed_beyond_the_sizes_that_show_latency_alone(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = calibration._sizes(torch.device("cuda"))
    assert (sizes[-1], calibration._sizes(CPU)[-1]) == (64 << 20, 1 << 20)
    monkeypatch.setattr(calibration, "_sizes", lambda _: sizes)
    ranks = [LatencyBound(transport, clock, LinearCost(1e-4, 1e-10)) for transport in local_transports(2)]
    (result, _) = calibrate_all(ranks, budget_s=0.1)
    assert max(ranks[0].sizes) == 64 << 20
    assert result["allgather"](100e6) == pytest.approx(100e6 * 1e-10, rel=0.1)
    assert result["allreduce"](100e6) == pytest.approx(100e6 * 2e-10, rel=0.1)
    assert result["allgather"](1e5) == pytest.approx(1e-4, rel=0.2)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 64, 1000])
def test_many_workers_gather_shorter_messages(world_size: int) -> None:
    messages = [calibration._message(size, world_size) for size in calibration._sizes(torch.device("cuda"))]
    assert messages[0] == 4 << 10
    assert all(message % 128 == 0 and message * world_size <= 256 << 20 for message in messages)


def test_one_worker() -> None:
    assert set(calibrate(SoloTransport(), CPU, budget_s=0.01)) == {"allgather", "allreduce"}
