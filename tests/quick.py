"""Which parameters of a test run with every ``make test``; the others run with the slow tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick_of(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Parameters of a test; all that are not among ``quick`` run with the slow tests alone."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]


def slow(values: Iterable[Any]) -> list[Any]:
    """Parameters of a test, tuples where it has several, that run with the slow tests alone."""
    several = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*value, marks=pytest.mark.slow) for value in several]
