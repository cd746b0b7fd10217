"""One description of every system and every conflict: what commands, documents and errors say comes from the row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lab.__main__ import main
from lab.systems import documented
from lightning_safusion import SYSTEMS, SAFusionStrategy
from lightning_safusion.fusion.conflicts import CONFLICTS
from lightning_safusion.integration.options import REFUSED_OPTIONS
from lightning_safusion.systems import EngineSystem, HookSystem

DOCUMENTS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize(
    ("name", "rows"), [("systems.md", SYSTEMS), ("limits.md", REFUSED_OPTIONS)], ids=["systems", "limits"]
)
def test_the_document_has_the_tables_of_today(name: str, rows: Mapping[str, Any]) -> None:
    text = (DOCUMENTS / name).read_text(encoding="utf-8")
    assert documented(text) == text, f"run: python -m lab systems docs/{name}"
    assert all(f"| `{row}`" in text for row in rows)


def test_every_conflict_is_documented_in_the_words_of_its_error() -> None:
    text = (DOCUMENTS / "limits.md").read_text(encoding="utf-8").replace("`", "").replace('"', "'")
    for conflict in CONFLICTS:
        needs = "; ".join(map(str, conflict.needs))
        assert f"| {conflict.when} | {needs} | {conflict.because} |" in text


def test_the_command_writes_tables_between_their_marks(tmp_path: Path) -> None:
    path = tmp_path / "systems.md"
    path.write_text("before\n<!-- systems: hooks -->\nold\n<!-- end -->\nafter\n")
    main(["systems", str(path)])
    lines = path.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "old" not in lines
    assert any(line.startswith("| `dear` | ") for line in lines)
    with pytest.raises(ValueError, match="before tables"):
        documented("no marks")


def test_a_hook_has_no_parts() -> None:
    for name, row in SYSTEMS.items():
        assert isinstance(row, EngineSystem | HookSystem)
        assert (row.ddp_hook is None) == isinstance(row, EngineSystem)
        assert SAFusionStrategy(system=name).system == name
    assert not hasattr(SYSTEMS["ddp"], "compressor")
