from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lab.virtual.transport import LocalTransport, local_transports
from tests.comm.exchanges import in_threads

WORLDS = [1, 2, 3, 5]


def noise(rank: int, size: int = 1000) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("world_size", WORLDS)
def test_threads_at_their_own_pace(world_size: int) -> None:
    def work(transport: LocalTransport) -> torch.Tensor:
        results = []
        pending = []
        for step in range(20):
            tensor = noise(100 * step + transport.rank, size=step + 1)
            pending.append((transport.all_reduce(tensor), tensor))
            if (step + transport.rank) % 3 == 0:  # ranks wait at different places
                for operation, reduced in pending:
                    operation.wait()
                    results.append(reduced)
                pending = []
        for operation, reduced in pending:
            operation.wait()
            results.append(reduced)
        return torch.cat(results)

    results = in_threads(local_transports(world_size), work)
    # in rank order, bit for bit
    expected = torch.cat([sum(noise(100 * s + r, size=s + 1) for r in range(world_size)) for s in range(20)])
    assert all(torch.equal(expected, result) for result in results)


def test_inputs_are_copied_at_launch_and_results_written_by_wait() -> None:
    first, second = local_transports(2)
    message, received = torch.ones(2), torch.zeros(4)
    work = first.all_gather(received, message)
    message.fill_(7.0)
    second.all_gather(torch.zeros(4), torch.full((2,), 2.0))
    assert received.tolist() == [0.0] * 4
    work.wait()
    work.wait()
    assert received.tolist() == [1.0, 1.0, 2.0, 2.0]


def test_wait_names_the_missing_ranks() -> None:
    ranks = local_transports(4, timeout=0.05)
    ranks[0].all_reduce(torch.ones(2))
    work = ranks[2].all_reduce(torch.ones(2))
    with pytest.raises(TimeoutError, match=r"operation 0, all_reduce \(sum\) of 2 .*ranks \[1, 3\] did not launch"):
        work.wait()


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (lambda t: t.all_reduce(torch.ones(3)), "all_reduce (sum) of 3 elements of torch.float32"),
        (lambda t: t.all_reduce(torch.ones(2), "max"), "all_reduce (max) of 2 elements of torch.float32"),
        (lambda t: t.all_reduce(torch.ones(2, dtype=torch.int32)), "all_reduce (sum) of 2 elements of torch.int32"),
        (lambda t: t.broadcast(torch.ones(2)), "broadcast (0) of 2 elements of torch.float32"),
    ],
)
def test_mismatch_raises_on_all_ranks(other: Callable[[LocalTransport], Any], text: str) -> None:
    first, second, third = local_transports(3)
    works = [first.all_reduce(torch.ones(2)), other(second), third.all_reduce(torch.ones(2))]
    for work in works:
        with pytest.raises(RuntimeError) as caught:
            work.wait()
        assert "rank 0 launched all_reduce (sum) of 2 elements of torch.float32" in str(caught.value)
        assert f"rank 1 launched {text}" in str(caught.value)


def test_on_done_is_called_once_when_the_last_rank_launches() -> None:
    first, second = local_transports(2)
    times: list[float] = []
    work = first.all_reduce(torch.ones(1))
    work.on_done(times.append)
    assert times == []
    second.all_reduce(torch.ones(1))
    assert len(times) == 1
    work.wait()
    assert len(times) == 1
    work.on_done(times.append)
    assert times[0] == times[1]


def test_gather_objects_gives_everyone_a_copy() -> None:
    results = in_threads(local_transports(3), lambda t: t.gather_objects({"rank": t.rank, "list": [1]}))
    assert results == [[{"rank": rank, "list": [1]} for rank in range(3)]] * 3
    results[0][1]["list"].append(2)
    assert results[1][1]["list"] == [1]


def test_bytes_are_counted_by_the_volume_of_ring_algorithms() -> None:
    ranks = local_transports(4)
    for transport in ranks:
        transport.all_gather(torch.zeros(400, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8))
        transport.all_reduce(torch.zeros(100))
        transport.broadcast(torch.zeros(10), source=1)
    assert [t.bytes_received for t in ranks] == [300 + 600 + 40, 300 + 600, 300 + 600 + 40, 300 + 600 + 40]
    assert [t.bytes_sent for t in ranks] == [900, 900 + 120, 900, 900]


def test_wrong_arguments() -> None:
    (solo,) = local_transports(1)
    with pytest.raises(ValueError, match="needs an output of 2, got 3"):
        solo.all_gather(torch.zeros(3), torch.zeros(2))
    with pytest.raises(ValueError, match="broadcast from rank 1, but ranks are 0 to 0"):
        solo.broadcast(torch.zeros(1), source=1)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        local_transports(0)
