"""Averages without selection: an all-reduce of a span, the same in two phases, and means of sparse tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.cost import ring_allreduce_bytes
from lightning_safusion.comm.exchange import (
    Ability,
    Notice,
    Part,
    SpanSpec,
    StreamOrderedExchange,
    TensorFlag,
    Verdict,
    padded,
    saturated,
)
from lightning_safusion.comm.transport.interface import Transport, Work
from lightning_safusion.sparsify.selection.view import device_constant

_COUNTED = (TensorFlag.FRESH, TensorFlag.BAD, TensorFlag.BYPASS)


class DenseAllReduce(StreamOrderedExchange):
    """Ring all-reduce of the whole span in one dtype; ``2 (n - 1) / n`` buffers received per worker.

    The flags of every tensor, and the notices, are ones behind the data: their sums are the numbers of ranks.

    Args:
        spec: Shape of the exchange; the dense runs give the dtype (the wider one where they differ).
        transport, device: See :class:`Exchange`.
        half: Send float32 as float16. The rounding error of a rank's own part stays in its residual; that of the sum is
            lost, as with DDP's fp16 hook, and as that of 16-bit gradients always is.
    """

    ability = Ability(uses_scratch=False)

    def __init__(self, spec: SpanSpec, transport: Transport, device: torch.device, half: bool = False) -> None:
        super().__init__(spec, transport, device)
        dtypes = {torch.float32 if dtype == torch.float64 else dtype for _, _, dtype in spec.dense_runs}
        # a 16-bit float counts exactly to 256 (bfloat16): enough ranks for flags only below that
        counts = transport.world_size <= 256
        self.dtype = dtypes.pop() if len(dtypes) == 1 and counts else torch.float32
        if self.dtype == torch.float32 and half and counts:
            self.dtype = torch.float16
        length = spec.numel + len(_COUNTED) * spec.num_tensors + len(Notice)
        self._buffer = torch.zeros(padded(length, self.dtype), dtype=self.dtype, device=device)
        self.headers = self._buffer[spec.numel : length]
        self._counted = device_constant(np.array(_COUNTED, np.uint8)[:, None], device)
        self.bytes_sent = self._buffer.nbytes
        self.bytes_received = round(ring_allreduce_bytes(transport.world_size, self.bytes_sent))

    @property
    def message(self) -> Tensor:
        """This rank's part before the exchange, and the means after it, then flags and notices."""
        return self._buffer

    def encode(self, x: Tensor, part: Part) -> None:
        spec, buffer = self.spec, self._buffer
        # dividing before the sum, as DDP does: a sum of float16 gradients could overflow
        torch.mul(saturated(x, self.dtype), 1.0 / self.transport.world_size, out=buffer[: spec.numel])
        for tensor in part.absent:
            buffer[spec.edges[tensor] : spec.edges[tensor + 1]] = 0
        counts, notices = self._counts(self.headers)
        counts.copy_((part.flags & self._counted) != 0)
        notices.zero_()
        for place, notice in enumerate(Notice):
            if part.notices & notice:
                notices[place : place + 1] = 1  # a slice: for one element the host would wait for a device

    def _counts(self, headers: Tensor) -> tuple[Tensor, Tensor]:
        """Of all tensors the number of ranks for each flag, and of all notices the number of ranks."""
        return headers[: -len(Notice)].view(len(_COUNTED), self.spec.num_tensors), headers[-len(Notice) :]

    def start(self) -> Work:
        return self.transport.all_reduce(self._buffer)

    def verdict(self, headers: Tensor | None = None) -> Verdict:
        received = self.headers if headers is None else headers
        counts, notices = self._counts(received.cpu().float().round().long())
        fresh, bad, bypass = counts.numpy()
        heard = sum(int(notice) for notice, count in zip(Notice, notices.tolist(), strict=True) if count > 0)
        return Verdict(fresh, bad > 0, bypass > 0, heard)

    def standing(self) -> tuple[Tensor, Tensor]:
        counts, notices = self._counts(self.headers)
        fresh, bad, bypass = counts.float().round()
        failed = notices[list(Notice).index(Notice.FAILED)]
        regular = (fresh == self.transport.world_size).all() & ~(bad + bypass > 0).any() & (failed < 0.5)
        return bad > 0, regular

    def decode(self, scratch: Tensor) -> Tensor:
        return self._buffer[: self.spec.numel]

    def sent_dense(self, start: int, stop: int, x: Tensor) -> Tensor:
        piece = saturated(x[start:stop], self.dtype)
        if self.dtype == torch.float32:
            return piece
        world_size = self.transport.world_size
        return piece.mul(1.0 / world_size).to(self.dtype).to(torch.float32).mul_(world_size)


class DenseLane(DenseAllReduce):
    """The dense pieces of a span, moved together: an all-reduce beside the exchange of the other elements.

    Of its span only edges differ from those of an exchange of the whole one: tensors that are not dense are empty.

    Args:
        spec: Shape of the whole span, of which :meth:`encode` is given all.
        transport, device: See :class:`Exchange`.
        flagged: Flags and notices of all tensors travel here. Otherwise the flags of dense tensors do, which alone have
            edges then.
    """

    def __init__(self, spec: SpanSpec, transport: Transport, device: torch.device, flagged: bool = True) -> None:
        dense = spec.dense_tensors
        sizes = np.diff(spec.edges)
        sizes = np.where(np.isin(np.arange(len(sizes)), dense), sizes, 0) if flagged else sizes[dense]
        cuts = accumulate((stop - start for start, stop, _ in spec.dense_runs), initial=0)
        runs = tuple((*cut, dtype) for cut, (_, _, dtype) in zip(pairwise(cuts), spec.dense_runs, strict=True))
        edges = tuple(accumulate(sizes.tolist(), initial=0))
        super().__init__(SpanSpec(edges[-1], 0, edges, runs), transport, device)
        self._pieces = [slice(start, stop) for start, stop, _ in spec.dense_runs]
        self._alone = None if flagged else dense
        self._places = device_constant(np.array(dense, np.int64), device)

    def encode(self, x: Tensor, part: Part) -> None:
        if self._alone is not None:
            absent = [place for place, tensor in enumerate(self._alone) if tensor in set(part.absent)]
            part = Part(None, part.flags[self._places], absent)
        pieces = [x[piece] for piece in self._pieces]
        super().encode(torch.cat(pieces) if pieces else x[:0], part)

    def copy_to(self, span: Tensor) -> None:
        """Writes the means into their pieces of the whole span."""
        runs = [span[piece] for piece in self._pieces]
        if runs:
            means = self._buffer[: self.spec.numel].split([len(run) for run in runs])
            torch._foreach_copy_(runs, list(means))


class TwoPhaseSum:
    """The sum of a buffer over all ranks: a reduce-scatter, and an all-gather that may begin and end much later.

    DeAR: Zhang et al., ICDCS 2023, section III. Each phase moves ``(n - 1) / n`` buffers per worker, together what a
    ring all-reduce does.

    Args:
        numel: Elements of the buffer; padded to equal shares of all workers, whole messages.
        dtype: Their dtype.
        transport: Communicator.
        device: Where the buffer lives.

    Attributes:
        buffer: [numel]; this rank's part before the first phase, the sum of all ranks after the second.
    """

    def __init__(self, numel: int, dtype: torch.dtype, transport: Transport, device: torch.device) -> None:
        share = padded(-(-numel // transport.world_size), dtype)
        self._transport = transport
        self._padded = torch.zeros(share * transport.world_size, dtype=dtype, device=device)
        self._share = torch.zeros(share, dtype=dtype, device=device)
        self._work: Work | None = None
        self.buffer = self._padded[:numel]

    def start(self) -> None:
        """Starts the first phase: every rank gets the sum of its share."""
        self._work = self._transport.reduce_scatter(self._share, self._padded)

    def start_second(self) -> None:
        """Waits for the first phase and starts the second: every rank gets the shares of all others.

        All ranks must call it in one agreed order with all other launches on this communicator.
        """
        self.wait()
        self._work = self._transport.all_gather(self._padded, self._share)

    def wait(self) -> None:
        """Waits for the phase that runs; a second call returns at once."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()


def coo_means(transport: Transport, grads: Sequence[Tensor]) -> list[Tensor]:
    """Averages gradients that are sparse tensors (``nn.Embedding(sparse=True)``) as DDP does, without selection.

    Ranks hold different numbers of rows, so these are exchanged first and the messages padded to the longest. Waits
    for the device. Rows are added in rank order. All ranks pass as many gradients, in the same order; the means are
    coalesced.
    """
    if not grads:
        return []
    mine = [grad.coalesce() for grad in grads]
    rows = torch.tensor([grad.values().shape[0] for grad in mine], dtype=torch.int64, device=mine[0].device)
    everyone = torch.empty(transport.world_size * len(mine), dtype=rows.dtype, device=rows.device)
    transport.all_gather(everyone, rows).wait()
    counts = everyone.view(transport.world_size, len(mine)).t().tolist()
    return [_coo_mean(transport, grad, ranks) for grad, ranks in zip(mine, counts, strict=True)]


def _coo_mean(transport: Transport, grad: Tensor, counts: list[int]) -> Tensor:
    if max(counts) == 0:
        return grad
    indices = _gathered_rows(transport, grad.indices().t(), counts)
    values = _gathered_rows(transport, grad.values(), counts) / transport.world_size
    return torch.sparse_coo_tensor(indices.t(), values, grad.shape, check_invariants=False).coalesce()


def _gathered_rows(transport: Transport, rows: Tensor, counts: list[int]) -> Tensor:
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    received = rows.new_empty((transport.world_size, *padded.shape))
    transport.all_gather(received.view(-1), padded.view(-1)).wait()
    return torch.cat([part[:count] for part, count in zip(received, counts, strict=True)])
