"""A few values that take long to make."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The values that were asked for last, by key.

    Args:
        most: How many are kept.
    """

    def __init__(self, most: int) -> None:
        self._most, self._values = most, dict[K, V]()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """What ``make`` has returned for a key; it is called if that is not kept."""
        value = self._values.pop(key) if key in self._values else make()
        while len(self._values) >= self._most:
            del self._values[next(iter(self._values))]
        self._values[key] = value
        return value
