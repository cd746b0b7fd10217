"""Triton's interpreter, without work whose result it throws away: kernels take a third of the time."""

from __future__ import annotations

from dataclasses import replace
from threading import Lock
from typing import Any


def quicken() -> None:
    """Leaves out what the interpreter does anew for every call of a device function, and for every sum of integers.

    A launch replaces the functions of ``triton.language`` until it ends, and each device function in it looks through
    all of them again. Sums and products are worked out a second time in 64 bits for an assertion that only runs in
    debug mode. Since functions are replaced for all threads, one kernel runs at a time.
    """
    from triton.language import core
    from triton.runtime import interpreter

    def call(function: Any, *arguments: Any, **constants: Any) -> Any:
        if core.is_builtin(core.full):  # not replaced yet; a launch does not restore it
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*arguments, **constants)

    grid, turn = interpreter.GridExecutor.__call__, Lock()

    def in_turn(*arguments: Any, **constants: Any) -> None:
        with turn:
            grid(*arguments, **constants)

    interpreter.InterpretedFunction.__call__ = call
    interpreter.GridExecutor.__call__ = in_turn
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
