"""Value formats: floats, or a few bits each with a scale for every part of a tensor."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_safusion.kernels import cpu as native
from lightning_safusion.sparsify.selection.view import device_constant

# So many entries, as a power of two and about, share a scale of 16 bits: an eighth of a bit for each.
_SHARING = 7


class ValueField(ABC):
    """The values of one span's messages. Sizes are known beforehand; every byte is written."""

    #: Bytes.
    nbytes: int

    @abstractmethod
    def write(self, indices: Tensor, values: Tensor, field: Tensor, echo: bool = True) -> Tensor:
        """Fills the field (uint8 [nbytes]) with the values of ascending positions, and with zeros behind them.

        Args:
            indices: int64 or int32 [K], positions in the span.
            values: float32 [K].
            field: Is written.
            echo: Return the decoded values.

        Returns:
            float32 [K], the values as :meth:`read` will give them; may be the same tensor. Undefined without ``echo``.
        """

    @abstractmethod
    def read(self, indices: Tensor, field: Tensor, first: int = 0) -> Tensor:
        """float32 [K], the values of positions (int64 [K]) that follow each other in the field, from ``first`` on."""

    def codes(self, field: Tensor) -> native.Codes | None:
        """The field as compiled kernels read and write it; None if they cannot."""
        return None


class FloatField(ValueField):
    """Finite values too large for a 16-bit format saturate; NaN and infinities are sent unchanged.

    Args:
        dtype: float32, bfloat16 or float16.
        capacity: Most values.
        edges: As in :class:`Values`; not used.
    """

    def __init__(self, dtype: torch.dtype, capacity: int, edges: Sequence[int] = ()) -> None:
        self.dtype = dtype
        self.nbytes = dtype.itemsize * capacity

    def write(self, indices: Tensor, values: Tensor, field: Tensor, echo: bool = True) -> Tensor:
        coded = values
        if self.dtype != torch.float32:
            limit = torch.finfo(self.dtype).max
            # Clamping an infinity would hide an overflow that the training loop must see.
            coded = torch.where(values.isinf(), values, values.clamp(-limit, limit)).to(self.dtype)
        fill(field.view(self.dtype), coded)
        return coded.float() if echo else values

    def read(self, indices: Tensor, field: Tensor, first: int = 0) -> Tensor:
        return field.view(self.dtype)[first : first + len(indices)].float()

    def codes(self, field: Tensor) -> native.Codes | None:
        if self.dtype == torch.float16:
            return None
        values = field.view(self.dtype)
        return native.Codes.floats((values if self.dtype == torch.float32 else values.view(torch.uint16)).numpy())


class QuantizedField(ValueField):
    """A sign and a level, relative to the largest magnitude in a part of a tensor.

    The parts are those of :func:`scale_edges`. Four bits have the sign and one of eight powers of two, the largest
    magnitude and halves of it: what Adam makes of a small gradient depends on its relative error. Two bits have two
    equally spaced levels, one bit a single one, the mean magnitude of the part. Powers of two: Horvath et al., Natural
    Compression for Distributed Deep Learning, MSML 2022; levels: Alistarh et al., QSGD, NeurIPS 2017 (both here rounded
    to the nearest, not at random); scaled signs with error feedback: Karimireddy et al., Error Feedback Fixes SignSGD,
    ICML 2019. A part with a value that is not finite has no finite values.

    Layout: ``[codes | scales]``, codes of several values in a byte, and a bfloat16 for each part.

    Args:
        bits: Of one value: 1, 2 or 4.
        capacity: Most values.
        edges: Where the parts of the span begin and end.
    """

    def __init__(self, bits: int, capacity: int, edges: Sequence[int]) -> None:
        self.bits = bits
        self._levels = 1 << (bits - 1)
        starts = np.asarray(edges, np.int64)
        self.starts = starts[:-1][np.diff(starts) > 0]  #: int64 [P], where the parts begin
        self._on_device: Tensor | None = None
        #: bytes before the scales, which are aligned as devices read best
        self.code_bytes = -(-capacity * bits // 128) * 16
        self.nbytes = -(-(self.code_bytes + 2 * len(self.starts)) // 4) * 4

    def write(self, indices: Tensor, values: Tensor, field: Tensor, echo: bool = True) -> Tensor:
        if native.serves(indices, values):
            field.zero_()
            sent = torch.empty_like(values) if echo else values
            if native.quantize(indices.numpy(), values.numpy(), self.codes(field), sent.numpy() if echo else None):
                return sent
        part, magnitudes = self._parts(indices.long()), values.abs()
        coarse = self._scales(part, magnitudes).to(torch.bfloat16)
        scale = coarse.float()[part]
        level = self._level(magnitudes, scale).clamp_(0, self._levels - 1).to(torch.uint8)
        codes = level.add_(values.signbit().to(torch.uint8), alpha=self._levels)
        fill(field, packed(pad(codes, (0, -len(codes) % 8)), self.bits))
        self._coarse(field).copy_(coarse)
        return self._values(codes, scale)

    def read(self, indices: Tensor, field: Tensor, first: int = 0) -> Tensor:
        if native.serves(indices) and len(indices):
            # the parts that the positions lie in
            places, coded = indices.numpy(), self.codes(field)
            low, high = self.starts.searchsorted(places[[0, -1]], side="right")
            parts = slice(max(low - 1, 0), high)
            some = coded._replace(starts=self.starts[parts], scales=coded.scales[parts])
            values = native.values(places, some, first)
            if values is not None:
                return torch.from_numpy(values)
        begin, skipped = divmod(first * self.bits, 8)
        skipped //= self.bits
        written = field[begin : -(-(first + len(indices)) * self.bits // 8)]
        codes = unpacked(written, self.bits)[skipped : skipped + len(indices)]
        return self._values(codes, self._coarse(field).float()[self._parts(indices)])

    def _level(self, magnitudes: Tensor, scale: Tensor) -> Tensor:
        """The level of each value, not yet limited to those that there are; 0 of zeros and of what is not finite."""
        if self.bits < 4:
            return (magnitudes * torch.where(scale > 0, self._levels / scale, 0)).floor_().nan_to_num_(0.0)
        # the bits of a float are its logarithm to the base 2, with a mantissa that is linear between two powers
        octaves = (magnitudes.view(torch.int32) - scale.view(torch.int32) + (1 << 22)) >> 23
        return (octaves + (self._levels - 1)).where((scale > 0) & scale.isfinite(), 0)

    def _coarse(self, field: Tensor) -> Tensor:
        return field[self.code_bytes :][: 2 * len(self.starts)].view(torch.bfloat16)

    def codes(self, field: Tensor) -> native.Codes:
        scales = self._coarse(field).view(torch.uint16).numpy()
        return native.Codes(field[: self.code_bytes].numpy(), scales, self.starts, self.bits)

    def _parts(self, indices: Tensor) -> Tensor:
        """int64 [K], the part that each position lies in."""
        if self._on_device is None:
            self._on_device = device_constant(self.starts, indices.device)
        return torch.searchsorted(self._on_device, indices, right=True).sub_(1)

    def _scales(self, part: Tensor, magnitudes: Tensor) -> Tensor:
        if self.bits > 1:
            scales = torch.zeros(len(self.starts), dtype=torch.float32, device=magnitudes.device)
            return scales.scatter_reduce_(0, part, magnitudes, "amax")
        # twice the mean: the only level is in the middle; padding is zeros. On the host, as compiled kernels add
        sums = magnitudes.double() if magnitudes.is_cpu else magnitudes
        scales = sums.new_zeros(len(self.starts))
        present = torch.zeros_like(scales).index_add_(0, part, (sums > 0).to(sums.dtype))
        return scales.index_add_(0, part, sums).mul_(2 / present.clamp_(min=1)).float()

    def _values(self, codes: Tensor, scale: Tensor) -> Tensor:
        level = torch.arange(self._levels, dtype=torch.float32, device=codes.device)
        table = (level - (self._levels - 1)).exp2() if self.bits == 4 else (level + 0.5) / self._levels
        return torch.cat([table, -table]).index_select(0, codes.int()).mul_(scale)


def packed(codes: Tensor, bits: int) -> Tensor:
    """uint8, several codes (uint8, a multiple of 8 of them) in every byte, the first one in the lowest bits."""
    lanes = codes.view(-1, 8 // bits)
    result = lanes[:, 0].clone()
    for lane in range(1, 8 // bits):
        result |= lanes[:, lane] << (lane * bits)
    return result


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """The inverse of :func:`packed`."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & ((1 << bits) - 1)).view(-1)


def fill(field: Tensor, entries: Tensor) -> None:
    """Writes the entries into the front of a field, and zeros behind them."""
    used = entries.numel()
    if used < field.numel():
        field[used:].zero_()
        field = field[:used]
    field.copy_(entries)


def scale_edges(edges: Sequence[int], entries: Sequence[int] | None, capacity: int) -> Sequence[int]:
    """Where the parts of a span begin and end whose values share a scale.

    They are a power of two of elements, so that devices find that of an element with a shift, hold about 128 entries
    each, and none has entries of two tensors, whose gradients may differ in size by orders of magnitude. Where the
    entries of each tensor are known its parts do not depend on the other tensors of the span.

    Args:
        edges: Where the tensors begin and end.
        entries: Most entries of each; None: in proportion to its elements.
        capacity: Most entries of all.
    """
    runs = list(pairwise(edges))
    ratios = (
        [(edges[-1], capacity)] * len(runs)
        if entries is None
        else [(stop - start, own) for (start, stop), own in zip(runs, entries, strict=True)]
    )
    length = {
        (numel, own): 1 << max(_SHARING, round(_SHARING + math.log2(max(numel, 1) / max(own, 1))))
        for numel, own in set(ratios)
    }
    starts = [np.arange(start, stop, length[ratio]) for (start, stop), ratio in zip(runs, ratios, strict=True)]
    return [*np.concatenate([np.empty(0, np.int64), *starts]).tolist(), edges[-1]]


@dataclass(frozen=True)
class Values:
    """A value format. A new one is a :class:`ValueField` and a row in :data:`VALUES`.

    Args:
        name: In the names of wire formats.
        dtype: Of the values before they are coded; float32 for those of a few bits.
        width: Bits of a value on the wire.
        field: Makes the field of a span, from the most entries and the edges of the parts that share a scale.
        few_bits: It rounds so much that the error must stay with the sender, and it has no zero.
    """

    name: str
    dtype: torch.dtype
    width: int
    field: Callable[[int, Sequence[int]], ValueField]
    few_bits: bool = True


#: Value formats by the name that a wire format has for them.
VALUES: dict[str, Values] = {
    "fp32": Values("fp32", torch.float32, 32, partial(FloatField, torch.float32), few_bits=False),
    "bf16": Values("bf16", torch.bfloat16, 16, partial(FloatField, torch.bfloat16), few_bits=False),
    "fp16": Values("fp16", torch.float16, 16, partial(FloatField, torch.float16), few_bits=False),
    "q4": Values("q4", torch.float32, 4, partial(QuantizedField, 4)),
    "q2": Values("q2", torch.float32, 2, partial(QuantizedField, 2)),
    "sign": Values("sign", torch.float32, 1, partial(QuantizedField, 1)),
}
