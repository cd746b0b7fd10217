"""Triton kernels for selection and the wire, on CUDA devices.

Triton is imported with the first selection from a CUDA tensor, never by ``import lightning_safusion``. Where it cannot
be used, the PyTorch operations of :mod:`lightning_safusion.sparsify.selection.torch_view` and
:mod:`lightning_safusion.comm.wire` give the same results.

``TritonView.top`` and ``take`` select exactly from all segments of a buffer in 6 launches, sums of all segments take 2;
``wire.encode`` writes values, positions, counts and padding of a message in 1, ``wire.decode_*`` reads it in 1 or 2.

Nothing here waits for the device, everything can be captured in a CUDA graph, and every result is the same bits in
every run: atomics add integers only, and floating sums have a fixed order.
"""

from __future__ import annotations

import inspect
import warnings
from functools import cache
from importlib.util import find_spec

import torch

__all__ = ["MOST_ELEMENTS", "serves"]

#: Elements of the longest span that is selected from: int32 addresses them, and the end of the last block too.
MOST_ELEMENTS = 2**31 - 2**13


def serves(device: torch.device) -> bool:
    """Whether the kernels run on ``device``; compiles the smallest of them on the first call for a CUDA device."""
    return device.type == "cuda" and usable(device)


@cache
def usable(device: torch.device) -> bool:
    """Whether the kernels can be compiled for ``device`` and run there; tried once."""
    if not torch.cuda.is_available() or find_spec("triton") is None:
        return False
    try:
        from triton import language

        # With masks came histograms that are counted in shared memory; before, a pass cost more than PyTorch's.
        if "mask" not in inspect.signature(language.histogram).parameters:
            return False
        from lightning_safusion.kernels.cuda.launch import probe

        probe(device)
    except Exception as error:  # whatever a toolchain can fail with: no compiler, an old driver, an unknown chip
        warnings.warn(
            f"Triton is installed but cannot run here ({type(error).__name__}: {error}); selection uses PyTorch "
            "operations, which give the same results more slowly. Triton needs a C compiler and a driver of its CUDA "
            "version.",
            stacklevel=2,
        )
        return False
    return True
