"""First windows last as long as a warm-up needs, and end on all ranks after the same one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_safusion.fusion.opening import FirstWindows
from lightning_safusion.fusion.window import Notices
from lightning_safusion.sparsify.schedule import Opening

OPENING = Opening(0.5, 10, 4)


Rate = Callable[[int], float]


def densities(rates: Sequence[Rate], windows: range, ranks: Sequence[FirstWindows] = ()) -> list[list[float]]:
    """Those of every window, by rank; of ranks with learning rates of their own."""
    ranks, notices, seen = ranks or [FirstWindows() for _ in rates], [Notices() for _ in rates], []
    for window in windows:
        for first, own, rate in zip(ranks, notices, rates, strict=True):
            first.opening, first.rate = OPENING, partial(rate, window)
            first.tell(own)
        seen.append([first.density(window) for first in ranks])
        said = sum({own.own for own in notices})
        for first, own in zip(ranks, notices, strict=True):
            own.hear(said)
            first.hear(own, window + 1)
            first.count()
    return [list(each) for each in zip(*seen, strict=True)]


@pytest.mark.parametrize(
    ("rate", "last"),
    [
        (lambda step: 1.0, 10),
        (lambda step: 1.0 - step / 100, 10),  # falls from the beginning
        (lambda step: min(1.0, (step + 1) / 10), 15),  # 5.5 in ten steps, then five
        (lambda step: min(1.0, (step + 1) / 40), 28),
        (lambda step: min((step + 1) / 5, 1.04 - step / 100), 12),  # 3 in five steps, and all that follow count in full
        (lambda step: min(1.0, step / 10), 16),  # begins at zero, which counts as a 20th
        (lambda step: 1e-6, 200),  # a 20th at least
    ],
    ids=["constant", "falling", "short warm-up", "long warm-up", "warm-up and decay", "from zero", "never risen"],
)
def test_steps_of_a_warm_up_count_by_their_share(rate: Callable[[int], float], last: int) -> None:
    (seen,) = densities([rate], range(250))
    assert seen[:last] == [0.5] * last
    assert seen[last:] == [OPENING(10 + step) for step in range(250 - last)]


@given(st.lists(st.integers(1, 60), min_size=2, max_size=5))
def test_ranks_go_on_after_the_same_window(lengths: list[int]) -> None:
    rates = [lambda step, length=length: min(1.0, (step + 1) / length) for length in lengths]
    first, *others = densities(rates, range(60))
    assert all(other == first for other in others)
    assert first == densities([rates[lengths.index(min(lengths))]], range(60))[0]


def test_another_one_goes_on_from_its_state() -> None:
    rates: list[Rate] = [lambda step: min(1.0, (step + 1) / 8)]
    (whole,) = densities(rates, range(30))
    for stop in range(1, 30):
        before, after = FirstWindows(), FirstWindows()
        (part,) = densities(rates, range(stop), [before])
        after.load_state_dict(before.state_dict())
        assert part + densities(rates, range(stop, 30), [after])[0] == whole


def test_others_send_no_more() -> None:
    first, notices = FirstWindows(), Notices()
    for _ in range(200):
        first.tell(notices)
        first.count()
    assert first.density(0) == notices.own == 0
    assert not first.includes(0)


def test_a_first_window_is_one_before_and_after_ranks_hear_of_the_end() -> None:
    first, notices = FirstWindows(), Notices()
    first.opening = OPENING
    for window in range(30):
        first.tell(notices)
        assert first.includes(window) == (window < 10)
        notices.hear(notices.own)
        first.hear(notices, window + 1)
        assert first.includes(window) == (window < 10)  # an optimizer may step here
        first.count()
