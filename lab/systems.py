"""The tables of systems in ``docs/systems.md``, from the rows of the package.

$ python -m lab systems docs/systems.md
"""

from __future__ import annotations

import re
from pathlib import Path

from lab.markdown import markdown
from lightning_safusion.systems.rows import DEFAULT, SYSTEMS, EngineSystem, HookSystem

_BLOCK = re.compile(r"(<!-- systems: (engine|hooks) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def write_tables(document: str) -> None:
    """Writes the tables of systems in a document anew.

    Args:
        document: Markdown file: docs/systems.md.

    Raises:
        ValueError: If it marks no place for them.
    """
    path = Path(document)
    path.write_text(documented(path.read_text(encoding="utf-8")), encoding="utf-8")


def documented(text: str) -> str:
    """The document with current tables between ``<!-- systems: engine -->`` (or ``hooks``) and ``<!-- end -->``.

    Raises:
        ValueError: If there is no such mark.
    """
    rows = SYSTEMS.values()
    tables = {
        "engine": _table([_engine_cells(row) for row in rows if isinstance(row, EngineSystem)]),
        "hooks": _table([_hook_cells(row) for row in rows if isinstance(row, HookSystem)]),
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


def _table(rows: list[dict[str, str]]) -> str:
    return markdown(tuple(rows[0]), [row.values() for row in rows], names=len(rows[0]))
