"""Planning takes numbers and returns plans: it imports nothing that holds a tensor, a message or a clock."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_safusion

ROOT = Path(lightning_safusion.__file__).parent
PLANS, SETTINGS = "lightning_safusion.fusion.plans", "lightning_safusion.fusion.settings"
#: What the modules of ``fusion/plans/`` may import of this package besides each other.
ALLOWED = ("lightning_safusion.comm.cost", "lightning_safusion.lookup", "lightning_safusion.registry")


def imported(path: Path) -> Iterator[str]:
    """Modules that a file imports, inside functions as well."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            yield node.module or ""


NAMES = sorted(path.name for path in (ROOT / "fusion/plans").glob("*.py"))


@pytest.mark.parametrize("name", [*NAMES, "lookup", "registries", "cost"])
def test_a_planning_module_imports_nothing_of_the_engine(name: str) -> None:
    others = {"lookup": "lookup.py", "registries": "registry.py", "cost": "comm/cost.py"}
    path = ROOT / others.get(name, f"fusion/plans/{name}")
    modules = set(imported(path))
    ours = {module for module in modules if module.startswith("lightning_safusion")}
    assert {module for module in ours if not module.startswith((f"{PLANS}.", *ALLOWED))} == set()
    outside = {module.partition(".")[0] for module in modules}
    assert not outside & {"torch", "lightning", "time", "random"}


@pytest.mark.parametrize("path", sorted((ROOT / "tools/plan").glob("*.py")), ids=lambda path: path.name)
def test_the_simulator_uses_nothing_of_fusion_but_plans_and_settings(path: Path) -> None:
    fusion = {module for module in imported(path) if module.startswith("lightning_safusion.fusion")}
    # settings are values
    assert {module for module in fusion if not module.startswith((f"{PLANS}.", SETTINGS))} == set()
