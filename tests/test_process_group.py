from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.process_group import run_ranks


def test_results_come_in_rank_order() -> None:
    captured = torch.arange(3)  # forked children see closures
    results = run_ranks(3, lambda rank, factor: (rank, dist.get_world_size(), captured * factor * rank), 10)
    assert [result[:2] for result in results] == [(0, 3), (1, 3), (2, 3)]
    assert results[2][2].tolist() == [0, 20, 40]


def test_exceptions_carry_their_traceback() -> None:
    def fail(rank: int) -> None:
        if rank == 1:
            raise KeyError("the cause")
        dist.barrier()  # the others notice that rank 1 is gone, or are ended

    with pytest.raises(RuntimeError, match=r"(?s)^rank 1 of 2 failed:.*in fail.*the cause"):
        run_ranks(2, fail)


def test_a_process_that_dies_is_reported() -> None:
    with pytest.raises(RuntimeError, match="rank 0 of 1 failed:\nthe process died without a report"):
        run_ranks(1, lambda rank: os._exit(3))


def test_a_process_that_hangs_is_ended() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2 did not end within 1.0 s"):
        run_ranks(2, lambda rank: time.sleep(60 * rank), timeout=1.0)


def test_backward_works_after_a_backward_in_the_parent() -> None:
    def backward(rank: int) -> float:
        x = torch.ones(100, 100, requires_grad=True)
        (x @ x).sum().backward()
        assert x.grad is not None
        return float(x.grad.sum())

    assert backward(0) == run_ranks(1, backward)[0]
