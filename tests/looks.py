"""What compiled kernels are asked to do with the elements of a span, noted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lightning_safusion.kernels.cpu import elements, usable


def note_kernels(monkeypatch: pytest.MonkeyPatch, note: Callable[[str, tuple[Any, ...]], None]) -> None:
    """Lets ``note`` see every call of a kernel that reads elements, if there are kernels."""
    if not usable():
        return
    kernels = elements.kernels()

    class Noted:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                note(name.removeprefix("safusion_"), arguments)
                return getattr(kernels, name)(*arguments)

            return call

    monkeypatch.setattr(elements, "kernels", Noted)


def note_looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Elements of each look at a span, as they come."""
    sizes: list[int] = []

    def note(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "survey":
            sizes.append(int(np.sum(arguments[2])))

    note_kernels(monkeypatch, note)
    return sizes
