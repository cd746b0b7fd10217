"""Ok-Topk: sparse all-reduce of a volume that does not grow with the workers (Li and Hoefler, PPoPP 2022)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_safusion.comm.buffer import Communicators, SparseBuffer
from lightning_safusion.comm.collectives.multiphase import (
    Entries,
    MultiPhaseExchange,
    decoded,
    encoded,
    joined,
    message_sizes,
    summed,
)
from lightning_safusion.comm.cost import ring_allreduce_bytes
from lightning_safusion.comm.exchange import Part
from lightning_safusion.comm.transport.interface import Work
from lightning_safusion.comm.wire.codec import Codec
from lightning_safusion.comm.wire.formats import resolve_codec

# The threshold follows the number of entries that pass it, as in the authors' VGG trainer: where less than 2/3 or more
# than 4/3 of the capacity pass, it moves by 0.8 %.
_FEW, _MANY, _STEP = 2 / 3, 4 / 3, 1.008

# One that is off by more than this factor would take hundreds of such steps: it is found anew.
_FAR_OFF = 4


class OkTopkExchange(MultiPhaseExchange):
    """Delivers the entries of the sum of all selections whose magnitude reaches a global threshold.

    1. *Split and reduce*: the span is cut into one region for each rank; each rank sends its entries to the owners of
       their regions, which add them up. Each rank proposes regions that hold equally many of its entries; the mean of
       these is agreed anew every ``repartition`` steps.
    2. *Select*: every ``refresh`` steps all sums are gathered, and the ``capacity`` largest are kept, exactly; their
       smallest magnitude is the threshold. In between an owner keeps sums that reach it, and the threshold follows the
       number found; where that is off by more than a factor of four, the next step refreshes.
    3. *Balance*: where the longest list exceeds ``balance`` times the mean, lists are cut anew, into equal ones.
    4. *Gather*: every rank gets all lists.

    Delivered entries leave the residual of their sender; others stay there, and are sent again. As the sum at a
    delivered position holds the entries of all ranks, nothing is lost.

    The volume per worker is one to three times ``(n - 1) / n`` messages, and all sums in a step that refreshes. It
    depends on the data: the ranks exchange their numbers of entries first, so the host waits for the device at the
    launch and in :meth:`wait`. Regions and thresholds need a hundred entries for each rank or so to be useful.

    Sums are sent in float32, whatever the wire: no rank would keep the error of their rounding. The authors post their
    messages in groups of four partners and add while the next group is under way; here a phase is one all-to-all.

    Args:
        buffer: What is exchanged.
        over: Communicators, which need all-to-all.
    """

    #: Steps between exact thresholds (tau'); the authors use 32 (VGG, LSTM) and 128 (BERT).
    refresh = 32
    #: Steps between agreements on the regions (tau); the authors use 64.
    repartition = 64
    #: Ratio of the longest list to the mean above which lists are balanced; the paper's is 4.
    balance = 4.0

    def __init__(self, buffer: SparseBuffer, over: Communicators) -> None:
        super().__init__(buffer.spec, over.main, buffer.device)
        self._wire, self._dtype = buffer.wire, buffer.dtype
        layout, _, _ = buffer.wire.rpartition("-")
        self._sum_wire = f"{layout}-fp32" if layout else "fp32"
        self._step = 0
        self._threshold: float | None = None  # None: to be found in the next step
        self._edges = _equal_edges(self.spec.numel, self.transport.world_size)
        self._local = Entries.none(self.device)
        self._parts: list[Entries] = []  # of the local entries, by region
        self._first: tuple[Tensor, Work] | None = None

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`Exchange.state_dict`.

        Keys: ``step``, ``threshold`` (float, or None), ``edges`` (int, world_size + 1 edges of the regions).
        """
        return {"step": self._step, "threshold": self._threshold, "edges": list(self._edges)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`Exchange.load_state_dict`.

        Regions of another number of ranks, or of another span, are agreed anew in the next step, as the threshold is.
        """
        edges = list(state["edges"])
        if len(edges) == self.transport.world_size + 1 and edges[-1] == self.spec.numel:
            self._step, self._threshold, self._edges = state["step"], state["threshold"], edges
        else:
            self._step, self._threshold = 0, None

    def _pack(self, x: Tensor, part: Part) -> None:
        self._local = Entries.of(part.selection, self.device)

    def _launch_first(self) -> None:
        if self.spec.capacity:
            self._first = self._propose_edges() if self._step % self.repartition == 0 else self._send_counts()

    def _finish(self) -> Entries:
        if self._first is None:
            return self._result  # the whole span is dense
        (counts, work), self._first = self._first, None
        work.wait()
        if self._step % self.repartition == 0:
            self._edges = [edge // self.transport.world_size for edge in counts.tolist()]
            counts, work = self._send_counts()
            work.wait()
        mine = summed(self._split(counts.tolist()), self._sizes[self.transport.rank], self.device)
        threshold = None if self._step % self.refresh == 0 else self._threshold
        self._step += 1
        return self._refreshed(mine) if threshold is None else self._above(mine, threshold)

    def _propose_edges(self) -> tuple[Tensor, Work]:
        numel, parts = self.spec.numel, self.transport.world_size
        wanted, share = _equal_edges(numel, parts), len(self._local) // parts
        if share:
            wanted = [0, *self._local.indices[share : share * parts : share].tolist(), numel]
        edges = torch.tensor(wanted, dtype=torch.int64, device=self.device)
        self.bytes_sent += edges.nbytes
        self.bytes_received += round(ring_allreduce_bytes(parts, edges.nbytes))
        return edges, self.transport.all_reduce(edges)

    def _send_counts(self) -> tuple[Tensor, Work]:
        self._parts = self._local.cut(self._edges)
        counts = torch.tensor([len(part) for part in self._parts], dtype=torch.int64, device=self.device)
        ones = [1] * self.transport.world_size
        return self._all_to_all(self.transport, counts, ones, ones)

    def _split(self, counts: list[int]) -> list[Entries]:
        """Sends every owner the entries of its region; returns those that this rank gets, ``counts`` from each."""
        sizes = self._sizes
        out = self._codecs(sizes, [len(part) for part in self._parts], self._wire)
        into = self._codecs([sizes[self.transport.rank]] * len(counts), counts, self._wire)
        parts, coded = self._swapped(self._parts, out, into)
        self._offered = Entries(self._local.indices, coded.values)
        return parts

    def _swapped(
        self, parts: list[Entries], out: list[Codec | None], into: list[Codec | None]
    ) -> tuple[list[Entries], Entries]:
        """Sends every rank a list; returns those that come in, and all that were sent as they are decoded."""
        message, coded = encoded(parts, out, self.device)
        received, work = self._all_to_all(self.transport, message, message_sizes(out), message_sizes(into))
        work.wait()
        return decoded(received, into), coded

    @property
    def _sizes(self) -> list[int]:
        return [high - low for low, high in pairwise(self._edges)]

    def _codecs(self, sizes: Sequence[int], counts: Sequence[int], wire: str) -> list[Codec | None]:
        """Formats of lists, each with so many entries of so many elements."""
        shapes = zip(sizes, counts, strict=True)
        return [resolve_codec(wire, numel, count, self._dtype) if count else None for numel, count in shapes]

    def _in_span(self, parts: Sequence[Entries]) -> Entries:
        return joined([part.shifted(edge) for part, edge in zip(parts, self._edges, strict=False)])

    def _refreshed(self, mine: Entries) -> Entries:
        top = self._gathered(mine, self._counts(mine)).largest(self.spec.capacity)
        least = float(top.values.abs().min()) if len(top) == self.spec.capacity else 0.0
        # too few sums, or sums that overflowed, do not predict the threshold of the next step
        self._threshold = least if math.isfinite(least) and least > 0 else None
        return top

    def _above(self, mine: Entries, threshold: float) -> Entries:
        mine = mine[~(mine.values.abs() < threshold)]  # NaN must be seen by all
        counts = self._counts(mine)
        found = sum(counts)
        if not self.spec.capacity / _FAR_OFF <= found <= self.spec.capacity * _FAR_OFF:
            self._threshold = None
        elif found < _FEW * self.spec.capacity:
            self._threshold = threshold / _STEP
        elif found > _MANY * self.spec.capacity:
            self._threshold = threshold * _STEP
        if max(counts) * len(counts) > self.balance * found:
            return self._balanced(mine, counts)
        return self._gathered(mine, counts)

    def _counts(self, mine: Entries) -> list[int]:
        count = torch.tensor([len(mine)], dtype=torch.int64, device=self.device)
        return self._all_gather(self.transport, count, [1] * self.transport.world_size).tolist()

    def _balanced(self, mine: Entries, counts: list[int]) -> Entries:
        """Gathers lists of equal length: of all entries, in order, every rank passes on one of ``n`` equal pieces."""
        rank, n = self.transport.rank, self.transport.world_size
        held = list(accumulate(counts, initial=0))
        cuts = _equal_edges(held[-1], n)
        places = [min(max(cut - held[rank], 0), len(mine)) for cut in cuts]
        pieces = [mine[a:b] for a, b in pairwise(places)]
        overlaps = [max(0, min(held[j + 1], cuts[rank + 1]) - max(held[j], cuts[rank])) for j in range(n)]
        sizes = self._sizes
        out = self._codecs([sizes[rank]] * n, [len(piece) for piece in pieces], self._sum_wire)
        parts, _ = self._swapped(pieces, out, self._codecs(sizes, overlaps, self._sum_wire))
        lengths = [b - a for a, b in pairwise(cuts)]
        return joined(self._exchanged(self._in_span(parts), [self.spec.numel] * n, lengths))

    def _gathered(self, mine: Entries, counts: list[int]) -> Entries:
        return self._in_span(self._exchanged(mine, self._sizes, counts))

    def _exchanged(self, mine: Entries, sizes: Sequence[int], counts: Sequence[int]) -> list[Entries]:
        """All-gathers lists of sums, each with so many entries of so many elements."""
        codecs = self._codecs(sizes, counts, self._sum_wire)
        message, _ = encoded([mine], [codecs[self.transport.rank]], self.device)
        return decoded(self._all_gather(self.transport, message, message_sizes(codecs)), codecs)


def _equal_edges(numel: int, parts: int) -> list[int]:
    return [numel * part // parts for part in range(parts + 1)]
