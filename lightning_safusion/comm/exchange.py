"""The exchange of one fusion buffer: the contract of a collective."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.transport.interface import Transport, Work
from lightning_safusion.kernels import cpu as native
from lightning_safusion.kernels.fields import MESSAGE_BYTES, TensorFlag
from lightning_safusion.kernels.fields import Notice as Notice  # of the headers that a verdict reads
from lightning_safusion.sparsify.base import Segments, Selection
from lightning_safusion.sparsify.selection.units import SpanUnits
from lightning_safusion.sparsify.selection.view import device_constant

#: Zeroing only what was written is cheaper than zeroing the span until about a quarter of it was written.
SPARSE_CLEAR_SHARE = 4


@dataclass(frozen=True)
class SpanSpec:
    """The static shape of one buffer's exchange; a function of plan and quotas, equal on all ranks.

    Args:
        numel: Elements of the span (N).
        capacity: Most selected elements.
        edges: Element edges of the tensors in the span, ``T + 1`` numbers from 0 to N.
        dense_runs: Pieces ``(start, stop, dtype)`` of the span that are dense, in that dtype.
    """

    numel: int
    capacity: int
    edges: tuple[int, ...]
    dense_runs: tuple[tuple[int, int, torch.dtype], ...]

    @property
    def num_tensors(self) -> int:
        """Tensors in the span (T)."""
        return len(self.edges) - 1

    @property
    def dense_tensors(self) -> list[int]:
        """Tensors in a dense run, without empty ones."""
        tensors = enumerate(pairwise(self.edges))
        return [t for t, (a, b) in tensors if a < b and any(c <= a and b <= d for c, d, _ in self.dense_runs)]

    def sparse_parts(self, most: int | None = None) -> tuple[list[int], native.Parts]:
        """Tensors with elements that are not dense, and where they lie; ``most``: see :class:`native.Parts`."""
        edges = np.asarray(self.edges, np.int64)
        sizes = np.diff(edges)
        sizes[self.dense_tensors] = 0
        tensors = np.flatnonzero(sizes)
        return tensors.tolist(), native.Parts.of(edges[tensors], sizes[tensors], most)


@dataclass(frozen=True)
class Part:
    """What one rank sends of a span in one step.

    Args:
        selection: The sparse part; None sends nothing of it.
        flags: uint8 [T] of :class:`TensorFlag`, on the span's device.
        absent: Tensors of which this rank sends nothing, 0 to T - 1.
        notices: Bits of :class:`Notice` for all ranks.
        units: Elements are compared in these; None: as they are. For collectives that select again.
    """

    selection: Selection | None
    flags: Tensor
    absent: Sequence[int] = ()
    notices: int = 0
    units: SpanUnits | None = None


@dataclass(frozen=True)
class Verdict:
    """The flags and notices of all ranks for the tensors of one buffer; the same on all ranks.

    Args:
        fresh: int64 [T], number of ranks with a fresh gradient.
        bad: bool [T], not finite on some rank.
        bypass: bool [T], on some rank it must bypass compression.
        notices: Bits of :class:`Notice` that some rank has set.
        plain: Every tensor is fresh on all ranks, without other flags or notices: almost every step.
    """

    fresh: np.ndarray
    bad: np.ndarray
    bypass: np.ndarray
    notices: int
    plain: bool = False

    @classmethod
    def of(cls, headers: np.ndarray) -> Verdict:
        """From the flags and notices of all ranks, uint8 [world_size, T + 1]."""
        flags, notices = headers[:, :-1], int(np.bitwise_or.reduce(headers[:, -1]))
        fresh, bad, bypass = ((flags & flag) != 0 for flag in TensorFlag)
        plain = not notices and bool((flags == TensorFlag.FRESH).all())
        return cls(fresh.sum(axis=0), bad.any(axis=0), bypass.any(axis=0), notices, plain)

    def is_regular(self, world_size: int) -> bool:
        """Whether every tensor is fresh on all ranks, and bypasses compression on none."""
        return bool((self.fresh == world_size).all()) and not self.bypass.any()

    def irregular(self, world_size: int) -> np.ndarray:
        """bool [T], averaged uncompressed by a second pass: bypassing on some rank, or fresh on some ranks only."""
        return self.bypass | ((self.fresh > 0) & (self.fresh < world_size))


@lru_cache(maxsize=256)
def _usual(world_size: int, length: int) -> tuple[bytes, Verdict]:
    headers = np.tile(np.array([*[TensorFlag.FRESH] * (length - 1), 0], np.uint8), (world_size, 1))
    return headers.tobytes(), Verdict.of(headers)


def aligned(nbytes: int, to: int = MESSAGE_BYTES) -> int:
    """The next multiple."""
    return -(-nbytes // to) * to


def padded(numel: int, dtype: torch.dtype) -> int:
    """Elements of a message with room for so many."""
    return aligned(numel * dtype.itemsize) // dtype.itemsize


def saturated(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor, cut to the range of ``dtype``: the excess stays in the residual and is sent later."""
    if dtype != torch.float16:  # sums of gradients do not leave the range of other formats
        return tensor
    limit = torch.finfo(dtype).max
    return tensor.clamp(-limit, limit)


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite (waits for the device)."""
    # one fast pass; a sum of finite numbers can overflow, so only its "yes" is final
    return math.isfinite(tensor.sum(dtype=torch.float32).item()) or bool(torch.isfinite(tensor).all())


@dataclass(frozen=True)
class Ability:
    """What a collective can do, and what it needs.

    Args:
        conserves: The results of :meth:`Exchange.sent` on all ranks add up to the delivered sum, so that nothing of a
            gradient is lost.
        few_bits: Messages arrive as their sender wrote them, so that it can keep the error of rounding to a few bits.
        selects_itself: It selects from sums that only it sees: a selection from one rank's part would be thrown away.
        cuts_tensors: It cuts tensors into parts with quotas of their own: :attr:`Exchange.segments`, unless it selects
            itself.
        phases: :meth:`Exchange.advance` launches later phases, as soon as they can be, on a communicator of their own.
        begins_early: It has a part that needs no selection: :meth:`Exchange.begin` is called before it.
        uses_scratch: :meth:`Exchange.decode` builds its result in the scratch; otherwise that may be empty.
    """

    conserves: bool = True
    few_bits: bool = False
    selects_itself: bool = False
    cuts_tensors: bool = False
    phases: bool = False
    begins_early: bool = False
    uses_scratch: bool = True


class Exchange(ABC):
    """Sends what each rank has selected of one span to all ranks, and gives back the mean, the same bits on all.

    A collective implements :meth:`encode`, :meth:`start`, :meth:`verdict`, :meth:`decode` and :meth:`sent_dense`, and
    gives :meth:`sent` what it has sent; every other method has a default. Buffers persist from step to step.

    Args:
        spec: Shape of the exchange.
        transport: Communicator; :meth:`start` must be called in one agreed order on it.
        device: Where the span lives.

    Attributes:
        segments: The cut that it needs in place of the buffer's own; None: that of the buffer.
        bytes_sent: Bytes that this rank gave to the collectives of its last exchange; a piece for all ranks counts
            once.
        bytes_received: Bytes that it received from others, dense pieces by the closed form of the collective.
    """

    ability: ClassVar[Ability] = Ability()
    #: Share of a quota that a worker sends of what it has selected itself.
    scattered: ClassVar[float] = 1.0

    def __init__(self, spec: SpanSpec, transport: Transport, device: torch.device) -> None:
        self.spec = spec
        self.transport = transport
        self.device = device
        self.segments: Segments | None = None
        self.bytes_sent = self.bytes_received = 0
        nonempty = [t for t in range(spec.num_tensors) if spec.edges[t] < spec.edges[t + 1]]
        self._nonempty = device_constant(np.array(nonempty, np.int64), device)
        self._firsts = device_constant(np.array([spec.edges[t] for t in nonempty], np.int64), device)
        empty = torch.zeros(0, dtype=torch.int64, device=device)
        self._nothing = Selection(empty, empty.to(torch.float32), 0)
        self._sent = (self._nothing.indices, self._nothing.values)
        # where, besides the dense runs, decode has written to the scratch; None: anywhere
        self._written: list[Tensor] | None = None

    def begin(self, x: Tensor, part: Part) -> None:
        """Starts the part that needs no selection; :meth:`encode`, with all of ``part``, and :meth:`start` follow."""
        raise NotImplementedError(f"{type(self).__name__} has nothing that begins before the selection")

    @abstractmethod
    def encode(self, x: Tensor, part: Part) -> None:
        """Packs this rank's part.

        Args:
            x: float32 [N], residual plus gradient; not changed, and not needed afterwards.
            part: What this rank sends of it.
        """

    @abstractmethod
    def start(self) -> Work:
        """Starts the collective with the packed part.

        Returns:
            What to wait for before anything is read: it raises the backend's error if a peer has died.
        """

    def advance(self, wait: bool) -> bool:
        """Launches phases that need the result of an earlier one; called in plan order, while others are under way.

        Args:
            wait: For the earlier phase; otherwise only if it has ended.

        Returns:
            Whether there is nothing left to launch.
        """
        return True

    @abstractmethod
    def verdict(self) -> Verdict:
        """The headers of all ranks, once the collective has ended (waits for the device)."""

    @abstractmethod
    def decode(self, scratch: Tensor) -> Tensor:
        """Reads the messages of all ranks, adding rank by rank so that every rank gets the same bits.

        Args:
            scratch: float32 [N] of zeros that the result may be built in.

        Returns:
            The mean over ranks, floating [N]; valid until :meth:`release`.
        """

    def decode_into(self, gradients: Sequence[Tensor]) -> bool | None:
        """:meth:`decode` without the buffer in between: writes the mean straight into the gradients.

        Args:
            gradients: float32, flat, one of each tensor of the span, on its device; no two share memory.

        Returns:
            Whether the mean is finite (waits for the device); None if nothing was written and :meth:`decode` is to be
            called, because this collective cannot do so or it would take longer.
        """
        return None

    def dense_runs(self, span: Tensor) -> list[Tensor]:
        """The dense pieces of a span [N]."""
        return [span[start:stop] for start, stop, _ in self.spec.dense_runs]

    def _note_written(self, indices: Tensor) -> None:
        """Records where :meth:`decode` has written, as long as clearing only that pays."""
        if self._written is not None:
            self._written.append(indices)
            if sum(map(len, self._written)) * SPARSE_CLEAR_SHARE > self.spec.numel:
                self._written = None

    def is_finite(self, mean: Tensor) -> bool:
        """Whether the decoded mean is finite (waits for the device): sums of finite numbers can overflow."""
        if self._written is None:
            return all_finite(mean)
        # the rest is zero
        finite = all(all_finite(mean[indices]) for indices in self._written)
        return finite and all(map(all_finite, self.dense_runs(mean)))

    def poison(self, mean: Tensor, bad: Tensor) -> None:
        """Makes the tensors in ``bad`` (bool [T], on the device of the span) not finite in the mean."""
        self._written = None
        mark = torch.where(bad[self._nonempty], torch.nan, 0.0).to(mean.dtype)
        mean.index_add_(0, self._firsts, mark)

    def release(self, scratch: Tensor) -> None:
        """Makes the scratch zero again."""
        if self._written is None:
            scratch.zero_()
        else:
            for indices in self._written:
                scratch.index_fill_(0, indices, 0.0)
            for piece in self.dense_runs(scratch):
                piece.zero_()
        self._written = None

    def sent(self) -> tuple[Tensor, Tensor]:
        """``(indices int64 [K], values float32 [K])`` of the sparse part as the receivers decoded them."""
        return self._sent

    def chosen(self) -> Tensor:
        """int64 [K], ascending: where elements were sent, of a collective that :attr:`Ability.selects_itself`."""
        return self.sent()[0]

    def sent_message(self) -> native.Message | None:
        """The message itself, where compiled kernels can read it; None otherwise."""
        return None

    @abstractmethod
    def sent_dense(self, start: int, stop: int, x: Tensor) -> Tensor:
        """float32 [stop - start]: the dense piece as the receivers decoded it, given the same ``x`` as at launch."""

    def state_dict(self) -> dict[str, Any]:
        """What the next exchange depends on: plain values, the same on all ranks; most collectives learn nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned, on all ranks."""
        return


class StreamOrderedExchange(Exchange):
    """An exchange that can be decoded and judged on the device, while the host proceeds.

    Attributes:
        headers: Of all ranks, as received, on the device of the span: uint8 [world_size, T + 1], flags and notices,
            unless a collective reads them in another way.
    """

    headers: Tensor

    def verdict(self, headers: Tensor | None = None) -> Verdict:
        """See :meth:`Exchange.verdict`; given a copy of :attr:`headers` on the host it does not wait."""
        found = (self.headers if headers is None else headers).cpu().numpy()
        usual, verdict = _usual(*found.shape)
        return verdict if found.tobytes() == usual else Verdict.of(found)

    def standing(self) -> tuple[Tensor, Tensor]:
        """The verdict on the device: bool [T], not finite on some rank; and bool: all tensors of all ranks are good."""
        flags, notices = self.headers[:, :-1], self.headers[:, -1]
        regular = (flags == int(TensorFlag.FRESH)).all() & ((notices & int(Notice.FAILED)) == 0).all()
        return ((flags & int(TensorFlag.BAD)) != 0).any(dim=0), regular
