"""What each room may import: watching reads records, and nothing reaches into the engine from outside."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import lightning_safusion
from tests.packaging.environments import run

ROOT = Path(lightning_safusion.__file__).parent
#: What happens inside of a window.
ENGINE = {
    f"lightning_safusion.fusion.{name}"
    for name in (
        "engine", "gradients", "shipment", "window", "buffers", "ending", "launching", "hook", "space", "build",
    )
}  # fmt: skip


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files(*rooms: str) -> list[Path]:
    return [path for room in rooms for path in sorted((ROOT / room).rglob("*.py"))]


WATCHING, PLANNING = ("metrics", "callbacks", "profiling", "tools/report"), ("fusion/plans", "tools/plan")


@pytest.mark.parametrize("path", files(*WATCHING, *PLANNING), ids=lambda path: path.name)
def test_who_watches_or_plans_knows_nothing_of_the_engine(path: Path) -> None:
    """What happens inside of a window is read in records."""
    modules = imports(path)
    assert not {name for name in modules if any(name == each or name.startswith(f"{each}.") for each in ENGINE)}


def test_a_fit_names_no_baseline() -> None:
    path = ROOT / "integration/fit.py"
    named = {name for name in imports(path) if name.startswith("lightning_safusion.baselines")}
    assert named == {"lightning_safusion.baselines", "lightning_safusion.baselines.hook_exchange"}
    assert not {name for name in imports(ROOT / "strategy.py") if name.startswith("lightning_safusion.baselines")}


def test_training_imports_neither_tools_nor_laboratory() -> None:
    """Nothing of the package does, wherever in a file; the tools import each other."""
    for path in files("."):
        apart = ["lab.", "safusion_command.", *["lightning_safusion.tools."] * (ROOT / "tools" not in path.parents)]
        assert not {name for name in imports(path) if f"{name}.".startswith(tuple(apart))}, path


@pytest.mark.slow
def test_the_package_loads_no_tool() -> None:
    loaded = set(run(sys.executable, "-c", "import sys, lightning_safusion; print(*sys.modules)").split())
    assert "lightning_safusion.callbacks.trace_recorder" in loaded
    apart = ("lightning_safusion.tools.", "safusion_command.", "lab.")
    assert not {name for name in loaded if f"{name}.".startswith(apart)}


def test_the_package_grows_by_decision() -> None:
    """Who needs more lines finds others that can go, or raises a number here and says why in the change."""
    lines = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in files(".")}
    assert sum(lines.values()) <= 39_320
    assert lines["strategy.py"] <= 450
    assert max(lines.values()) <= 450
