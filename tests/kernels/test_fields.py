"""C's copy of what readers and writers of messages agree on is that of Python."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lightning_safusion.kernels.cpu as native
from lightning_safusion.kernels import fields

CPU = Path(native.__file__).parent


def header(name: str) -> str:
    """A header of the compiled kernels, without comments."""
    path = CPU / f"{name}.h"
    if not path.exists():
        pytest.skip("an installed package has no sources")
    return re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)


def members(text: str, name: str) -> tuple[str, ...]:
    """The names that a struct or an enumeration has, in order."""
    found = re.search(rf"{name} \{{(.*?)\}}", text, re.DOTALL)
    return tuple(re.findall(r"\w+", found[1].replace("int64_t", "")))


def test_a_message_is_described_alike() -> None:
    assert members(header("kernels"), "struct message") == fields.Encoded._fields
    assert members(header("kernels"), "enum") == tuple(fields.Positions.__members__)


def test_regions_and_ranks_are_alike() -> None:
    text = header("eliasfano")
    assert f"#define REGION {fields.REGION_BITS} " in text
    assert f"room >> {fields.NARROW_RANKS.bit_length() - 1} ?" in text
