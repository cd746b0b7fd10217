"""How a span is cut for a grid of programs, and how kernels are started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_safusion.sparsify.base import Segments, constant_of_segments
from lightning_safusion.sparsify.selection.view import device_constant

NUM_WARPS = 8
_WARPS = dict.fromkeys(("compensate", "share", "narrow", "write", "pack", "decode", "commit"), 4)
BLOCK = 8192  # elements that a program holds at a time
PROGRAMS = 2048  # about as many as a large device runs in a few waves; bounds what a program adds up of the others


@dataclass(frozen=True, eq=False)
class Chunks:
    """The segments with elements and a quota ([A]), and the chunks of them ([C]), on the device.

    Args:
        table: int32 [4, C], for each chunk its segment among the active ones, its first element, the element after its
            last, and the place of its first block among all blocks.
        spans: int32 [2, A], the first chunk of each active segment, and the one after its last.
        quotas: int32 [A], no more than the size of the segment.
        active: int64 [A], the active segments among all.
        blocks: Blocks of all chunks.
        capacity: Sum of the quotas.
        longest: Most chunks that a segment has.
    """

    table: Tensor
    spans: Tensor
    quotas: Tensor
    active: Tensor
    blocks: int
    capacity: int
    longest: int

    @property
    def count(self) -> int:
        """Number of chunks (C)."""
        return self.table.shape[1]

    @property
    def segments(self) -> int:
        """Number of active segments (A)."""
        return self.spans.shape[1]

    @staticmethod
    @constant_of_segments
    def of(segments: Segments, device: torch.device) -> Chunks:
        active = np.flatnonzero((segments.sizes > 0) & (segments.quotas > 0))
        sizes, starts = segments.sizes[active], segments.edges[active]
        quotas = np.minimum(segments.quotas[active], sizes)
        width = max(-(-int(sizes.sum()) // (PROGRAMS * BLOCK)), 1) * BLOCK
        number = -(-sizes // width)
        last = np.cumsum(number)
        owner = np.repeat(np.arange(len(active)), number)
        first = starts[owner] + (np.arange(len(owner)) - (last - number)[owner]) * width
        stop = np.minimum(first + width, (starts + sizes)[owner])
        blocks = -(-(stop - first) // BLOCK)
        table = np.stack([owner, first, stop, np.cumsum(blocks) - blocks]).astype(np.int32)
        arrays = (table, np.stack([last - number, last]).astype(np.int32), quotas.astype(np.int32), active)
        cuts, spans, limits, places = (device_constant(array, device) for array in arrays)
        return Chunks(cuts, spans, limits, places, int(blocks.sum()), int(quotas.sum()), int(number.max(initial=0)))


def warps_of(kernel: Any) -> int:
    """Warps of a program: so many that no register is spilled."""
    return _WARPS.get(kernel.fn.__name__, NUM_WARPS)


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
