"""How kernels are started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

#: Elements that a program of the kernels holds at a time; those where gradients are added, which takes more registers;
#: bits of a message that are read together.
BLOCK, ADDED, BITS = 1024, 512, 256
# Warps of a program; of other kernels 4, so many that no register is spilled. write is fastest with one.
_WARPS = {"write": 1, "count_above": 8}
#: Version of Triton.
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
# Registers of a thread that a kernel may have. Without a limit some versions of NVIDIA's compiler spill one, so that a
# multiprocessor has room for another program; with these it has room for 4 to 8. AMD's compiler knows no such limit.
_REGISTERS = {"write": 128, "compensate": 80, "decode": 80, "reduce": 80, "commit": 80, "share": 64, "count_chunks": 64}
# Versions whose compiled kernels can be started as here; before 3.3 they are not given their constants again.
_KNOWN, _PASSES_CONSTANTS = (3, 2) <= VERSION <= (3, 9), VERSION >= (3, 3)
# Where those who want to be told of launches leave a function, or from 3.5 on several.
_HOOKS: Any = triton.knobs.runtime if VERSION >= (3, 4) else CompiledKernel
_HOST = -1  # the device of what is in host memory
_MOST_VARIANTS = 1024
#: Where a tensor lies in the memory of its device.
address_of: Callable[[Tensor], int] = Tensor.data_ptr
_type_of: Callable[[Tensor], torch.dtype] = attrgetter("dtype")


def options_of(kernel: Any, nvidia: bool = torch.version.hip is None) -> dict[str, Any]:
    """What the compiler is told of a kernel: warps, registers, and that products are rounded before they are added."""
    name, options = kernel.fn.__name__, dict[str, Any](enable_fp_fusion=False)
    if nvidia and name in _REGISTERS:
        options["maxnreg"] = _REGISTERS[name]
    return options | {"num_warps": _WARPS.get(name, 4)}


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Starts ``programs`` programs of a ``triton.jit`` kernel, if any, on the device of its first argument.

    Triton asks all arguments what they are before it knows which of its compiled kernels to start. Here that is asked
    once: what it has started is started again where all that its choice can depend on is the same, the device,
    addresses and types of tensors, integers, and ``constants``. Triton itself starts what is new, what a profiler wants
    to be told of, what is on another device than the current one, and all in its interpreter and in versions that are
    not known.

    Args:
        arguments: Its arguments: tensors, then numbers.
        constants: Its compile-time constants.
    """
    if programs == 0:
        return
    known = _started.get(kernel.fn) or _started.setdefault(kernel.fn, _Started(kernel, arguments, constants))
    tensors, numbers = arguments[: known.tensors], arguments[known.tensors :]
    if tuple(map(type, numbers)) != known.types or _is_told(kernel):
        start(kernel, programs, arguments, constants)
        return
    active = driver.active
    device, addresses, given = active.get_current_device(), [*map(address_of, tensors)], known.constants(constants)
    key = (device, *addresses, *map(_type_of, tensors), *known.integers(numbers), *given)
    variant = known.variants.get(key)
    if tensors[0].get_device() not in (device, _HOST):
        start(kernel, programs, arguments, constants)
    elif variant is None:
        known.keep(key, start(kernel, programs, arguments, constants))
    else:
        run, function, metadata = variant
        stream, passed = active.get_current_stream(device), given if _PASSES_CONSTANTS else ()
        run(programs, 1, 1, stream, function, metadata, None, None, None, *addresses, *numbers, *passed)


def start(kernel: Any, programs: int, arguments: Sequence[Any], constants: dict[str, Any]) -> Any:
    """Starts a kernel as Triton does; returns what was compiled."""
    with torch.cuda.device_of(arguments[0]):
        return kernel[(programs,)](*arguments, **constants, **options_of(kernel))


def _is_told(kernel: Any) -> bool:
    before, after = _HOOKS.launch_enter_hook, _HOOKS.launch_exit_hook
    return bool(kernel.pre_run_hooks or getattr(before, "calls", before) or getattr(after, "calls", after))


class _Started:
    def __init__(self, kernel: Any, arguments: Sequence[Any], constants: dict[str, Any]) -> None:
        self.tensors = next((i for i, each in enumerate(arguments) if not isinstance(each, Tensor)), len(arguments))
        numbers, names = arguments[self.tensors :], kernel.arg_names[len(arguments) :] if _KNOWN else []
        usual = {*names} == {*constants} and not any(isinstance(number, Tensor) for number in numbers)
        #: Of the numbers; None: Triton starts all.
        self.types = tuple(map(type, numbers)) if usual and type(kernel) is JITFunction else None
        self.integers = _picker([i for i, number in enumerate(numbers) if not isinstance(number, float)])
        self.constants = _picker(names)
        self.variants: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}

    def keep(self, key: tuple[Any, ...], made: Any) -> None:
        if isinstance(made, CompiledKernel):
            if len(self.variants) == _MOST_VARIANTS:
                self.variants.clear()
            self.variants[key] = made.run, made.function, made.packed_metadata


_started: dict[Any, _Started] = {}  # by the Python function of a kernel


def _picker(keys: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    return itemgetter(*keys) if len(keys) > 1 else lambda held: tuple(held[key] for key in keys)
