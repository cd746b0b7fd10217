"""How kernels are started."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Warps of a program, so many that no register is spilled; of other kernels 8.
_WARPS = dict.fromkeys(("compensate", "share", "narrow", "write", "pack", "decode", "reduce", "commit"), 4)


def warps_of(kernel: Any) -> int:
    """Warps of a program of a kernel."""
    return _WARPS.get(kernel.fn.__name__, 8)


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Starts ``programs`` programs of a ``triton.jit`` kernel, if any, on the device of its first argument, a tensor.

    ``constants`` are its compile-time constants.
    """
    if programs == 0:
        return
    # Multiply-adds are not fused: products are rounded as PyTorch rounds them.
    with torch.cuda.device_of(arguments[0]):
        kernel[(programs,)](*arguments, **constants, num_warps=warps_of(kernel), enable_fp_fusion=False)


def address_of(tensor: Tensor) -> int:
    """Where a tensor lies in the memory of its device."""
    return tensor.data_ptr()


@triton.jit
def _write_one(out: tl.tensor) -> None:
    tl.store(out, 1)


def probe(device: torch.device) -> None:
    """Compiles and starts a kernel; raises what the toolchain raises where that is not possible."""
    launch(_write_one, 1, torch.empty(1, dtype=torch.int32, device=device))
