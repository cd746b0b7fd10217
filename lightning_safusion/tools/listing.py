"""The systems as a table on the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_safusion.systems.rows import SYSTEMS


def print_systems() -> None:
    """Prints the systems that ``SAFusionStrategy(system=...)`` takes."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_lines=False)
    for heading in ("system", "what it decides", "source"):
        table.add_column(heading, overflow="fold")
    for row in SYSTEMS.values():
        table.add_row(f"[bold]{row.name}[/bold]", row.summary, row.source)
    Console().print(table)
