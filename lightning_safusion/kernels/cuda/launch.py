"""How kernels are started."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Warps of a program, so many that no register is spilled; of other kernels 8.
_WARPS = dict.fromkeys(
    ("compensate", "share", "narrow", "write", "pack", "decode", "reduce", "commit", "place", "add_up"), 4
)
#: Version of Triton.
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
# Registers of a thread that a kernel may have. Without a limit some versions of NVIDIA's compiler spill one, so that a
# multiprocessor has room for another program; with these it has room for 4 and 6. AMD's compiler knows no such limit.
_REGISTERS = {"write": 128, "decode": 80, "reduce": 80, "commit": 80}


def options_of(kernel: Any, nvidia: bool = torch.version.hip is None) -> dict[str, Any]:
    """What the compiler is told of a kernel: warps, registers, and that products are rounded before they are added."""
    name, options = kernel.fn.__name__, dict[str, Any](enable_fp_fusion=False)
    if nvidia and name in _REGISTERS:
        options["maxnreg"] = _REGISTERS[name]
    return options | {"num_warps": _WARPS.get(name, 8)}


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Starts ``programs`` programs of a ``triton.jit`` kernel, if any, on the device of its first argument, a tensor.

    ``constants`` are its compile-time constants.
    """
    if programs == 0:
        return
    with torch.cuda.device_of(arguments[0]):
        kernel[(programs,)](*arguments, **constants, **options_of(kernel))


def address_of(tensor: Tensor) -> int:
    """Where a tensor lies in the memory of its device."""
    return tensor.data_ptr()


@triton.jit
def _write_one(out: tl.tensor) -> None:
    tl.store(out, 1)


def probe(device: torch.device) -> None:
    """Compiles and starts a kernel; raises what the toolchain raises where that is not possible."""
    launch(_write_one, 1, torch.empty(1, dtype=torch.int32, device=device))
