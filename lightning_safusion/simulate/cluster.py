"""A cluster in numbers: nodes that share one network card each, and what a collective costs on them.

Sizes are bytes, times are seconds. A collective between nodes is charged with what passes the network card of *one
node*: rings of neighbouring ranks enter a node once, point-to-point exchanges once per worker. Inside a node the fast
links are charged. Formulas: Thakur, Rabenseifner and Gropp (IJHPCA 2005, section 4) for dense collectives, Li and
Hoefler (PPoPP 2022, table 1) for sparse ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace

from lightning_safusion.comm.cost import LINKS, Link, allgather_bytes, log2_ceil, ring_allreduce_bytes
from lightning_safusion.fusion.plans.costs import SelectionCost
from lightning_safusion.simulate.measured import CollectiveTimes, Host

#: NVLink inside a node: 200 GB/s effective.
NVLINK = Link(alpha=3e-6, beta=1 / 200e9, launch=15e-6)

#: Short names of links, beside those of ``comm.cost.LINKS``.
_ALIASES = {
    "100gbit": "100gbit-roce",
    "200gbit": "200gbit-rdma",
}


@dataclass(frozen=True)
class CollectiveCost:
    """What one collective costs.

    Args:
        seconds: Time on the link.
        nbytes: Bytes that one worker receives.
        node_bytes: Bytes that enter one node through its network card.
        hidden: Seconds of it that hide behind the one before it in a queue: latency.
        processor: Seconds of a core that it takes on each worker, beside the thread that launches it.
        processor_hidden: What a queue saves of that.
    """

    seconds: float = 0.0
    nbytes: float = 0.0
    node_bytes: float = 0.0
    hidden: float = 0.0
    processor: float = 0.0
    processor_hidden: float = 0.0

    def __add__(self, other: CollectiveCost) -> CollectiveCost:
        """One after the other."""
        return CollectiveCost(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Device:
    """Local work of a worker.

    Args:
        selections: Time of one selection, by kind: ``"exact"`` (top-k by radix select) and ``"threshold"`` (two to
            three sweeps over the memory). Published orders of magnitude for a GPU; measure yours.
        decode: Seconds per entry that is added up after an exchange.
        decode_fixed: Seconds per exchange with such entries.
        decodes_last: Decoding waits for the end of backward and occupies the worker (CPU); otherwise it runs beside
            backward, behind the exchange.
        memory: Bytes per second of the device's memory, read and written.
        pcie: Bytes per second between device and host.
        cpu: One selection on the host.
        contention: Share by which backward slows down while an exchange runs (kernels of collectives take SMs).
    """

    selections: Mapping[str, SelectionCost] = field(
        default_factory=lambda: {"exact": SelectionCost(40e-6, 0.10e-9), "threshold": SelectionCost(25e-6, 0.012e-9)}
    )
    decode: float = 0.06e-9
    memory: float = 1.5e12
    pcie: float = 12e9
    cpu: SelectionCost = SelectionCost(100e-6, 1.0e-9)
    contention: float = 0.0
    decode_fixed: float = 0.0
    decodes_last: bool = False

    def selection(self, kind: str) -> SelectionCost:
        """The cost of a kind of selection.

        Raises:
            ValueError: If there is no such kind; the message lists them.
        """
        if kind not in self.selections:
            raise ValueError(f"unknown selection {kind!r}: choose one of {sorted(self.selections)}")
        return self.selections[kind]


@dataclass(frozen=True)
class Cluster:
    """Nodes of equally many workers.

    Args:
        nodes: Nodes (N).
        gpus_per_node: Workers in each (g).
        inter: Link of one node, shared by its workers.
        intra: Link of one worker inside its node.
        device: Local work.
        jitter: Relative standard deviation of computing times: of a worker in an iteration, and of each of its
            gradients.
        seed: Of the jitter.
        measured: ``"allgather"`` by the bytes of a message and ``"allreduce"`` by those of the buffer, in place of the
            formulas.
        host: Processors that compute, select and carry the network's work, where accelerators do not; None: nothing
            shares anything but the link.

    Raises:
        ValueError: If there is no worker, or the jitter is negative.
    """

    nodes: int
    gpus_per_node: int = 1
    inter: Link = LINKS["25gbit"]
    intra: Link = NVLINK
    device: Device = field(default_factory=Device)
    jitter: float = 0.0
    seed: int = 0
    measured: Mapping[str, CollectiveTimes] = field(default_factory=dict)
    host: Host | None = None

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus_per_node < 1:
            raise ValueError(f"a cluster needs nodes and GPUs, got {self.nodes} nodes of {self.gpus_per_node} GPUs")
        if self.jitter < 0:
            raise ValueError(f"jitter must not be negative, got {self.jitter}")

    @property
    def workers(self) -> int:
        """Workers (n)."""
        return self.nodes * self.gpus_per_node

    def allreduce(self, nbytes: float) -> CollectiveCost:
        """Dense all-reduce of a buffer of ``nbytes`` by recursive halving and doubling."""
        half = self.reduce_scatter(nbytes)
        launch = self._link.launch if self.workers > 1 else 0.0
        return self._timed("allreduce", nbytes, replace(half + half, seconds=2 * half.seconds - launch))

    def reduce_scatter(self, nbytes: float) -> CollectiveCost:
        """Half of an all-reduce: the reduce-scatter of a buffer, or the all-gather of its shards."""
        n, link = self.workers, self._link
        if n == 1:
            return CollectiveCost()
        volume = ring_allreduce_bytes(n, nbytes) / 2
        seconds = link.launch + log2_ceil(n) * link.alpha + volume * link.beta
        return CollectiveCost(seconds, volume, volume if self.nodes > 1 else 0.0)

    def allgather(self, message: float) -> CollectiveCost:
        """Sparse all-gather of messages of ``message`` bytes; each message of another node enters a node once."""
        n, link = self.workers, self._link
        if n == 1:
            return CollectiveCost()
        passing = self._foreign * message if self.nodes > 1 else allgather_bytes(n, message)
        seconds = link.launch + log2_ceil(n) * link.alpha + passing * link.beta
        formula = CollectiveCost(seconds, allgather_bytes(n, message), self._foreign * message)
        return self._timed("allgather", message, formula)

    def _timed(self, collective: str, nbytes: float, formula: CollectiveCost) -> CollectiveCost:
        """What the formula says, with the times that were measured where they were."""
        if collective not in self.measured:
            return formula
        sample = self.measured[collective].at(nbytes)
        return replace(
            formula,
            seconds=sample.alone,
            hidden=max(0.0, sample.alone - sample.queued),
            processor=sample.processor,
            processor_hidden=max(0.0, sample.processor - sample.processor_queued),
        )

    def gtopk(self, message: float) -> CollectiveCost:
        """gTop-k's reduction tree and the broadcast after it (Shi et al., ICDCS 2019)."""
        n, link = self.workers, self._link
        if n == 1:
            return CollectiveCost()
        rounds = 2 * log2_ceil(n)
        outside = 2 * log2_ceil(self.nodes) * message
        passing = outside if self.nodes > 1 else rounds * message
        seconds = link.launch + rounds * link.alpha + passing * link.beta
        return CollectiveCost(seconds, rounds * message, outside)

    def oktopk(self, message: float, refresh_every: int = 128) -> CollectiveCost:
        """Ok-Topk's split-and-reduce, balancing and final gather (Li and Hoefler, PPoPP 2022).

        The exchanges are point-to-point: every worker of a node receives from every worker outside. Every
        ``refresh_every`` iterations the unpruned sums are gathered as well, on average ``2 sqrt(n)`` messages (measured
        on heavy-tailed data with a correlation of 0.5 between workers); that is spread over the iterations.
        """
        n, g, link = self.workers, self.gpus_per_node, self._link
        if n == 1:
            return CollectiveCost()
        refresh = min(n, 2 * n**0.5) / refresh_every * message
        apart = self._foreign / n if self.nodes > 1 else (n - 1) / n
        workers_per_link = g if self.nodes > 1 else 1
        passing = apart * (workers_per_link * 2 * message + message + refresh)
        seconds = link.launch + (2 * n + 2 * log2_ceil(n)) * link.alpha + passing * link.beta
        volume = (n - 1) / n * (3 * message + refresh)
        return CollectiveCost(seconds, volume, passing if self.nodes > 1 else 0.0)

    def hierarchical(self, message: float, nbytes: float) -> CollectiveCost:
        """Dense inside the node (``nbytes``), sparse between nodes (a ``message`` of each): reduce-scatter, all-gather
        of each shard, all-gather inside."""
        g = self.gpus_per_node
        inside = CollectiveCost()
        if g > 1:
            volume = ring_allreduce_bytes(g, nbytes)
            seconds = 2 * self.intra.launch + 2 * (g - 1) * self.intra.alpha + volume * self.intra.beta
            inside = CollectiveCost(seconds, volume)
        if self.nodes == 1:
            return inside
        outside = (self.nodes - 1) * message
        seconds = self.inter.launch + log2_ceil(self.nodes) * self.inter.alpha + outside * self.inter.beta
        return inside + CollectiveCost(seconds, outside / g, outside)

    @property
    def _link(self) -> Link:
        return self.inter if self.nodes > 1 else self.intra

    @property
    def _foreign(self) -> int:
        """Workers outside a node."""
        return self.workers - self.gpus_per_node


def resolve_link(bandwidth: str) -> Link:
    """A link by the name of a preset, or by a rate such as ``"40gbit"``.

    A rate without a preset takes the messages of the nearest preset, and 85 % of the nominal rate.

    Raises:
        ValueError: If it is neither.
    """
    name = bandwidth.strip().lower()
    name = _ALIASES.get(name, name)
    if name in LINKS:
        return LINKS[name]
    if match := re.fullmatch(r"(\d*\.?\d+)([gm])bit", name):
        rate = float(match[1]) * {"g": 1e9, "m": 1e6}[match[2]]
        if rate > 0:
            beta = 8 / (rate * 0.85)
            nearest = min(LINKS.values(), key=lambda link: max(link.beta / beta, beta / link.beta))
            return replace(nearest, beta=beta)
    raise ValueError(f"unknown bandwidth {bandwidth!r}: give a rate such as '25gbit', or one of {sorted(LINKS)}")
