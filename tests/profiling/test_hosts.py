"""Clocks of hosts that were started at different times."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_safusion.profiling.hosts import clock_offsets, meet
from tests.process_group import run_ranks


def meetings(offsets: list[float], seed: int, rounds: int = 8) -> np.ndarray:
    """Ranks come to a barrier at random moments and leave it after random delays, by clocks of their own."""
    generator = np.random.default_rng(seed)
    count = len(offsets)
    before = np.cumsum(generator.exponential(2e-3, (rounds, 1)), axis=0) + generator.exponential(3e-4, (rounds, count))
    after = before.max(axis=1, keepdims=True) + generator.exponential(1e-4, (rounds, count))
    return np.stack([before.T, after.T], axis=1) + np.array(offsets)[:, None, None]


@pytest.mark.parametrize("seed", range(20))
def test_the_true_offset_is_within_the_error(seed: int) -> None:
    true = np.array([0.0, 1234.5, -0.25])
    offsets, errors = clock_offsets(meetings(true.tolist(), seed))
    assert (np.abs(offsets - true) <= errors + 1e-12).all()
    assert (errors < 1e-3).all()
    assert offsets[0] == errors[0] == 0.0


def test_processes_of_one_host_share_a_clock() -> None:
    offsets, errors = clock_offsets(meetings([7.0, 7.0, 7.0], seed=3))
    assert not offsets.any()
    assert not errors.any()


def test_real_ranks_of_one_host_share_a_clock() -> None:
    mine, theirs = run_ranks(2, lambda rank: meet(torch.device("cpu")))
    np.testing.assert_array_equal(mine, theirs)
    assert mine.shape == (2, 2, 8)
    assert (mine[:, 0] < mine[:, 1]).all()
    assert not clock_offsets(mine)[0].any()


def test_a_single_process_has_its_own_clock() -> None:
    offsets, errors = clock_offsets(meet(torch.device("cpu"), rounds=2))
    assert offsets.tolist() == errors.tolist() == [0.0]
