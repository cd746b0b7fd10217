"""A buffer whose elements another compressor than Top-k chooses: its launches, and kernels that estimate thresholds."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_safusion.kernels.cuda import encode, launch
from lightning_safusion.kernels.cuda.buffer import BufferKernels, Weighing
from lightning_safusion.kernels.cuda.elements import MAGNITUDE
from lightning_safusion.kernels.cuda.packer import Constants
from lightning_safusion.kernels.cuda.rows import QUOTAS, ROOM, SLOTS
from lightning_safusion.kernels.cuda.tables import FOUR_BITS, WIDTH
from lightning_safusion.sparsify.base import Segments, Selection
from lightning_safusion.sparsify.selection.torch_view import TorchView
from lightning_safusion.sparsify.selection.view import device_constant

_PLACED = 256  # entries, and regions, of a program that places them


class PlacedKernels(BufferKernels):
    """Writes into messages what a compressor has selected by operations of PyTorch."""

    def add(self, decay: float) -> None:
        """Adds the gradients to the residual."""
        self.packer.take(known=True)
        self._compensate(decay, None)

    def place(self, selection: Selection) -> None:
        """Takes the elements that are sent, and their values."""
        packer, message, number = self.packer, self.tables.message, self.tables.number
        _set_room(packer.constants, selection.count)
        packer.words[message.fields[1] : message.fields[2]].zero_()
        indices, values = selection.indices, selection.values.view(torch.int32)
        count = -(-max(len(indices), len(self._regions)) // _PLACED)
        arrays = packer.constants.tensors, packer.constants.shape, self._regions
        steps = max(len(indices), number + 1).bit_length() + 1
        launch.launch(
            encode.place, count, indices, values, *arrays, packer.words, packer.entries, packer.largest,
            message.capacity, number, steps, BLOCK=_PLACED, SCALED=message.values == FOUR_BITS,
        )  # fmt: skip
        packer.selected = True

    @cached_property
    def _regions(self) -> Tensor:
        """int32 [R], the first elements of the regions of a message."""
        return device_constant(self.tables.region_starts, self.memory.device)


class ThresholdKernels(BufferKernels):
    """Selects what exceeds thresholds that a compressor estimates: of each tensor its largest elements, as many as
    exceed the threshold, but at least one and no more than its quota."""

    def add(self, decay: float, weighing: Weighing | None, segments: Segments) -> KernelView:
        """Adds the gradients to the residual.

        Returns:
            What the thresholds are estimated from: the sums, or in the units of the update their keys.
        """
        self.packer.take()
        self._keys = self._compensate(decay, weighing)
        x = self.memory
        if weighing is not None:
            x = torch.copysign(self._keys.view(torch.float32), x)
        return KernelView(x, segments, self)

    def find(self, view: KernelView, thresholds: Tensor) -> None:
        """Finds what is sent; ``thresholds``: float32 [T], of magnitudes."""
        constants, number = self.packer.constants, self.tables.number
        told = self.located.constants
        most = self._limits if told is None else told[0][QUOTAS.value, :number]
        quotas = view.count_above(thresholds).clamp_(min=1).minimum(most)
        upto = quotas.cumsum(0)
        constants.tensors[QUOTAS.value, :number].copy_(quotas)
        constants.tensors[SLOTS.value, :number].copy_(upto - quotas)
        _set_room(constants, upto[-1:])
        self.packer.find(self._keys, self.memory)

    @cached_property
    def _limits(self) -> Tensor:
        """int64 [T], most elements of each tensor where all take part."""
        return device_constant(self.tables.limited, self.memory.device)

    @cached_property
    def chunks_of_each(self) -> Tensor:
        """int64 [T], chunks of each tensor."""
        number = np.bincount(self.tables.chunks[0], minlength=self.tables.number)
        return device_constant(number.astype(np.int64), self.memory.device)


def _set_room(constants: Constants, count: int | Tensor) -> None:
    room = constants.shape[0, ROOM.value : ROOM.value + 1]
    if isinstance(count, Tensor):
        room.copy_(count.view(1))
    else:
        room.fill_(count)


class KernelView(TorchView):
    """Counts and adds up elements in one pass over them; everything else is left to PyTorch's operations.

    Args:
        x: float32 [N].
        segments: Its tensors and their quotas, as in the tables.
        kernels: Of the buffer.
    """

    def __init__(self, x: Tensor, segments: Segments, kernels: ThresholdKernels) -> None:
        super().__init__(x, segments)
        self._kernels, self._constants = kernels, kernels.constants
        self._sizes = kernels.tables.number, kernels.tables.chunks.shape[1]

    def count_above(self, thresholds: Tensor, enough: Tensor | None = None) -> Tensor:
        number, count = self._sizes
        found = torch.zeros(number, dtype=torch.int32, device=self.x.device)
        span = self.x.view(torch.int32), self._constants.chunks, self._constants.tensors
        launch.launch(count_above, count, *span, thresholds.contiguous(), found, number, count, BLOCK=WIDTH)
        return found.long()

    def moments(self, *, magnitudes: bool = False) -> tuple[Tensor, Tensor]:
        number, count = self._sizes
        sums = torch.empty(2, count, dtype=torch.float64, device=self.x.device)
        arrays = self.x, self._constants.chunks, self._constants.tensors
        launch.launch(add_up, count, *arrays, sums, number, count, MAGNITUDES=magnitudes, BLOCK=launch.BLOCK)
        total, squares = (
            torch.segment_reduce(row, "sum", lengths=self._kernels.chunks_of_each, unsafe=True, initial=0.0)
            for row in sums
        )
        return total, squares


@triton.jit(do_not_specialize=["number", "count"], do_not_specialize_on_alignment=["x"])
def count_above(
    x: tl.tensor,
    chunks: tl.tensor,
    tensors: tl.tensor,
    thresholds: tl.tensor,
    found: tl.tensor,
    number: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Adds to ``found`` (int32 [T]) how many magnitudes of each tensor exceed its threshold (float32 [T]).

    ``x`` are the bits of the elements. None exceeds NaN. A program for each chunk.
    """
    chunk = tl.program_id(0)
    tensor = tl.load(chunks + chunk)
    if tl.load(tensors + QUOTAS * (number + 1) + tensor) > 0:
        start, stop = tl.load(chunks + count + chunk), tl.load(chunks + 2 * count + chunk)
        threshold = tl.load(thresholds + tensor)
        floor = tl.where(threshold < 0, -1, threshold.to(tl.int32, bitcast=True) & MAGNITUDE)
        floor = tl.where(threshold != threshold, MAGNITUDE, floor)
        above = tl.zeros([BLOCK], tl.int32)
        for at in range(start, stop, BLOCK):
            offsets = at + tl.arange(0, BLOCK)
            inside = offsets < stop
            above += (inside & ((tl.load(x + offsets, mask=inside, other=0) & MAGNITUDE) > floor)).to(tl.int32)
        tl.atomic_add(found + tensor, tl.sum(above, 0), sem="relaxed")


@triton.jit(do_not_specialize=["number", "count"], do_not_specialize_on_alignment=["x"])
def add_up(
    x: tl.tensor,
    chunks: tl.tensor,
    tensors: tl.tensor,
    sums: tl.tensor,
    number: tl.tensor,
    count: tl.tensor,
    MAGNITUDES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Sums of the elements (float32) of each chunk, or of their magnitudes, and of squares: float64 [2, count].

    A program for each chunk.
    """
    chunk = tl.program_id(0)
    tensor = tl.load(chunks + chunk)
    total, squares = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    if tl.load(tensors + QUOTAS * (number + 1) + tensor) > 0:
        start, stop = tl.load(chunks + count + chunk), tl.load(chunks + 2 * count + chunk)
        for at in range(start, stop, BLOCK):
            offsets = at + tl.arange(0, BLOCK)
            value = tl.load(x + offsets, mask=offsets < stop, other=0.0)
            wide = value.to(tl.float64)
            squares += wide * wide
            total += tl.abs(value).to(tl.float64) if MAGNITUDES else wide
    tl.store(sums + chunk, tl.sum(total, 0))
    tl.store(sums + count + chunk, tl.sum(squares, 0))
