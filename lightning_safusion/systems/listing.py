"""The systems as tables: on the terminal, and in ``docs/systems.md``."""

from __future__ import annotations

import re
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_safusion.systems.rows import DEFAULT, SYSTEMS, EngineSystem, HookSystem

_BLOCK = re.compile(r"(<!-- systems: (engine|hooks) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def print_systems(document: str | None = None) -> None:
    """Prints the systems that ``SAFusionStrategy(system=...)`` takes.

    Args:
        document: Markdown file whose tables of systems are written anew, in place of printing: docs/systems.md.

    Raises:
        ValueError: If it marks no place for them.
    """
    if document is not None:
        path = Path(document)
        path.write_text(documented(path.read_text(encoding="utf-8")), encoding="utf-8")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_lines=False)
    for heading in ("system", "what it decides", "source"):
        table.add_column(heading, overflow="fold")
    for row in SYSTEMS.values():
        table.add_row(f"[bold]{row.name}[/bold]", row.summary, row.source)
    Console().print(table)


def documented(text: str) -> str:
    """The document with current tables between ``<!-- systems: engine -->`` (or ``hooks``) and ``<!-- end -->``.

    Raises:
        ValueError: If there is no such mark.
    """
    rows = SYSTEMS.values()
    tables = {
        "engine": _markdown([_engine_cells(row) for row in rows if isinstance(row, EngineSystem)]),
        "hooks": _markdown([_hook_cells(row) for row in rows if isinstance(row, HookSystem)]),
    }
    text, found = _BLOCK.subn(lambda match: f"{match[1]}\n{tables[match[2]]}\n\n", text)
    if not found:
        raise ValueError("the document has no '<!-- systems: engine -->' and '<!-- systems: hooks -->' before tables")
    return text


def _engine_cells(row: EngineSystem) -> dict[str, str]:
    dense = [f"< {row.dense_below} elements"] if row.dense_below else []
    dense += [f"< {row.dense_below_ndim} dimensions"] if row.dense_below_ndim else []
    scope = {"tensor": "each tensor", "group": "the buffer"}[row.scope]
    return {
        "system": f"`{row.name}`" + (" (the default)" if row.name == DEFAULT else ""),
        "what it decides": row.summary,
        "compressor": f"`{row.compressor}`",
        "selects in": scope if row.sparse else "",
        "grouping": f"`{row.fusion}`",
        "collective": f"`{row.collective}`",
        "dense": ", ".join(dense) if row.sparse else "all",
        "source": row.source,
    }


def _hook_cells(row: HookSystem) -> dict[str, str]:
    return {"system": f"`{row.name}`", "what it does": row.summary, "source": row.source}


def _markdown(rows: list[dict[str, str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
