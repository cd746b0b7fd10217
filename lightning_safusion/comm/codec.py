"""The contract of a wire format: the selection of one span as bytes of a fixed size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from lightning_safusion.kernels import serves
from lightning_safusion.sparsify.base import Selection

#: Dtypes in which values may travel, by the name that a wire format has for them.
VALUE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_VALUE_NAMES = {dtype: name for name, dtype in VALUE_DTYPES.items()}


class Codec(ABC):
    """Encodes the selection of one span into exactly ``nbytes`` bytes.

    The size is a function of the span and its capacity only, so that it is the same on all ranks without asking.
    Encoding is deterministic and writes every byte; padding is zeros. Finite values too large for a 16-bit format
    saturate: the values that :meth:`encode` returns show what was cut, so that it stays with the sender. NaN and
    infinities travel as they are.

    Args:
        numel: Elements of the span.
        capacity: Most elements that a selection may hold.
        value_dtype: float32, bfloat16 or float16 on the wire.

    Attributes:
        name: ``"<layout>-<values>"``, for example ``"block16-bf16"``.

    Raises:
        ValueError: If the capacity does not fit the span, or the format cannot carry the span or the dtype.
    """

    layout: ClassVar[str]
    #: One launch of a Triton kernel writes a message.
    has_kernel: ClassVar[bool] = True

    def __init__(self, numel: int, capacity: int, value_dtype: torch.dtype) -> None:
        if not 0 <= capacity <= numel:
            raise ValueError(f"capacity must be between 0 and the {numel} elements of the span, got {capacity}")
        if value_dtype not in _VALUE_NAMES:
            raise ValueError(f"values travel as float32, bfloat16 or float16, got {value_dtype}")
        self.numel = numel
        self.capacity = capacity
        self.value_dtype = value_dtype
        self.name = f"{self.layout}-{_VALUE_NAMES[value_dtype]}"

    @property
    @abstractmethod
    def field_bytes(self) -> tuple[int, ...]:
        """Bytes of each field, in an order that aligns every field to its own element size."""

    @cached_property
    def nbytes(self) -> int:
        """Size of a message, bytes, a multiple of 4."""
        return -(-sum(self.field_bytes) // 4) * 4

    @cached_property
    def _split_sizes(self) -> list[int]:
        """Bytes of the fields, and of what rounds the size up."""
        sizes = self.field_bytes
        return [*sizes, self.nbytes - sum(sizes)]

    def encode(self, selection: Selection, out: Tensor) -> Tensor:
        """Writes every byte of ``out`` (uint8 [nbytes], 4-byte aligned).

        Returns:
            float32 [L], one per entry of ``selection.indices``: the value as every receiver will decode it (padding 0).
            May be ``selection.values`` itself.

        Raises:
            ValueError: If the selection exceeds the capacity, or ``out`` has another size.
        """
        self._check(out)
        if selection.indices.numel() > self.capacity:
            raise ValueError(
                f"the selection has {selection.indices.numel()} entries, the message has room for {self.capacity}: "
                "cut the selection to the quotas of its segments"
            )
        fields = self._fields(out)
        if self.has_kernel and serves(out.device):
            from lightning_safusion.kernels import wire  # imports Triton

            return wire.encode(self.layout, selection, fields, self.value_dtype)
        if self._split_sizes[-1]:
            fields[-1].zero_()
        return self.write(selection, fields[:-1])

    @abstractmethod
    def write(self, selection: Selection, fields: Sequence[Tensor]) -> Tensor:
        """:meth:`encode` with the operations of PyTorch, into uint8 views of the fields."""

    def decode(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Reads a message (uint8 [nbytes], 4-byte aligned).

        Returns:
            ``(indices int64 [L], values float32 [L])``: positions in the span, and values; entries that are padding
            have value 0 and an index inside the span. Valid indices are unique and ascending. On the CPU padding is
            cut off. Values may share the memory of the message.

        Raises:
            ValueError: If the message has another size.
        """
        self._check(message)
        return self.decode_cut(message) if message.device.type == "cpu" else self.decode_padded(message)

    @abstractmethod
    def decode_cut(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`decode` of a message in host memory: as many entries as were sent."""

    @abstractmethod
    def decode_padded(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`decode` on any device: a fixed number of entries, so that the host need not know the count."""

    def _check(self, message: Tensor) -> None:
        if message.dtype != torch.uint8 or message.dim() != 1 or message.numel() != self.nbytes:
            raise ValueError(
                f"a {self.name} message for {self.capacity} of {self.numel} elements is uint8 [{self.nbytes}], "
                f"got {message.dtype} {list(message.shape)}"
            )

    def _fields(self, message: Tensor) -> tuple[Tensor, ...]:
        """Views of the fields, and of the bytes that round the size up."""
        return message.split(self._split_sizes)

    def _quantize(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Values (float32 [L]) in the dtype of the wire, and the same as float32."""
        if self.value_dtype == torch.float32:
            return values, values
        limit = torch.finfo(self.value_dtype).max
        # Clamping an infinity would hide an overflow that the training loop must see.
        coded = torch.where(values.isinf(), values, values.clamp(-limit, limit)).to(self.value_dtype)
        return coded, coded.float()

    def _read_values(self, field: Tensor, count: int) -> Tensor:
        values = field.view(self.value_dtype)
        return (values if count == len(values) else values[:count]).float()
