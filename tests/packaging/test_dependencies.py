"""What the package imports is what it declares."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [*sorted((ROOT / "lightning_safusion").rglob("*.py")), ROOT / "safusion_command.py"]
OWN = {"lightning_safusion", "safusion_command"}

#: What no extra brings: torch's builds for CUDA bring Triton, and Horovod has a script.
BROUGHT = {"triton", "horovod"}

#: Rooms and files that nobody loads but who asks for them, and the extras that bring what they import at once.
LOADED_LATER = {"demo": ("examples",), "hugging_face.py": ("examples",)}


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(importlib.metadata.packages_distributions())


@cache
def _imported(path: Path) -> list[tuple[str, bool]]:
    """Distributions that a file imports from, and whether it does so when it is loaded."""
    tree, found = ast.parse(path.read_text()), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        else:
            continue
        for top in {name.partition(".")[0] for name in names} - OWN - set(sys.stdlib_module_names):
            (distribution, *_) = _distributions().get(top, [top])
            found.append((_normal(distribution), node in tree.body))
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _declared(extra: str | None = None) -> set[str]:
    """Distributions that ``pyproject.toml`` declares for everybody, or for an extra."""
    text = (ROOT / "pyproject.toml").read_text()
    (block,) = re.findall(rf"^{extra or 'dependencies'} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    return {_normal(name) for name in re.findall(r'"([\w.-]+)', block)}


def test_what_is_imported_is_declared() -> None:
    missing = []
    for path in SOURCES:
        room = path.parent.name
        at_once = _declared().union(
            BROUGHT, *map(_declared, (*LOADED_LATER.get(room, ()), *LOADED_LATER.get(path.name, ())))
        )
        when_used = at_once | _declared("plot") | _declared("examples")
        for name, when_loaded in _imported(path):
            if name not in (at_once if when_loaded else when_used):
                missing.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not missing


def test_what_is_declared_is_imported() -> None:
    imported = {name for path in SOURCES for name, _ in _imported(path)}
    assert _declared() | _declared("plot") <= imported
