"""Cells with names of rows: in one line where there is room, else cut at places that leave them legible."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lightning_safusion.tools.tables import RowName, plain_table

LONG = "saf-pooled[collective=hierarchical-sharded,density=0.1]"


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (80, [LONG]),
        (44, ["saf-pooled[collective=hierarchical-sharded,", "  density=0.1]"]),
        (34, ["saf-pooled[", "  collective=hierarchical-sharded,", "  density=0.1]"]),
        (24, ["saf-pooled[collective=", "  hierarchical-sharded,", "  density=0.1]"]),
    ],
)
def test_names_are_cut_where_their_options_are(width: int, lines: list[str]) -> None:
    assert RowName(LONG).lines(width) == lines
    assert max(map(len, lines)) <= width


def test_what_stands_beside_a_name_stays_there() -> None:
    assert RowName("saf-inter", " (ddp)").lines(3) == ["saf-inter (ddp)"]


@pytest.mark.parametrize(("width", "figures"), [(26, 0), (34, 1), (40, 2), (60, 2), (120, 2)])
def test_a_narrow_table_keeps_the_names_of_rows_and_leaves_out_figures(width: int, figures: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    table = plain_table("", "About it", "row", ("ms", "exposed"))
    for name in ("ddp", LONG, "saf-pooled[density=0.1]"):
        table.add_row(RowName(name), "1234.5", "678.9")
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    assert max(map(len, printed.splitlines())) <= width
    shown = "".join(line[: line.rfind("1234.5") if "1234.5" in line else None].strip() for line in printed.splitlines())
    assert LONG in shown
    assert "…" not in printed
    assert [printed.count(figure) for figure in ("1234.5", "678.9")] == [3 * (figures > 0), 3 * (figures > 1)]
    left = {0: "About it. No room for: ms, exposed.", 1: "About it. No room for: exposed.", 2: "About it"}[figures]
    assert left in " ".join(printed.split())
    assert ("No room" in printed) == (figures < 2)
