"""The figures of the short pages are those of today: simulated, by arithmetic, or measured and on the long pages."""

from __future__ import annotations

import re

import pytest

from lab import break_even
from lab.picture import JOBS, ROWS, table
from lightning_safusion.comm.cost import allgather_bytes, ring_allreduce_bytes
from lightning_safusion.comm.wire.formats import message_bytes
from tests.documents.pages import ROOT

PAGE = (ROOT / "docs" / "will_it_help.md").read_text(encoding="utf-8")
RENEW = "run: python -m lab break-even --document docs/will_it_help.md"


@pytest.mark.parametrize("name", ["bytes", "densities"])
def test_tables_by_arithmetic(name: str) -> None:
    assert f"<!-- {name} -->\n\n{break_even.TABLES[name]()}\n\n<!-- end -->" in PAGE, RENEW


@pytest.mark.parametrize(("nodes", "gpus"), [(2, 1), (4, 8)])
def test_a_row_of_simulated_bandwidths(nodes: int, gpus: int) -> None:
    assert f"| {nodes} x {gpus} | {' | '.join(break_even.bandwidths(nodes, gpus))} |" in PAGE, RENEW


@pytest.mark.slow
def test_the_whole_page() -> None:
    assert break_even.documented(PAGE) == PAGE, RENEW


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


def test_the_picture_has_the_measured_rows() -> None:
    cells = table((ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (described,) = re.findall(r"!\[Milliseconds per step\. (.*?)\]", readme)
    figures = [str(round(float(row[at]))) for at, _, _ in JOBS for row in cells]
    assert len(figures) == 2 * len(ROWS)
    assert re.findall(r"(?<= )\d{2,4}(?=[,;.])", described) == figures


def test_results_are_figures_of_the_long_pages() -> None:
    results, convergence, benchmarks = (
        (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in ("results", "convergence", "benchmarks")
    )
    differences = re.findall(r"[+-][\d.]+ ± [\d.]+", results)
    assert len(differences) == 20
    assert [each for each in differences if each not in convergence] == []
    rows = re.findall(
        r"^\| (?:convolutions|transformer).* \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", results, re.MULTILINE
    )
    cells = table(benchmarks)
    assert rows == [tuple(str(round(float(row[at]))) for row in cells) for at, _, _ in JOBS]
    assert f"up to about {break_even.bandwidths(8, 1)[-1]} Gbit/s" in results
