"""Triton's interpreter, without work whose result it throws away: kernels take a third of the time."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

import numpy as np


def quicken() -> None:
    """Leaves out what the interpreter does anew for every call of a device function, and for every operation.

    A launch replaces the functions of ``triton.language`` until it ends, and each device function in it looks through
    all of them again. Sums and products are worked out a second time in 64 bits for an assertion that only runs in
    debug mode. NumPy's dtypes are looked up in a table that is made anew, and sizes of elements are compared with
    them. Since functions are replaced for all threads, one kernel runs at a time.
    """
    import triton
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

    dtypes, dtype_of = dict[str, Any](), interpreter._get_np_dtype

    def known(dtype: Any) -> Any:
        if dtype.name not in dtypes:
            dtypes[dtype.name] = dtype_of(dtype)
        return dtypes[dtype.name]

    if triton.__version__.startswith("3.2."):
        _mend()
    _remember(core.block_type, lambda element, shape: (element.name, str(shape)))
    _remember(core.tensor, lambda handle, type: type.name, "handle")
    interpreter._get_np_dtype = known
    interpreter.TensorHandle.__post_init__ = lambda _: None
    interpreter.InterpretedFunction.__call__ = call
    interpreter.GridExecutor.__call__ = in_turn
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def _remember(kind: Any, key: Callable[..., Hashable], first: str = "") -> None:
    """Objects that differ in the first argument alone, if in anything, are made like the first of them."""
    make, known = kind.__init__, dict[Hashable, dict[str, Any]]()

    def init(self: Any, *arguments: Any) -> None:
        kept = key(*arguments)
        if kept not in known:
            make(self, *arguments)
            known[kept] = dict(self.__dict__)
            return
        self.__dict__.update(known[kept])
        if first:
            self.__dict__[first] = arguments[0]

    kind.__init__ = init


def _mend() -> None:
    """Takes two errors out of the interpreter of Triton 3.2: sums of 32 bits have 64, and a mask that is one False is
    taken for none."""
    from triton.language import core, semantic
    from triton.runtime import interpreter

    reductions = interpreter.ReduceOps.__base__
    made = reductions.to_tensor

    class Mask(core.tensor):
        def __bool__(self) -> bool:
            return True

    def typed(self: Any, numbers: Any, dtype: Any) -> Any:
        return made(self, np.asarray(numbers).astype(interpreter._get_np_dtype(dtype)), dtype)

    def masked(function: Any, pointer: Any, value: Any, mask: Any, *others: Any) -> Any:
        return function(pointer, value, None if mask is None else Mask(mask.handle, mask.type), *others)

    reductions.to_tensor = typed
    for name in ("atom_red_typechecking_impl", "_store_legacy"):
        setattr(semantic, name, partial(masked, getattr(semantic, name)))
