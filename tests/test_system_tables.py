"""One description of every system: what commands, documents and the simulator say of it is made from the row."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.__main__ import main
from lab.systems import documented
from lightning_safusion import SYSTEMS, SAFusionStrategy
from lightning_safusion.systems import EngineSystem, HookSystem

DOCUMENT = Path(__file__).parents[1] / "docs" / "systems.md"


def test_the_document_has_the_tables_of_today() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert documented(text) == text, "run: python -m lab systems docs/systems.md"
    assert all(f"| `{name}`" in text for name in SYSTEMS)


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
