"""gTop-k: a sparse reduction whose messages never grow (Shi et al., ICDCS 2019, algorithms 2 and 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_safusion.comm.buffer import Communicators, SparseBuffer
from lightning_safusion.comm.collectives.multiphase import Entries, MultiPhaseExchange, decoded, encoded, message_sizes
from lightning_safusion.comm.exchange import Ability, Part
from lightning_safusion.comm.transport.interface import FinishedWork, Work


def tree_rounds(world_size: int) -> list[list[tuple[int, int]]]:
    """A binomial tree to rank 0: ``(source, destination)`` of each message of ``ceil(log2 n)`` rounds."""
    rounds, step = [], 1
    while step < world_size:
        rounds.append([(rank + step, rank) for rank in range(0, world_size - step, 2 * step)])
        step *= 2
    return rounds


class GTopKExchange(MultiPhaseExchange):
    """Adds selections pairwise and keeps the ``capacity`` largest sums each time, until one list is left for all.

    An entry of a rank leaves its residual if its position is in the list, else it stays. **This loses mass**, as in the
    paper: an entry that is cut on its way, at a position that reaches the list with another rank's entry, is neither
    delivered nor kept.

    Lists go up a binomial tree to rank 0, which broadcasts the result (the paper's algorithm). With messages of ``S``
    bytes these are ``2 log2 n`` messages one after the other, in all ``2 (n - 1) S`` bytes over all workers. The result
    is rounded to the wire's values after every addition.

    Args:
        buffer: What is exchanged.
        over: Communicators, which need point-to-point messages.
    """

    ability = Ability(conserves=False)

    def __init__(self, buffer: SparseBuffer, over: Communicators) -> None:
        super().__init__(buffer.spec, over.main, buffer.device)
        self.codec = buffer.codec
        self._rounds = tree_rounds(over.main.world_size)
        self._message = torch.zeros(*message_sizes([self.codec]), dtype=torch.uint8, device=self.device)
        self._received = torch.zeros_like(self._message)
        self._kept = Entries.none(self.device)
        self._work: Work = FinishedWork()

    def _pack(self, x: Tensor, part: Part) -> None:
        self._offered = self._keep(Entries.of(part.selection, self.device))

    def _keep(self, entries: Entries) -> Entries:
        # as others will read them, which is how this rank adds them too
        self._message, self._kept = encoded([entries], [self.codec], self.device)
        return self._kept

    def _launch_first(self) -> None:
        rank, nbytes = self.transport.rank, self._message.nbytes
        self.bytes_sent += nbytes
        received = sum(destination == rank for pairs in self._rounds for _, destination in pairs)
        self.bytes_received += (received + (rank != 0)) * nbytes  # and the result
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
            self._work.wait()
            if any(destination == self.transport.rank for _, destination in pairs):
                (theirs,) = decoded(self._received, [self.codec])
                self._keep(_added(self._kept, theirs).largest(self.spec.capacity))
            self._launch(number + 1)
        self._work.wait()
        return decoded(self._message, [self.codec])[0]


def _added(first: Entries, second: Entries) -> Entries:
    """The sum of two lists, which does not depend on their order, bit for bit."""
    both = torch.cat([first.indices, second.indices])
    indices, places = torch.unique(both, return_inverse=True)
    sums = torch.zeros(len(indices), dtype=torch.float32, device=both.device)
    sums.index_add_(0, places, torch.cat([first.values, second.values]))
    return Entries(indices, sums)
