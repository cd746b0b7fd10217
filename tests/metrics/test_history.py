"""The statistics of the monitor: sums of many samples, and their heat map."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_safusion.metrics import MissingRateStatistics, TensorFigures

NAMES = ("stem", "body", "head")


def sample(missing: tuple[int, ...], names: tuple[str, ...] = NAMES, ranks: int = 2) -> TensorFigures:
    """Of one window, summed over ranks: on how many of them each tensor was missing."""
    sums = torch.zeros(6, len(names), dtype=torch.float64)
    sums[0], sums[1], sums[2] = ranks, torch.tensor(missing), 10 * ranks
    sums[3] = ranks - sums[1]
    return TensorFigures(names, sums)


def test_a_sample_is_described_by_its_own_shares() -> None:
    statistics = MissingRateStatistics(NAMES)
    statistics.add(1, sample((2, 2, 2)))
    assert statistics.add(2, sample((0, 1, 2))) == {
        "missing_rate": 0.5,
        "missing_on_all_ranks": pytest.approx(1 / 3),
        "achieved_density": 0.05,
    }
    nothing = TensorFigures(NAMES, torch.zeros(6, 3, dtype=torch.float64))
    assert statistics.add(3, nothing) == {}


def test_worst_tensors_come_first_and_those_never_missing_do_not_come() -> None:
    statistics = MissingRateStatistics((*NAMES, "frozen"))
    for _ in range(4):
        statistics.add(0, sample((1, 0, 2)))
    statistics.add(0, sample((2, 0, 2)))
    assert [row.name for row in statistics.rows()] == list(NAMES)
    head, stem = statistics.worst(5)
    assert (head.name, head.missing, head.everywhere, head.density, head.error) == ("head", 1.0, 1.0, 0.0, None)
    assert (stem.name, stem.missing, stem.everywhere, stem.density) == ("stem", 0.6, 0.2, 0.04)
    assert statistics.worst(1) == [head]


def test_columns_are_merged_when_the_picture_is_full() -> None:
    statistics = MissingRateStatistics(NAMES, columns=4)
    for step in range(23):
        statistics.add(step, sample((2 if step < 8 else 0, step % 2, 2)))
        assert statistics.rates().shape[1] <= 4
    # 8 samples in a column
    np.testing.assert_array_equal(statistics.rates(), [[1, 0, 0], [0.25, 0.25, 3 / 14], [1, 1, 1]])
    assert statistics.steps == [0, 8, 16]


def test_tensors_that_come_later_leave_a_gap() -> None:
    statistics = MissingRateStatistics(NAMES)
    statistics.add(0, sample((1,), ("head",)))
    statistics.add(1, sample((0, 1), ("stem", "head")))
    np.testing.assert_array_equal(statistics.rates(), [[np.nan, 0], [np.nan, np.nan], [0.5, 0.5]])


def test_state_goes_through_a_checkpoint(tmp_path: Any) -> None:
    statistics = MissingRateStatistics(NAMES, columns=4)
    for step in range(7):
        statistics.add(step, sample((2, step % 3, 1)))
    torch.save(statistics.state_dict(), tmp_path / "state.pt")
    again = MissingRateStatistics.from_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for step in range(7, 13):
        for each in (statistics, again):
            each.add(step, sample((2, step % 3, 1)))
    np.testing.assert_array_equal(again.rates(), statistics.rates())
    assert again.rows() == statistics.rows()
    assert again.state_dict()["steps"] == statistics.state_dict()["steps"]
