"""What compiled kernels are asked to do with the elements of a span, noted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_safusion.kernels.cpu import elements, usable


class _Noted:
    """The compiled functions; each call is noted.

    Args:
        note: Takes the name of a function and its arguments.
    """

    def __init__(self, note: Callable[[str, tuple[Any, ...]], None]) -> None:
        self._note, self._kernels = note, elements.kernels()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._kernels, name)

        def call(*arguments: Any) -> Any:
            self._note(name.removeprefix("safusion_"), arguments)
            return function(*arguments)

        return call


def note_kernels(monkeypatch: pytest.MonkeyPatch, note: Callable[[str, tuple[Any, ...]], None]) -> None:
    """Lets ``note`` see every call of a kernel that reads elements, if there are kernels."""
    if usable():
        noted = _Noted(note)
        monkeypatch.setattr(elements, "kernels", lambda: noted)
