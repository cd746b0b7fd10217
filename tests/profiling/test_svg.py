"""Pictures inside a page: no request, ids of their own, the page's colour, and a text on every bar and point."""

from __future__ import annotations

import io
import re
from xml.etree import ElementTree

import pytest
from matplotlib import rcParams

from lightning_safusion.profiling import pictures
from lightning_safusion.profiling.figures import RankFigures, StepFigures
from lightning_safusion.profiling.pictures import plot_step
from lightning_safusion.profiling.svg import inline
from tests.profiling.steps import cpu_step
from tests.report.runs import NASTY
from tests.report.runs import step as run_step


def titles(written: str) -> list[str]:
    """Texts of the picture, each of which must be on something that can be drawn."""
    found = []
    for group in ElementTree.fromstring(written).iter("g"):  # noqa: S314 - made here
        if (title := group.find("title")) is not None:
            assert {each.tag for each in group.iter()} & {"path", "use"}
            found.append(title.text or "")
    return found


def test_a_picture_makes_no_request_and_follows_the_page() -> None:
    before = dict(rcParams)
    written = inline("a", plot_step, run_step(3, names=("$x$", "a<b & 'c'")))
    tags = {each.tag for each in ElementTree.fromstring(written).iter()}  # noqa: S314 - made here
    assert "svg" in tags
    assert not tags & {"script", "style", "metadata", "a"}
    assert dict(rcParams) == before
    assert "$x$, a&lt;b &amp; 'c'" in written  # the name is no formula, and no markup
    assert "currentColor" in written
    assert not re.search(r'href="(?!#|data:)|@import|url\((?!#)|xmlns|https?:', written)


def test_every_bar_says_what_it_is() -> None:
    found = titles(inline("a", plot_step, cpu_step()))
    second = "of buffer 2, layer2.weight +2"
    assert found[0] == "forward: 3000.00 ms, from 0.00 ms"
    assert found.count(f"exposed exchange {second}: 2000.00 ms, from 15000.00 ms") == 2  # its row, and training
    assert f"exchange {second}: 5000.00 ms, from 12000.00 ms" in found
    assert "gradient of layer4.weight ready at 11000.00 ms" in found
    # forward, 4 parts of backward, optimizer; 2 of selection, decoding in two rows, exchange; 1 exposed in two rows
    assert len(found) == 6 + 2 * (2 + 2 + 1) + 2 + 5


def test_a_single_bar_says_it_too() -> None:
    """Matplotlib draws a collection of one path in another way."""
    step = run_step(0, 1)
    assert len([each for each in titles(inline("a", plot_step, step)) if each.startswith("exchange of")]) == 1


def test_ranks_steps_and_rates_say_what_they_are() -> None:
    figures = StepFigures.of(run_step(0))
    ranks = titles(inline("a", pictures.breakdown, RankFigures((figures,) * 2)))
    assert "rank 1, exposed exchange: 5.00 ms, 5.0% of the step" in ranks
    times = titles(inline("a", pictures.plot_times, {4: figures}))
    assert times == ["step 4, step: 100.00 ms", "step 4, exposed exchange: 5.00 ms"]
    rates = titles(inline("a", pictures.heat_map, ["x", NASTY], [10, 20, 30], [(0.0, 0.0, 1.0), (None, 0.25, 0.25)]))
    assert rates == [
        "x, from step 10: 0% missing",
        "x, from step 30: 100% missing",
        f"{NASTY}, from step 10: no gradient",
        f"{NASTY}, from step 20: 25% missing",
    ]


def test_names_are_text() -> None:
    written = inline("a", plot_step, run_step(3, names=(NASTY, "last")))
    assert NASTY not in written
    assert f"gradient of {NASTY} ready at 30.00 ms" in titles(written)


def test_names_may_have_control_characters() -> None:
    written = inline("a", plot_step, run_step(3, names=("\x1b[31m\x07", "last")))
    assert "gradient of \ufffd[31m\ufffd ready at 30.00 ms" in titles(written)


def test_pictures_of_one_page_have_ids_of_their_own() -> None:
    def ids(prefix: str) -> set[str]:
        root = ElementTree.fromstring(inline(prefix, plot_step, run_step(3)))  # noqa: S314 - made here
        used = {value for each in root.iter() for value in re.findall(r"url\(#([^)]+)\)", str(each.attrib))}
        used |= {each.get("href", "#")[1:] for each in root.iter("use")}
        found = [each.attrib["id"] for each in root.iter() if "id" in each.attrib]
        assert len(set(found)) == len(found)
        assert used
        assert used <= set(found)  # clips, hatches and marks are found
        return set(found)

    assert not ids("first") & ids("second")


def test_a_picture_of_its_own_has_no_links() -> None:
    written = io.StringIO()
    plot_step(run_step(3)).figure.savefig(written, format="svg")
    assert "<a " not in written.getvalue()


@pytest.mark.parametrize("buffers", [1, 400])
def test_many_buffers_still_fit(buffers: int) -> None:
    written = inline("a", plot_step, run_step(0, buffers))
    height = re.search(r'viewBox="0 0 [\d.]+ ([\d.]+)"', written)
    assert height is not None
    assert float(height[1]) < 1500
    assert len(written) < 1e7
