"""gTop-k: a sparse reduction whose messages never grow (Shi et al., ICDCS 2019, algorithms 2 and 3)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from lightning_safusion.comm.collectives.entries import Entries, added, decoded, encoded
from lightning_safusion.comm.collectives.multiphase import MultiPhaseExchange
from lightning_safusion.comm.exchange import Part, SpanSpec
from lightning_safusion.comm.transport.interface import Transport, Work
from lightning_safusion.comm.wire.codec import Codec

#: Messages of one round: ``(source, destination)``.
Round = tuple[tuple[int, int], ...]


def tree_rounds(world_size: int) -> list[Round]:
    """A binomial tree to rank 0: ``ceil(log2 n)`` rounds, ``n - 1`` messages."""
    rounds, step = [], 1
    while step < world_size:
        receivers = range(0, world_size - step, 2 * step)
        rounds.append(tuple((rank + step, rank) for rank in receivers))
        step *= 2
    return rounds


class GTopKExchange(MultiPhaseExchange):
    """Adds selections pairwise and keeps the ``capacity`` largest sums each time, until one list is left for all.

    What a rank sent comes out of its residual where the list has its position, else it stays. **This loses mass**: a
    contribution that was cut on its way, at a position that another one carried to the end, is neither delivered nor
    kept. The paper has it so.

    Lists go up a binomial tree to rank 0, which broadcasts the result (the paper's algorithm). With messages of ``S``
    bytes these are ``2 log2 n`` messages one after the other, in all ``2 (n - 1) S`` bytes over all workers. The result
    is rounded to the wire's values after every addition.

    Args:
        spec: Shape of the exchange.
        transport: Communicator with point-to-point messages.
        device: Where the span lives.
        codec: Wire format of a list; None when the whole span is dense.
    """

    conserves: ClassVar[bool] = False

    def __init__(self, spec: SpanSpec, transport: Transport, device: torch.device, codec: Codec | None) -> None:
        super().__init__(spec, transport, device)
        self.codec = codec
        self._rounds = tree_rounds(transport.world_size) if codec is not None else []
        self._nbytes = codec.nbytes if codec is not None else 0
        self._message = torch.zeros(self._nbytes, dtype=torch.uint8, device=device)
        self._received = torch.zeros_like(self._message)
        self._kept = Entries.none(device)
        self._work: Work | None = None

    @property
    def bytes_sent(self) -> int:
        return self.lane.bytes_sent + self._nbytes

    @property
    def bytes_received(self) -> int:
        rank = self.transport.rank
        messages = sum(destination == rank for pairs in self._rounds for _, destination in pairs)
        messages += rank != 0  # the result
        return self.lane.bytes_received + messages * self._nbytes

    def _pack(self, x: Tensor, part: Part) -> None:
        self._offered = self._keep(Entries.of(part.selection, self.device))

    def _keep(self, entries: Entries) -> Entries:
        """Writes the message; returns the entries as others will read them, which is how this rank adds them too."""
        self._message, self._kept = encoded([entries], [self.codec], self.device)
        return self._kept

    def _launch_first(self) -> None:
        self._launch(0)

    def _launch(self, number: int) -> None:
        if self.codec is None:
            return
        if number < len(self._rounds):
            self._work = self.transport.permute(self._received, self._message, self._rounds[number])
        else:
            self._work = self.transport.broadcast(self._message, 0)

    def _finish(self) -> Entries:
        if self.codec is None:
            return self._result
        for number, pairs in enumerate(self._rounds):
            self._wait()
            if any(destination == self.transport.rank for _, destination in pairs):
                (theirs,) = decoded(self._received, [self.codec])
                self._keep(added(self._kept, theirs).largest(self.spec.capacity))
            self._launch(number + 1)
        self._wait()
        return decoded(self._message, [self.codec])[0]

    def _wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()
