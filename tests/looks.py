"""What compiled kernels are asked to do with the elements of a span, noted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
