"""Buffers of several ranks for the fused kernels: what every rank has, and what the CPU makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.collectives.allgather import SparseAllGather
from lightning_safusion.comm.exchange import Part, SpanSpec, saturated
from lightning_safusion.comm.transport.torch_backend import SoloTransport
from lightning_safusion.comm.wire.formats import resolve_codec
from lightning_safusion.kernels.cuda.buffer import BufferKernels, Weighing
from lightning_safusion.kernels.cuda.packer import Workspace
from lightning_safusion.kernels.cuda.tables import KINDS, Tables
from lightning_safusion.sparsify.base import Segments
from lightning_safusion.sparsify.basic import TopK
from lightning_safusion.sparsify.selection.units import Moment, SpanUnits

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HOST = torch.device("cpu")
DECAY = float(np.float32(0.9))


class Ranks(SoloTransport):
    """As one of several ranks, which exchange nothing."""

    def __init__(self, world_size: int, rank: int = 0) -> None:
        self.world_size, self.rank = world_size, rank


@dataclass(frozen=True)
class Case:
    """A buffer.

    Args:
        sizes: Elements of its tensors.
        density: Share that is sent.
        pooled: Tensors share three quarters of their quotas.
        dense: Tensors without a selection.
        kinds: Of their gradients.
        values: What the gradients look like.
        world_size: Ranks.
        wire: The format of what is sent.
    """

    sizes: tuple[int, ...]
    density: float = 0.1
    pooled: bool = False
    dense: frozenset[int] = frozenset()
    kinds: tuple[int, ...] = ()
    values: str = "normal"
    world_size: int = 2
    wire: str = "q4"

    @property
    def edges(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.sizes)])

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [KINDS[kind] for kind in self.kinds or (0,) * len(self.sizes)]

    @property
    def segments(self) -> Segments | None:
        sizes = np.array(self.sizes)
        counts = np.minimum(np.maximum(1, (self.density * sizes).astype(int)), sizes)
        live = np.array([t not in self.dense for t in range(len(sizes))]) & (counts < sizes)
        counts = np.where(live, counts, 0)
        if not live.any():
            return None
        floors = np.where(live, np.maximum(1, counts // 4), 0) if self.pooled else counts
        keys, shapes = tuple(range(len(sizes))), tuple((size,) for size in self.sizes)
        return Segments(self.edges, floors, keys, shapes, int(counts.sum() - floors.sum()))

    def exchange(self, rank: int = 0) -> SparseAllGather:
        segments, edges = self.segments, self.edges.tolist()
        quotas = np.zeros(len(self.sizes), int) if segments is None else segments.quotas
        runs = []
        for (dense, dtype), group in groupby(range(len(quotas)), lambda t: (quotas[t] == 0, self.dtypes[t])):
            tensors = list(group)
            if dense and edges[tensors[0]] < edges[tensors[-1] + 1]:
                runs.append((edges[tensors[0]], edges[tensors[-1] + 1], dtype))
        codec, capacity = None, 0 if segments is None else segments.capacity
        if segments is not None:
            entries = None if segments.pool else quotas.tolist()
            codec = resolve_codec(f"eliasfano-{self.wire}", edges[-1], capacity, torch.float32, edges, entries)
        spec = SpanSpec(edges[-1], capacity, tuple(edges), tuple(runs))
        return SparseAllGather(spec, Ranks(self.world_size, rank), HOST, codec)

    def tables(self, exchange: SparseAllGather) -> Tables:
        segments, message = self.segments, exchange.message_format()
        assert message is not None
        quotas = np.zeros(len(self.sizes), np.int64) if segments is None else segments.quotas
        kinds = np.array([KINDS.index(dtype) for dtype in self.dtypes])
        return Tables(self.edges, quotas, segments.pool if segments else 0, kinds, exchange.lane_places(), message)


def drawn(size: int, values: str, generator: np.random.Generator) -> np.ndarray:
    """float32 [size] of some kind."""
    x = (generator.standard_normal(size) * 10 ** generator.uniform(-3, 1)).astype(np.float32)
    if values == "ties":
        x = np.round(x * 2).astype(np.float32)
    elif values == "zeros":
        x[generator.random(size) < 0.97] = 0
    elif values == "one":
        x[:] = -0.25
    elif values == "subnormal":
        x = (x * np.float32(1e-41)).astype(np.float32)
    elif values == "huge":
        x = (x * np.float32(1e37)).clip(-3e38, 3e38).astype(np.float32)
    return x


@dataclass
class Rank:
    """What one rank holds, and the kernels that work on it."""

    case: Case
    number: int
    memory: Tensor
    grads: list[Tensor]
    moments: list[Tensor | None] | None
    exchange: SparseAllGather
    kernels: BufferKernels
    epsilon: float = 1e-8  #: of the second moments

    @classmethod
    def of(cls, case: Case, number: int, seed: int, moments: Sequence[int] | None = None) -> Rank:
        """With numbers that the host has drawn; ``moments``: kinds of second moments, -1 for none."""
        generator = np.random.default_rng([seed, number])
        memory = torch.from_numpy(np.concatenate([drawn(size, case.values, generator) for size in case.sizes]))
        grads = [
            torch.from_numpy(drawn(size, case.values, generator)).to(dtype).to(DEVICE)
            for size, dtype in zip(case.sizes, case.dtypes, strict=True)
        ]
        if case.values == "one":
            memory.zero_()
        own: list[Tensor | None] | None = None
        if moments is not None:
            made = [torch.from_numpy(generator.exponential(size=size)).float() * 1e-3 for size in case.sizes]
            own = [m.to(KINDS[k]).to(DEVICE) if k >= 0 else None for m, k in zip(made, moments, strict=True)]
        return cls.holding(case, number, memory.to(DEVICE), grads, own)

    @classmethod
    def holding(
        cls, case: Case, number: int, memory: Tensor, grads: list[Tensor], moments: list[Tensor | None] | None = None
    ) -> Rank:
        """With a residual, gradients and second moments that are on the device already."""
        exchange = case.exchange(number)
        sent, received = (part.to(DEVICE) for part in exchange.messages)
        kernels = BufferKernels(case.tables(exchange), memory, sent, received, Workspace(DEVICE))
        return cls(case, number, memory, grads, moments, exchange, kernels)

    @property
    def weighing(self) -> Weighing | None:
        if self.moments is None:
            return None
        return Weighing(self.moments, [self.epsilon] * len(self.grads), torch.empty_like(self.memory).view(torch.int32))

    def expected(self) -> tuple[Tensor, Tensor]:
        """The residual with the gradients, and the keys, as the CPU works them out."""
        flat = torch.cat([grad.cpu().float() for grad in self.grads])
        accumulated = torch.from_numpy(np.float32(DECAY) * self.memory.cpu().numpy() + flat.numpy())
        accumulated = torch.where(flat.isfinite(), accumulated, self.memory.cpu())
        if self.moments is None:
            return accumulated, accumulated
        moments = [None if m is None else Moment(m.cpu().float(), self.epsilon) for m in self.moments]
        return accumulated, SpanUnits(moments, self.case.edges.tolist(), torch.empty_like(accumulated)).weigh(
            accumulated
        )

    def message(self, accumulated: Tensor, keys: Tensor, bad: Sequence[int] = (), notices: int = 0) -> Tensor:
        """The message as the CPU writes it."""
        segments, flags = self.case.segments, torch.ones(len(self.grads), dtype=torch.uint8)
        flags[list(bad)] |= 2
        selection = None
        if segments is not None:
            selection = TopK().select(keys, segments, 0).with_values_of(accumulated)
        self.exchange.encode(accumulated, Part(selection, flags, notices=notices))
        return self.exchange.messages[0]

    def mean(self) -> Tensor:
        """float32 [N], the mean of all messages, as PyTorch's operations decode it."""
        return self.exchange.decode(torch.zeros(self.case.edges[-1]))

    def held(self, mean: Tensor) -> Tensor:
        """float32 [N], what the gradients can hold of a mean."""
        parts = mean.split(list(self.case.sizes))
        return torch.cat([saturated(m, d).to(d).float() for m, d in zip(parts, self.case.dtypes, strict=True)])

    def left(self, mean: Tensor) -> Tensor:
        """float32 [N], the residual when the window has ended well, from that which is on the device."""
        residual, spec = self.memory.cpu().clone(), self.exchange.spec
        if self.exchange.codec is not None:
            positions, values = self.exchange.codec.decode(self.exchange.selection)
            residual[positions] -= values
        for start, stop, dtype in spec.dense_runs:
            residual[start:stop] -= saturated(residual[start:stop], dtype).to(dtype).float()
        kinds = zip(self.case.sizes, self.case.dtypes, strict=True)
        narrow = torch.cat([torch.full((s,), d != torch.float32) for s, d in kinds])
        return torch.where(narrow, residual + (mean - self.held(mean)), residual)

    def run(self, notices: int = 0) -> Tensor:
        """The message as the kernels write it."""
        weighing = self.weighing
        self.kernels.sent.fill_(0)
        self.kernels.locate(self.grads, weighing)
        self.kernels.select(DECAY, weighing)
        self.kernels.pack(notices)
        return self.kernels.sent


def gather(ranks: Sequence[Rank]) -> None:
    """Gives every rank the messages of all, and what the CPU reads the same."""
    messages = torch.cat([rank.kernels.sent for rank in ranks])
    for rank in ranks:
        rank.kernels.received.copy_(messages)
        rank.exchange.messages[0].copy_(rank.kernels.sent.cpu())
        rank.exchange.messages[1].copy_(messages.cpu())
