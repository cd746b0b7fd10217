"""Comparisons of the simulator with measurements, and with the papers' slides."""

from __future__ import annotations

import pytest

from lab.simulator import Comparison, report, swapped


def rows(**times: tuple[float, float]) -> list[Comparison]:
    return [Comparison("job", 2, "1gbit", name, *pair) for name, pair in times.items()]


def test_pairs_that_are_clearly_apart_must_keep_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    close = rows(a=(1.0, 1.1), b=(1.14, 1.05))
    assert swapped(close) == []
    assert report(close)
    apart = rows(a=(1.0, 1.1), b=(1.2, 1.05), c=(3.0, 3.0))
    assert swapped(apart) == [("a", "b")]
    assert not report(apart)
    assert "swapped: [('a', 'b')]" in capsys.readouterr().out


def test_an_error_beyond_the_limit_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert not report(rows(a=(1.0, 1.2)))
    assert report(rows(a=(1.0, 0.86)))
    assert "| a | 1000.0 | 860.0 | -14 % |" in capsys.readouterr().out
