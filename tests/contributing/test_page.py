"""docs/contributing.md shows the code that the tests beside this file run, and names files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
RECIPES = "\n".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_new_*.py"))


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL), ids=lambda block: block[:20])
def test_the_code_is_that_of_the_tests(block: str) -> None:
    for part in block.split("\n\n\n"):
        if not part.startswith(("import ", "from ")):  # tests/documents sees to imports
            assert part.strip() in RECIPES


def test_files_of_the_page_exist() -> None:
    named = set(re.findall(r"(?:tests|lightning_safusion|docs)/[\w/.]+\w", PAGE))
    assert len(named) > 15
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
