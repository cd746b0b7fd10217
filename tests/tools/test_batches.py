"""Batches by which workers of different speed would end together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_safusion.tools.batches import _rounded, better_batches, slow_rank


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [
        ([0.01, 0.02], 1),
        ([0.0100, 0.0109], None),  # by less than a millisecond
        ([1.0, 1.04, 1.0], None),  # by less than 5 %
        ([1.0, 1.1, 1.0], 1),
        ([2.0], None),
        ([], None),
    ],
)
def test_who_is_slow(seconds: list[float], slow: int | None) -> None:
    assert slow_rank(seconds) == slow


def test_batches_go_by_the_speed_of_a_sample() -> None:
    # 800, 800 and 400 samples a second, of 48 together
    text = better_batches([0.02, 0.01, 0.06], [16, 8, 24])
    assert text == "batches of 19 on rank 0 (16 now), 19 on rank 1 (8 now), 10 on rank 2 (24 now)"
    assert better_batches([0.02, 0.01], [16, None]) == "batches times 0.67 on rank 0, 1.33 on rank 1"
    assert better_batches([0.02, 0.0]) == ""
    assert better_batches([]) == ""


@given(st.lists(st.floats(1.0, 1e4), min_size=1, max_size=9))
def test_the_sum_of_the_batches_stays(wanted: list[float]) -> None:
    scaled = [each * round(sum(wanted)) / sum(wanted) for each in wanted]
    rounded = _rounded(np.array(scaled))
    assert sum(rounded) == max(round(sum(scaled)), len(wanted))
    assert all(abs(whole - each) < 1 or whole == 1 for whole, each in zip(rounded, scaled, strict=True))
