"""Triton kernels on CUDA devices.

Triton is imported with the first buffer or message on a CUDA device, never by ``import lightning_safusion``. Where it
cannot be used, and for other parts than the kernels know, the PyTorch operations of
:mod:`lightning_safusion.sparsify.selection.torch_view` and :mod:`lightning_safusion.comm.wire` give the same results.

``buffer.BufferKernels`` takes a buffer from gradients to a message in 7 launches, or 10 where tensors share a pool, and
from the messages of all ranks to means in 1; ``owners.OwnerKernels`` does so where shards have owners, who add up and
select again in 7; ``chosen`` has the kernels for other compressors than Top-k; ``window.WindowKernels`` ends a window
of all buffers in 1. ``tables`` says how a buffer is described to them.

Nothing here waits for the device, and every result is the same bits in every run: atomics add integers only, and
floating sums have a fixed order.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

__all__ = ["MOST_ELEMENTS", "serves_buffers"]

#: Elements of the longest buffer: int32 addresses them, and the end of the last block too.
MOST_ELEMENTS = 2**31 - 2**13


@cache
def serves_buffers(device: torch.device) -> bool:
    """Whether the kernels run on ``device``. The first call for a CUDA device compiles them, and warns if it fails."""
    if device.type != "cuda" or not torch.cuda.is_available() or find_spec("triton") is None:
        return False
    try:
        import_module(f"{__name__}.buffer").probe(device)
    except Exception as error:  # whatever a toolchain can fail with: no compiler, an old driver, an unknown chip
        warnings.warn(
            f"Triton is installed but cannot run here ({type(error).__name__}: {error}); buffers use PyTorch "
            "operations, which give the same results more slowly. Triton needs a C compiler and a driver of its CUDA "
            "version.",
            stacklevel=2,
        )
        return False
    return True
