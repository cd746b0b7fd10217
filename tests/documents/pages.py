"""The documents, cut into what a reader would copy: blocks by language, and commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: All documents that users and contributors read.
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
_BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`]+)`")
_VARIABLE = re.compile(r"(\w+)=(.*)")


def name(page: Path) -> str:
    """A page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in _BLOCK.findall(page.read_text(encoding="utf-8")) if found == language]


def commands(page: Path) -> Iterator[list[str]]:
    """Words of every command: lines of bash blocks, and commands of the project in running text."""
    for block in blocks(page, "bash"):
        yield from _lines(block)
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    for span in _INLINE.findall(text):
        command = " ".join(span.split())
        if re.match(r"(safusion|python -m lab|python -m pytest|pytest|make|python examples/\S+) ", command):
            yield shlex.split(command, comments=True)


def _lines(block: str) -> Iterator[list[str]]:
    variables: dict[str, str] = {}
    for line in block.replace("\\\n", " ").splitlines():
        for variable, value in variables.items():
            line = line.replace(f"${variable}", value)
        words = shlex.split(line, comments=True)
        if len(words) == 1 and (found := _VARIABLE.fullmatch(words[0])):
            variables[found[1]] = found[2]
        elif words:
            yield words
