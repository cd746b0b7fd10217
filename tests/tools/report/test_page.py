"""The page: well formed, without requests, escaped, with the sections of the files that exist, and bars to scale."""

from __future__ import annotations

import re
import sys
from base64 import b64decode
from io import BytesIO
from math import nan
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib import rcParams
from matplotlib.patches import Rectangle

import safusion_command as cli
from lightning_safusion.fusion.replan import Decision
from lightning_safusion.profiling import plot_step
from lightning_safusion.profiling.figures import PARTS, RankFigures, StepFigures
from lightning_safusion.tools.report.page import RANKS, breakdown, load_run, plot_times, render_page, reviews
from lightning_safusion.tools.report.render import picture
from tests.tools.report.document import Document
from tests.tools.report.runs import NASTY, missing, overlap, step, write_run


def page(folder: Path, content: dict[str, Any] | None = None, absent: dict[str, Any] | None = None) -> str:
    """That of a run with these files."""
    return render_page(load_run(write_run(folder, content, absent)))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of the usual run, in a folder with an awkward name."""
    return page(tmp_path_factory.mktemp("run") / NASTY.replace("/", "-"), absent=missing())


@pytest.fixture(scope="module")
def document(written: str) -> Document:
    return Document(written)


def sections(document: Document) -> list[str | None]:
    return [attributes["id"] for attributes in document.elements("section")]


def assert_well_formed(document: Document) -> None:
    ids = document.values("id")
    assert len(ids) == len(set(ids))
    assert set(document.values("aria-labelledby")) <= set(ids)
    assert len(document.elements("h1")) == 1
    assert all(attributes.get("scope") in ("row", "col") for attributes in document.elements("th"))
    assert all(attributes["alt"] for attributes in document.elements("img"))
    assert not re.search(r"\bnan\b|\bNone\b", document.text)


def test_the_page_is_well_formed(document: Document) -> None:
    assert_well_formed(document)


def test_the_page_makes_no_requests(written: str, document: Document) -> None:
    assert not document.elements("script")
    assert not [name for _, attributes in document.tags for name in attributes if name.startswith("on")]
    for attribute in ("src", "href", "action", "data", "srcset"):
        assert not [address for address in document.values(attribute) if not address.startswith(("data:", "#"))]
    assert not re.search(r"https?:|@import|url\((?!#)", written)
    assert "default-src 'none'" in written


def test_names_are_text(written: str, document: Document) -> None:
    assert NASTY not in written
    assert not document.elements("b")
    assert NASTY in document.text


def images(document: Document) -> list[str]:
    """The files of the pictures."""
    return [b64decode(source.partition(",")[2]).decode() for source in document.values("src")]


def test_pictures_are_files_with_names_as_text_and_without_requests(document: Document) -> None:
    drawn = images(document)
    assert len(drawn) == 4
    for each in drawn:
        tags = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(each).iter()}  # noqa: S314
        assert not tags & {"script", "a"}
        assert not re.search(r'href="(?!#|data:)|@import|url\((?!#)', each)
    assert any("exposed: head.weight" in each for each in drawn)
    assert any(NASTY in (element.text or "") for each in drawn for element in ElementTree.fromstring(each).iter())  # noqa: S314


NAMES = [("$x$", "$x$"), ("a<b & 'c'", "a&lt;b &amp; 'c'"), ("\x1b[31m\x07", "\ufffd[31m\ufffd")]


@pytest.mark.parametrize(("name", "shown"), NAMES)
@pytest.mark.filterwarnings("ignore:Glyph")
def test_a_name_is_no_formula_no_markup_and_no_control_character(name: str, shown: str) -> None:
    before = dict(rcParams)
    drawn = b64decode(picture(plot_step, step(3, names=(name, "last"))).partition(",")[2]).decode()
    ElementTree.fromstring(drawn)  # noqa: S314 - made here
    assert shown in drawn
    assert dict(rcParams) == before


def test_a_section_is_there_only_if_its_file_is(tmp_path: Path, document: Document) -> None:
    everything = ["figures", "advice", "timeline", "breakdown", "plan", "tuning", "missing", "settings", "reproduce"]
    assert sections(document) == everything
    alone = page(tmp_path, overlap() | {"decisions": [], "timeline": None})
    without = ("timeline", "tuning", "missing")
    assert sections(Document(alone)) == [name for name in everything if name not in without]


def test_files_of_another_fit_are_mentioned_and_not_shown(tmp_path: Path) -> None:
    text = Document(page(tmp_path, overlap(), missing() | {"run": 0.0})).text
    assert "missing_rate.json is of another training than overlap.json, and is left out" in text
    assert "8.3%" not in text


def test_the_figures_are_those_of_the_files(document: Document) -> None:
    text = document.text
    assert "100.0 ms" in text  # the step
    assert "5.0 ms" in text  # of it exposed
    assert "5.0% of a step waits for it alone" in text
    assert "1.5% of the gradients' 8.0 kB" in text  # 2 messages of 60 bytes
    assert "8.3%" in text  # missing
    assert "4 tensors in 2 buffers" in text
    assert "2 buffers instead of 1 buffer" in text
    assert "+25.0% +20.0%" in " ".join(text.split())  # predicted and measured
    assert "30.00 ms 30.0%" in " ".join(text.split())  # forward
    assert "The longest wait of this step is 5.0 ms, for buffer 2 (head.weight, " in text
    assert "8.3% of the gradient tensors send nothing in a step" in text  # the advice is about this job


def test_reviews_in_a_row_that_change_nothing_are_one_row() -> None:
    stays = [Decision(window, "stay", 2, 3, gain, None, 0.03) for window, gain in ((5, 0.001), (10, 0.002), (5, 0.0))]
    rows = reviews([*stays, Decision(9, "switch", 3, 2, 0.25, None, 0.04)])
    assert [row[:2] for row in rows] == [["5 to 10", "stay"], ["5", "stay"], ["9", "switch"]]
    assert rows[0][2].endswith("would take 0.2 % less (the most in 2 reviews)")
    assert rows[0][3:] == ["+0.1% to +0.2%", "–", "30.00 ms"]


def test_a_run_that_became_plain_ddp_has_both_halves(tmp_path: Path) -> None:
    content = overlap(aside="its all-reduce has been predicted to be faster")
    exchanged = overlap()["steps"]
    content["steps"] = [exchanged[0], content["steps"][1] | {"step_s": 0.05}]
    document = Document(page(tmp_path, content))
    assert_well_formed(document)
    text = " ".join(document.text.split())
    assert "This package exchanged the gradients until step 7" in text
    assert "step 100.00 ms 50.00 ms" in text
    assert "exposed exchange 5.00 ms –" in text
    assert 'SAFusionStrategy(collective="allgather") keeps it' in text


def test_plain_ddp_says_so(tmp_path: Path) -> None:
    document = Document(page(tmp_path, overlap(aside="there is one worker, and nothing to exchange"), missing()))
    assert_well_formed(document)
    assert "Plain DDP exchanges the gradients: there is one worker, and nothing to exchange." in document.text
    assert "plan" not in sections(document)
    assert "this package exchanged nothing in it" in document.text
    assert "No recorded step was exchanged by this package." in document.text
    assert "Exposed exchange" not in document.text
    assert "Sent" not in document.text


def test_nothing_recorded_says_so(tmp_path: Path) -> None:
    content = overlap() | {"ranks": [{"step_s": 0.1}], "buffers": [], "timeline": None}
    text = Document(page(tmp_path, content)).text
    assert "No exchange was recorded" in text


def test_long_tables_and_lists_of_names_are_folded(tmp_path: Path, written: str) -> None:
    def folded(text: str, buffers: int) -> bool:
        summary = text.index(f"<summary>Buffers ({buffers})")
        return "open" not in text[:summary].rpartition("<details")[2]

    long = page(tmp_path, overlap(buffers=60), missing())
    assert_well_formed(Document(long))
    assert folded(long, 60)
    assert not folded(written, 2)


def test_the_worst_tensors_come_first(tmp_path: Path) -> None:
    many = missing(tensors=100)
    for place, row in enumerate(many["tensors"]):
        row["missing"], row["rates"] = place / 100, [place / 100] * 4
    document = Document(page(tmp_path / "many", None, many))
    text = document.text
    assert text.index(NASTY) < text.index("layer98.weight")
    assert "99 of 100 were missing at some time; the 60 worst are drawn" in text
    none = missing(samples=1)
    none_missing = Document(page(tmp_path / "none", None, none)).text
    assert "No tensor went missing in 1 sampled step: elements of each of 3 were sent in every step." in none_missing


def test_the_command_writes_to_the_given_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    cli.main(["report", str(run)])
    assert "<h1>" in (run / "report.html").read_text()
    assert str(run / "report.html") in capsys.readouterr().out
    cli.main(["report", str(run), "--output", str(tmp_path / "new" / "page.html")])
    assert (tmp_path / "new" / "page.html").read_text() == (run / "report.html").read_text()


@pytest.mark.parametrize("library", ["jinja2", "matplotlib"])
def test_without_a_library_the_extra_is_named(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(SystemExit, match=r"safusion: report needs .* pip install \"lightning-safusion\[plot\]\""):
        cli.main(["report", str(run)])
    assert not (run / "report.html").exists()


def test_the_parts_of_a_step_follow_each_other() -> None:
    figures = StepFigures.of(step(0))
    (axes,) = breakdown(RankFigures((figures,))).axes
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
    (axes,) = breakdown(RankFigures((unknown,))).axes
    assert [container.get_label() for container in axes.containers] == ["forward"]
    plot_times({0: unknown, 1: unknown}).figure.savefig(BytesIO())


def test_no_more_ranks_than_fit() -> None:
    (axes,) = breakdown(RankFigures((StepFigures.of(step(0)),) * 500)).axes
    assert axes.get_yticklabels()[-1].get_text() == f"rank {RANKS - 1}"
