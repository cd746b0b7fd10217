"""Starting kernels."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_WARPS = 8


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Starts ``programs`` programs of a kernel on the device of its first argument; none if there is nothing to do.

    Args:
        kernel: A function decorated with ``triton.jit``.
        programs: Size of the grid.
        arguments: Tensors and numbers; the first is a tensor.
        constants: Compile-time constants.
    """
    if programs == 0:
        return
    # Multiply-adds are not fused: products are rounded as PyTorch rounds them.
    with torch.cuda.device_of(arguments[0]):
        kernel[(programs,)](*arguments, **constants, num_warps=NUM_WARPS, enable_fp_fusion=False)


@triton.jit
def _write_one(out: tl.tensor) -> None:
    tl.store(out, 1)


def probe(device: torch.device) -> None:
    """Compiles and starts a kernel; raises what the toolchain raises where that is not possible."""
    out: Tensor = torch.empty(1, dtype=torch.int32, device=device)
    launch(_write_one, 1, out)
