"""Tables of documents that are rows of the package: systems, and what is refused.

$ python -m lab systems docs/systems.md
$ python -m lab systems docs/limits.md
"""

from __future__ import annotations

import re
from pathlib import Path

from lab.markdown import markdown
from lightning_safusion.fusion.conflicts import CONFLICTS, Conflict
from lightning_safusion.integration.options import REFUSED_OPTIONS
from lightning_safusion.systems.rows import DEFAULT, SYSTEMS, EngineSystem, HookSystem

_BLOCK = re.compile(r"(<!-- ((?:systems|refused): \w+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def write_tables(document: str) -> None:
    """Writes the tables of a document anew.

    Args:
        document: Markdown file: docs/systems.md or docs/limits.md.

    Raises:
        ValueError: If it marks no place for them.
    """
    path = Path(document)
    path.write_text(documented(path.read_text(encoding="utf-8")), encoding="utf-8")


def documented(text: str) -> str:
    """The document with current tables between their marks, such as ``<!-- systems: engine -->``, and ``<!-- end -->``.

    Raises:
        ValueError: If there is no such mark.
    """
    rows = SYSTEMS.values()
    tables = {
        "systems: engine": _table([_engine_cells(row) for row in rows if isinstance(row, EngineSystem)]),
        "systems: hooks": _table([_hook_cells(row) for row in rows if isinstance(row, HookSystem)]),
        "refused: settings": _table([_conflict_cells(row) for row in CONFLICTS]),
        "refused: options": _table(
            [{"option": f"`{name}`", "why": _as_code(why)} for name, why in REFUSED_OPTIONS.items()]
        ),
    }
    text, found = _BLOCK.subn(lambda match: f"{match[1]}\n{tables[match[2]]}\n\n", text)
    if not found:
        raise ValueError("the document has no mark such as '<!-- systems: engine -->' before tables")
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


def _conflict_cells(row: Conflict) -> dict[str, str]:
    needs = "; ".join(map(str, row.needs))
    return {"what": _as_code(str(row.when)), "needs": _as_code(needs), "because it": _as_code(row.because)}


def _as_code(text: str) -> str:
    """Options and their values as in YAML and Python, between backticks."""
    named = re.sub(r"(?<!\w)(\w+=)?'([^']+)'", r'`\1"\2"`', text)
    return re.sub(r"(?<![\w`])((?:\w+\()?\w+=(?:True|False|\.\.\.|\[\.\.\.\])\)?)", r"`\1`", named)


def _table(rows: list[dict[str, str]]) -> str:
    return markdown(tuple(rows[0]), [row.values() for row in rows], names=len(rows[0]))
