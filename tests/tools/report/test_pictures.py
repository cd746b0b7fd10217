"""Pictures of a page: bars are as long as their times."""

from __future__ import annotations

from io import BytesIO
from math import nan

import pytest
from matplotlib.patches import Rectangle

from lightning_safusion.profiling.figures import PARTS, RankFigures, StepFigures
from lightning_safusion.tools.report import page
from tests.tools.report.runs import step as run_step


def test_the_parts_of_a_step_follow_each_other() -> None:
    figures = StepFigures.of(run_step(0))
    (axes,) = page.breakdown(RankFigures((figures,))).axes
    at = 0.0
    for container in axes.containers:
        (bar,) = container
        assert isinstance(bar, Rectangle)
        (part,) = [part for part, label in PARTS.items() if label == container.get_label()]
        assert (bar.get_x(), bar.get_width()) == pytest.approx((at, 1e3 * getattr(figures, f"{part}_s")))
        at += bar.get_width()
    assert at == pytest.approx(100.0)


def test_unknown_parts_are_left_out() -> None:
    unknown = StepFigures(
        **dict.fromkeys(StepFigures.of(run_step(0)).as_dict(), nan) | {"step_s": 1.0, "forward_s": 1.0}
    )
    (axes,) = page.breakdown(RankFigures((unknown,))).axes
    assert [container.get_label() for container in axes.containers] == ["forward"]
    page.plot_times({0: unknown, 1: unknown}).figure.savefig(BytesIO())


def test_no_more_ranks_than_fit() -> None:
    (axes,) = page.breakdown(RankFigures((StepFigures.of(run_step(0)),) * 500)).axes
    assert axes.get_yticklabels()[-1].get_text() == f"rank {page.RANKS - 1}"
