"""The pictures: bars are as long as times say."""

from __future__ import annotations

from math import nan

import pytest

from lightning_safusion.profiling.figures import StepFigures
from lightning_safusion.report import pictures
from lightning_safusion.report.markup import Markup, element, join
from tests.report.document import Document
from tests.report.runs import step

AXIS = 960 - 190 - 18  # units for the whole width of a picture with labels


def bars(picture: Markup, part: str) -> list[tuple[float, float]]:
    """Beginning and length of a part's bars, in units of the axis."""
    found = [each for each in Document(picture).elements("rect") if each["class"] == part]
    return [((float(each["x"] or 0) - 190) / AXIS, float(each["width"] or 0) / AXIS) for each in found]


def test_the_timeline_is_to_scale() -> None:
    picture = pictures.timeline(step(3))
    assert bars(picture, "forward") == [pytest.approx((0.0, 0.3), abs=1e-3)]
    assert bars(picture, "optimizer") == [pytest.approx((0.9, 0.1), abs=1e-3)]
    # in the loop, and in the buffer's row
    assert bars(picture, "exposed") == [pytest.approx((0.8, 0.05), abs=1e-3)] * 2
    assert [length for _, length in bars(picture, "exchange")] == pytest.approx([0.06, 0.13], abs=1e-3)
    (late,) = [each for each in Document(picture).elements("text") if "late" in str(each["class"])]
    assert late["class"] == "label late"


def test_readiness_is_marked_where_it_is_known() -> None:
    picture = Document(pictures.timeline(step(0)))
    paths = [each["d"] for each in picture.elements("path") if each["class"] == "ready"]
    assert [str(path).count("M") for path in paths] == [1, 1]


@pytest.mark.parametrize("buffers", [1, 40, 2000])
def test_many_buffers_still_fit(buffers: int) -> None:
    (svg,) = Document(pictures.timeline(step(0, buffers))).elements("svg")
    assert float(svg["height"] or 0) < 1500


def test_the_parts_of_a_step_follow_each_other() -> None:
    figures = StepFigures.of(step(0))
    picture = pictures.breakdown([figures])
    at = 0.0
    for part in pictures.PARTS:
        for begin, length in bars(picture, part):
            assert (begin, length) == pytest.approx((at, getattr(figures, f"{part}_s") / 0.1), abs=1e-3)
            at += length
    assert at == pytest.approx(1.0, abs=0.01)


def test_unknown_parts_are_left_out() -> None:
    unknown = StepFigures(**dict.fromkeys(StepFigures.of(step(0)).as_dict(), nan) | {"step_s": 1.0})
    assert not bars(pictures.breakdown([unknown]), "exposed")
    assert 'class="dots exposed"' not in pictures.history({0: unknown})


def test_no_more_ranks_than_fit() -> None:
    figures = StepFigures.of(step(0))
    assert pictures.breakdown([figures] * 500).count(">rank ") < 2 * pictures.RANKS * len(pictures.PARTS)
    assert ">rank 31<" in pictures.breakdown([figures] * 500)
    assert ">rank 32<" not in pictures.breakdown([figures] * 500)


def test_equal_neighbours_of_the_heat_map_are_one_rectangle() -> None:
    picture = Document(pictures.heat_map(["a", "b"], [1, 2, 3], [[0.0, 0.0, 1.0], [None, 0.04, 0.05]]))
    classes = [each["class"] for each in picture.elements("rect")]
    assert classes == ["shade shade0", "shade shade10", "absent", "shade shade1", "shade shade1"]
    widths = [float(each["width"] or 0) for each in picture.elements("rect")]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.02)


def test_ticks_are_round_and_few() -> None:
    assert pictures.nice_ticks(0.0) == [0.0]
    for end in (0.003, 1.0, 7.7, 99.0, 12345.0):
        ticks = pictures.nice_ticks(end)
        assert 3 <= len(ticks) <= 9
        assert ticks[-1] <= end * (1 + 1e-6)


def test_long_names_keep_their_end() -> None:
    assert pictures.shorten("a" * 100 + ".weight", 10) == "…aa.weight"
    assert pictures.shorten("head.weight", 28) == "head.weight"


def test_markup_escapes_all_but_markup() -> None:
    inner = element("i", "<", title='"', class_="x", hidden=True, id=None)
    assert inner == '<i title="&quot;" class="x" hidden>&lt;</i>'
    assert join(["<", inner, element("br")]) == f"&lt;{inner}<br>"
