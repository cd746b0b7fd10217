from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lab.virtual.transport import LocalTransport, local_transports


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
