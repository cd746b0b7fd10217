"""Dataclasses as plain values, which JSON can hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from math import isfinite, nan
from typing import Any, TypeVar

_T = TypeVar("_T")


def from_row(cls: type[_T], row: Mapping[str, Any], gaps: bool = False) -> _T:
    """A dataclass from its fields by name, as JSON has them: lists become tuples, null becomes NaN where numbers are.

    Args:
        cls: The dataclass, of plain values.
        row: Its fields.
        gaps: Fields may be left out, and are null then.
    """
    values: dict[str, Any] = {}
    for each in fields(cls):  # type: ignore[arg-type]  # there is no type of dataclasses
        value = row.get(each.name) if gaps else row[each.name]
        if each.type == "float":
            value = nan if value is None else float(value)
        values[each.name] = tuple(value) if isinstance(value, list) else value
    return cls(**values)


def without_nan(value: Any) -> Any:
    """Lists and dictionaries as JSON has them: null for numbers that do not exist."""
    if isinstance(value, dict):
        return {key: without_nan(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value
