"""The pictures: bars are as long as times say, and what is embedded is closed to the outside."""

from __future__ import annotations

import base64
import re
from math import nan
from xml.etree import ElementTree

import pytest
from matplotlib import rcParams
from matplotlib.patches import Rectangle

from lightning_safusion.metrics.history import TensorRow
from lightning_safusion.profiling.figures import PARTS, RankFigures, StepFigures
from lightning_safusion.profiling.picture import plot_step
from lightning_safusion.report import pictures
from tests.report.runs import step


def svg(address: str) -> str:
    kind, _, content = address.partition(",")
    assert kind == "data:image/svg+xml;base64"
    return base64.b64decode(content).decode()


def test_the_parts_of_a_step_follow_each_other() -> None:
    figures = StepFigures.of(step(0))
    (axes,) = pictures.breakdown(RankFigures((figures,))).axes
    at = 0.0
    for container in axes.containers:
        (bar,) = container
        assert isinstance(bar, Rectangle)
        (part,) = [part for part, label in PARTS.items() if label == container.get_label()]
        assert (bar.get_x(), bar.get_width()) == pytest.approx((at, 1e3 * getattr(figures, f"{part}_s")))
        at += bar.get_width()
    assert at == pytest.approx(100.0)


def test_unknown_parts_are_left_out() -> None:
    unknown = StepFigures(**dict.fromkeys(StepFigures.of(step(0)).as_dict(), nan) | {"step_s": 1.0, "forward_s": 1.0})
    (axes,) = pictures.breakdown(RankFigures((unknown,))).axes
    assert [container.get_label() for container in axes.containers] == ["forward"]
    pictures.embedded(pictures.history, {0: unknown, 1: unknown})


def test_no_more_ranks_than_fit() -> None:
    (axes,) = pictures.breakdown(RankFigures((StepFigures.of(step(0)),) * 500)).axes
    assert axes.get_yticklabels()[-1].get_text() == f"rank {pictures.RANKS - 1}"


def test_the_heat_map_is_grey_where_there_was_no_gradient() -> None:
    rows = [TensorRow(name, 0.5, 0.5, 0.1, None, rates) for name, rates in (("a", (0.0, 1.0)), ("b", (None, 0.25)))]
    axes = pictures.heat_map(rows, [1, 2]).axes[0]
    (image,) = axes.images
    assert image.get_array().filled(-1.0).tolist() == [[0.0, 1.0], [-1.0, 0.25]]  # type: ignore[union-attr]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]


def test_an_embedded_picture_asks_for_nothing_and_follows_the_page_into_the_dark() -> None:
    before = dict(rcParams)
    written = svg(pictures.embedded(plot_step, step(3, names=("$x$", "a<b & 'c'"))))
    ElementTree.fromstring(written)  # noqa: S314 - made here
    assert dict(rcParams) == before
    assert "$x$, a&lt;b &amp; 'c'" in written  # the name is no formula, and no markup
    assert "prefers-color-scheme:dark" in written
    assert "currentColor" in written
    assert not re.search(r'href="(?!#|data:)|@import|url\((?!#)|<script', written)


@pytest.mark.parametrize("buffers", [1, 40, 2000])
def test_many_buffers_still_fit(buffers: int) -> None:
    written = svg(pictures.embedded(plot_step, step(0, buffers)))
    height = re.search(r'viewBox="0 0 [\d.]+ ([\d.]+)"', written)
    assert height is not None
    assert float(height[1]) < 1500
    assert len(written) < 1e7
