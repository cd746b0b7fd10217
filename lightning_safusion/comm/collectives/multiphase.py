"""Exchanges of several phases, of which the later ones need what the earlier ones have brought."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lightning_safusion.comm.collectives.allreduce import DenseAllReduce
from lightning_safusion.comm.collectives.entries import Entries
from lightning_safusion.comm.exchange import Exchange, Part, SpanSpec, Verdict
from lightning_safusion.comm.transport.interface import Transport, Work


class MultiPhaseExchange(Exchange):
    """A sparse reduction in several phases, beside one dense all-reduce of flags, notices and dense pieces.

    :meth:`start` launches what waits for nothing. All other phases run in :meth:`wait`, which must be called in plan
    order on all ranks, as the end of a window does. Subclasses say what happens in :meth:`_pack`, :meth:`_launch_first`
    and :meth:`_finish`; the sum over ranks that the last one returns must be the same on all ranks, bit for bit.

    Args:
        spec: Shape of the exchange.
        transport: Communicator of all ranks.
        device: Where the span lives.
    """

    def __init__(self, spec: SpanSpec, transport: Transport, device: torch.device) -> None:
        super().__init__(spec, transport, device)
        self.lane = DenseAllReduce(_lane_spec(spec), transport, device)
        self._result = Entries.none(device)
        self._offered = Entries.none(device)  # this rank's part, as others have read it
        self._under_way = False
        self._handed_in = 0
        self._came_in = 0

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank gave to the collectives of its last exchange; a piece for all ranks counts once."""
        return self.lane.bytes_sent + self._handed_in

    @property
    def bytes_received(self) -> int:
        """Bytes that this rank received from others in its last exchange, dense pieces by the closed form."""
        return self.lane.bytes_received + self._came_in

    @abstractmethod
    def _pack(self, x: Tensor, part: Part) -> None:
        """Keeps or packs the sparse part; see :meth:`Exchange.encode`."""

    @abstractmethod
    def _launch_first(self) -> None:
        """Launches what needs nothing from other ranks."""

    @abstractmethod
    def _finish(self) -> Entries:
        """Runs all other phases; returns the sum over ranks that is delivered, without zeros."""

    def encode(self, x: Tensor, part: Part) -> None:
        pieces = self.dense_runs(x)
        self.lane.encode(torch.cat(pieces) if pieces else x[:0], part)
        self._pack(x, part)

    def start(self) -> None:
        self._handed_in = self._came_in = 0
        self._under_way = True
        self.lane.start()
        self._launch_first()

    def wait(self) -> None:
        """Waits for the phases under way and runs the others; raises the backend's error if a peer has died."""
        if self._under_way:
            self._under_way = False
            self.lane.wait()
            self._result = self._finish()

    def verdict(self) -> Verdict:
        return self.lane.verdict()

    def decode(self, scratch: Tensor) -> Tensor:
        scratch[self._result.indices] = self._result.values * (1.0 / self.transport.world_size)
        self._written = [self._result.indices]
        if runs := self.dense_runs(scratch):
            means = self.lane.decode(scratch[:0]).split([len(run) for run in runs])
            torch._foreach_copy_(runs, list(means))
        return scratch

    def sent(self) -> tuple[Tensor, Tensor]:
        # what was not delivered stays in the residual
        delivered = self._offered.among(self._result)
        return delivered.indices, delivered.values

    def sent_dense(self, start: int, stop: int, x: Tensor) -> Tensor:
        return self.lane.sent_dense(start, stop, x)

    def _all_to_all(
        self, transport: Transport, tensor: Tensor, sizes: Sequence[int], incoming: Sequence[int]
    ) -> tuple[Tensor, Work]:
        """Launches an all-to-all and counts its bytes; returns where the pieces of all ranks will be."""
        received = torch.zeros(sum(incoming), dtype=tensor.dtype, device=self.device)
        self._handed_in += tensor.nbytes
        self._came_in += (received.numel() - incoming[transport.rank]) * received.itemsize
        return received, transport.all_to_all(received, tensor, incoming, sizes)

    def _all_gather(self, transport: Transport, message: Tensor, incoming: Sequence[int]) -> tuple[Tensor, Work]:
        """The same for an all-gather of messages of any sizes: libraries have none, or pad to the longest."""
        n = transport.world_size
        received, work = self._all_to_all(transport, message.repeat(n), [message.numel()] * n, incoming)
        self._handed_in -= (n - 1) * message.nbytes
        return received, work


def _lane_spec(spec: SpanSpec) -> SpanSpec:
    """The dense pieces of a span, moved together; tensors that are not among them have no elements there."""
    cuts = list(accumulate((last - first for first, last, _ in spec.dense_runs), initial=0))
    runs = tuple((*cut, run[2]) for cut, run in zip(pairwise(cuts), spec.dense_runs, strict=True))
    sizes = [
        (b - a) * any(first <= a and b <= last for first, last, _ in spec.dense_runs) for a, b in pairwise(spec.edges)
    ]
    return SpanSpec(cuts[-1], 0, tuple(accumulate(sizes, initial=0)), runs)
