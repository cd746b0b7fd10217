"""The figures of the short pages are those of today: simulated, by arithmetic, or measured and on the long pages."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lab import break_even
from lab.picture import JOBS, ROWS, STEPS, TIMES, described, measured, picture, table
from lightning_safusion.comm.cost import allgather_bytes, ring_allreduce_bytes
from lightning_safusion.comm.wire.formats import message_bytes
from tests.documents.pages import ROOT

PAGE = (ROOT / "docs" / "will_it_help.md").read_text(encoding="utf-8")
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
RENEW = "run: python -m lab break-even --document docs/will_it_help.md"


@pytest.mark.parametrize("name", ["bytes", "densities"])
def test_tables_by_arithmetic(name: str) -> None:
    assert f"<!-- {name} -->\n\n{break_even.TABLES[name]()}\n\n<!-- end -->" in PAGE, RENEW


@pytest.mark.parametrize(("nodes", "gpus"), [(2, 1), (4, 8)])
def test_a_row_of_simulated_bandwidths(nodes: int, gpus: int) -> None:
    assert f"| {nodes} x {gpus} | {' | '.join(break_even.bandwidths(nodes, gpus))} |" in PAGE, RENEW


def test_the_picture_has_the_bandwidths_of_the_table() -> None:
    drawn = (ROOT / "docs" / "images" / "break_even.svg").read_text(encoding="utf-8")
    rows = {name: break_even.bandwidths(nodes, gpus) for name, nodes, gpus, _ in break_even.PICTURED}
    expected = [rows["ResNet-50"][1], rows["BERT-large"][3]]
    assert re.findall(r">(\d+) Gbit/s:<", drawn) == expected, RENEW
    assert re.findall(r"up to (\d+) Gbit/s", drawn) == expected, RENEW


@pytest.mark.slow
def test_the_whole_page(tmp_path: Path) -> None:
    assert break_even.documented(PAGE) == PAGE, RENEW
    break_even.picture(tmp_path / "break_even.svg")
    assert texts(tmp_path / "break_even.svg") == texts(ROOT / "docs" / "images" / "break_even.svg"), RENEW


@pytest.mark.parametrize("workers", break_even.GATHERING)
def test_a_density_is_where_the_bytes_are_equal(workers: int) -> None:
    for _, wire, _, width in break_even.GATHERED:
        density = break_even.density_of(workers, wire, width)
        dense, numel = ring_allreduce_bytes(workers, width * break_even.ELEMENTS), break_even.ELEMENTS
        for change, cheaper in ((-0.0005, True), (0.0005, False)):
            entries = round(numel * (density + change))
            if entries <= numel:
                assert (allgather_bytes(workers, message_bytes(wire, numel, entries)) <= dense) == cheaper


def test_a_document_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="mark"):
        break_even.documented("no marks")


def texts(drawn: Path) -> list[str]:
    """All that is written in a picture."""
    return re.findall(r">([^<>]*\w[^<>]*)</", drawn.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["steps", "accuracy", "times"])
def test_pictures_have_the_figures_of_the_tables(name: str, drawn: Path) -> None:
    assert texts(drawn / f"{name}.svg") == texts(ROOT / "docs" / "images" / f"{name}.svg"), "run: python -m lab picture"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("images")
    picture(ROOT / "docs", folder)
    return folder


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "images").glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_says_what_it_shows_and_follows_a_dark_screen(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)  # noqa: S314 - a file of this repository
    assert root.get("role") == "img"
    assert all(root.findtext(f"{{http://www.w3.org/2000/svg}}{name}") for name in ("title", "desc"))
    assert "prefers-color-scheme: dark" in text or path.name == "logo.svg"


def test_the_readme_says_what_its_picture_shows() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"![{described(measured(BENCHMARKS))}](docs/images/steps.svg)" in readme


def test_results_are_figures_of_the_long_pages() -> None:
    results, convergence = ((ROOT / "docs" / f"{page}.md").read_text("utf-8") for page in ("results", "convergence"))
    differences = re.findall(r"[+-][\d.]+ ± [\d.]+", results)
    assert len(differences) == 20
    assert [each for each in differences if each not in convergence] == []
    assert f"up to about {break_even.bandwidths(8, 1)[-1]} Gbit/s" in results


def test_times_of_the_results_are_figures_of_the_benchmarks() -> None:
    def column(start: str, place: int, *names: str) -> list[str]:
        rows = {row[0]: row for row in table(BENCHMARKS, start)}
        return ["" if name == "" else f"{float(rows[name][place]):.0f}" for name in names]

    floor = "no exchange (the floor)"
    expected = [
        *([f"{float(row[at]):.0f}" for row in measured(BENCHMARKS)] for at, _, _, _ in JOBS),
        *(column("| system | conv, 4.6 M", at, *ROWS) for at in (1, 5)),
        column("| row | 4 workers", 3, floor, "`ddp`", "", "default, all-gather"),
        column("| system | ms | quartiles | over DDP", 1, floor, "`ddp`", "", "`saf-pooled`, plain DDP by then"),
    ]
    _, *jobs = table((ROOT / "docs" / "results.md").read_text(encoding="utf-8"), TIMES)
    assert [job[1:5] for job in jobs] == expected


def test_a_document_without_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no table that begins with"):
        table("| system | ms |", "| job |")
    with pytest.raises(ValueError, match="no row 'no exchange"):
        measured(f"{STEPS} ms |\n| --- | --- |\n| `ddp` | 1 |\n")
