"""A cluster in numbers: nodes that share one network card each, the cost of a collective on them, and their jitter.

Sizes are bytes, times are seconds. A collective between nodes is charged with the bytes that pass the network card of
*one node*: rings of neighbouring ranks enter a node once, point-to-point exchanges once per worker. Inside a node the
fast links are charged. Formulas: Thakur, Rabenseifner and Gropp (IJHPCA 2005, section 4) for dense collectives, Li and
Hoefler (PPoPP 2022, table 1) for sparse ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from math import inf, log1p, sqrt

import numpy as np

from lightning_safusion.comm.cost import (
    GOODPUT,
    LINKS,
    Link,
    allgather_bytes,
    log2_ceil,
    plain_rate,
    ring_allreduce_bytes,
)
from lightning_safusion.lookup import look_up
from lightning_safusion.tools.plan.calibration import Calibration, CollectiveTimes
from lightning_safusion.tools.plan.device import DEVICES, Device

#: NVLink inside a node: 200 GB/s effective.
NVLINK = Link(alpha=3e-6, beta=1 / 200e9, launch=15e-6)

#: Short names of links, beside those of ``comm.cost.LINKS``.
_ALIASES = {"100gbit": "100gbit-roce", "200gbit": "200gbit-rdma"}
# Bytes per second of a processor's memory for one thread, for the passes of PowerSGD and of casts.
_HOST_MEMORY = 8e9


@dataclass(frozen=True)
class CollectiveCost:
    """The cost of one collective."""

    seconds: float = 0.0  # on the link
    nbytes: float = 0.0  # that one worker receives
    node_bytes: float = 0.0  # that enter one node through its network card

    def __add__(self, other: CollectiveCost) -> CollectiveCost:
        """One after the other."""
        return CollectiveCost(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Cluster:
    """Nodes of equally many workers.

    Raises:
        ValueError: If there is no worker or no shard, or the jitter or its seed is negative.
    """

    nodes: int  # N
    gpus_per_node: int = 1  # workers in each (g)
    inter: Link = LINKS["25gbit"]  # of one node, shared by its workers
    intra: Link = NVLINK  # of one worker inside its node
    device: Device = DEVICES["a100"]
    # relative standard deviation of computing times: of a worker in an iteration, and of each of its gradients
    jitter: float = 0.0
    seed: int = 0  # of the jitter
    # "allgather" by the bytes of a message and "allreduce" by those of the buffer, in place of the formulas
    measured: Mapping[str, CollectiveTimes] = field(default_factory=dict)
    # of a model, which as many workers of a node have. The workers that are counted here have the same shard; those of
    # all shards exchange at once, and share the cards. None: models are whole
    shards: int | None = None

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus_per_node < 1:
            raise ValueError(f"a cluster needs nodes and GPUs, got {self.nodes} nodes of {self.gpus_per_node} GPUs")
        if self.sharing < 1:
            raise ValueError(f"a sharded model has shards, got {self.shards}")
        if self.jitter < 0:
            raise ValueError(f"jitter must not be negative, got {self.jitter}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")

    @classmethod
    def calibrated(
        cls,
        costs: Calibration,
        nodes: int,
        gpus_per_node: int = 1,
        jitter: float | None = None,
        seed: int = 0,
        device: Device = DEVICES["a100"],
    ) -> Cluster:
        """A cluster with measured costs, and the measured jitter if no other is given. Collectives take the measured
        times where it is as large as the measured group, otherwise those of its link. The work of ``device`` is counted
        where processors do none."""
        same = nodes * gpus_per_node == costs.workers
        if costs.select is not None:
            same = nodes == costs.workers and gpus_per_node == 1
            device = Device("processors", _HOST_MEMORY, 0.0, inf, selection=costs.select, decode=costs.decode)
        return cls(
            nodes,
            gpus_per_node,
            costs.link,
            device=device,
            jitter=costs.jitter if jitter is None else jitter,
            seed=seed,
            measured={"allgather": costs.allgather, "allreduce": costs.allreduce} if same else {},
        )

    @property
    def workers(self) -> int:
        """Workers (n)."""
        return self.nodes * self.gpus_per_node

    @property
    def sharing(self) -> int:
        """Groups of workers with the same shard, which share a card; one where models are whole."""
        return 1 if self.shards is None else self.shards

    @property
    def share(self) -> Link:
        """What one of these groups has of the card."""
        return replace(self.inter, beta=self.sharing * self.inter.beta)

    def allreduce(self, nbytes: float) -> CollectiveCost:
        """Dense all-reduce of a buffer of ``nbytes`` by recursive halving and doubling."""
        volume = ring_allreduce_bytes(self.workers, nbytes)
        return self._timed("allreduce", nbytes, self._flat(2 * log2_ceil(self.workers), volume, volume))

    def reduce_scatter(self, nbytes: float) -> CollectiveCost:
        """Half of an all-reduce: the reduce-scatter of a buffer, or the all-gather of its shards."""
        volume = ring_allreduce_bytes(self.workers, nbytes) / 2
        return self._flat(log2_ceil(self.workers), volume, volume)

    def allgather(self, message: float) -> CollectiveCost:
        """Sparse all-gather of messages of ``message`` bytes; each message of another node enters a node once."""
        foreign = self.workers - self.gpus_per_node
        received = allgather_bytes(self.workers, message)
        return self._timed("allgather", message, self._flat(log2_ceil(self.workers), received, foreign * message))

    def gtopk(self, message: float) -> CollectiveCost:
        """gTop-k's reduction tree and the broadcast after it (Shi et al., ICDCS 2019)."""
        rounds = 2 * log2_ceil(self.workers)
        return self._flat(rounds, rounds * message, 2 * log2_ceil(self.nodes) * message)

    def oktopk(self, message: float, refresh_every: int = 128) -> CollectiveCost:
        """Ok-Topk's split-and-reduce, balancing and final gather (Li and Hoefler, PPoPP 2022), from point to point.

        Every ``refresh_every`` iterations the unpruned sums are gathered as well, on average ``2 sqrt(n)`` messages
        (measured on heavy-tailed data with a correlation of 0.5 between workers); that is spread over the iterations.
        """
        n, g = self.workers, self.gpus_per_node
        refresh = min(n, 2 * n**0.5) / refresh_every * message
        received = (n - 1) / n * (3 * message + refresh)
        entering = (n - g) / n * (g * 2 * message + message + refresh)
        return self._flat(2 * n + 2 * log2_ceil(n), received, entering)

    def sharded(self, scattered: float, gathered: float) -> CollectiveCost:
        """An all-to-all of what each worker has for all owners; then workers gather what all owners deliver.

        In the first every worker of a node receives from every worker outside, in the second each message of another
        node enters a node once.
        """
        n, g = self.workers, self.gpus_per_node
        received = (n - 1) / n * (scattered + gathered)
        entering = (n - g) / n * (g * scattered + gathered)
        return self._flat(n + log2_ceil(n), received, entering)

    def hierarchical(self, message: float, nbytes: float) -> CollectiveCost:
        """Dense inside the node, sparse between nodes (a ``message`` of each): reduce-scatter, all-gather of each
        shard, all-gather inside."""
        return self._two_levels(nbytes, log2_ceil(self.nodes), allgather_bytes(self.nodes, message))

    def hierarchical_sharded(self, scattered: float, gathered: float, nbytes: float) -> CollectiveCost:
        """The same with sums of nodes to owners and back, as in :meth:`sharded`: an all-to-all and an all-gather of
        each shard."""
        outside = (self.nodes - 1) / self.nodes * (scattered + gathered)
        return self._two_levels(nbytes, self.nodes + log2_ceil(self.nodes), outside)

    def _two_levels(self, nbytes: float, rounds: int, outside: float) -> CollectiveCost:
        """An all-reduce of ``nbytes`` inside nodes; in the middle of it ``outside`` bytes in all to each node."""
        g = self.gpus_per_node
        inside = CollectiveCost()
        if g > 1:
            volume, link = ring_allreduce_bytes(g, nbytes), self.intra
            inside = CollectiveCost(2 * link.launch + 2 * (g - 1) * link.alpha + volume * link.beta, volume)
        if self.nodes == 1:
            return inside
        seconds = self.inter.launch + rounds * self.inter.alpha + outside * self.share.beta
        return inside + CollectiveCost(seconds, outside / g, outside * self.sharing)

    def _flat(self, rounds: int, received: float, entering: float) -> CollectiveCost:
        """A collective of all workers: messages in sequence, bytes that a worker receives, bytes that enter a node."""
        if self.workers == 1:
            return CollectiveCost()
        if self.nodes == 1:
            link, passing, entering = self.intra, received, 0.0
        else:
            link, passing = self.share, entering
        seconds = link.launch + rounds * link.alpha + passing * link.beta
        return CollectiveCost(seconds, received, entering * self.sharing)

    def _timed(self, collective: str, nbytes: float, formula: CollectiveCost) -> CollectiveCost:
        if collective not in self.measured:
            return formula
        return replace(formula, seconds=self.measured[collective].at(nbytes).seconds)

    def draw_factors(self, iteration: int, workers: int, tensors: int) -> tuple[np.ndarray, np.ndarray]:
        """Factors on the times of an iteration: of each worker [workers], and of each of its gradients [workers, L]."""
        # windows before the first iteration have negative numbers, which a seed cannot have
        rng = np.random.default_rng([self.seed, int(iteration < 0), abs(iteration)])
        return lognormal(rng, self.jitter, (workers,)), lognormal(rng, self.jitter, (workers, tensors))


def lognormal(rng: np.random.Generator, deviation: float, shape: tuple[int, ...]) -> np.ndarray:
    """Factors with mean 1 and a relative standard deviation; times and sizes are not negative."""
    sigma = sqrt(log1p(deviation**2))
    return rng.lognormal(-(sigma**2) / 2, sigma, shape)


def resolve_link(bandwidth: str) -> Link:
    """A link by the name of a preset, or by a rate such as ``"40 Gbit/s"``: then with α and the launch of the nearest
    preset, and 85 % of the nominal rate.

    Raises:
        ValueError: If it is neither.
    """
    name = plain_rate(bandwidth).strip().lower()
    name = _ALIASES.get(name, name)
    if name in LINKS:
        return LINKS[name]
    if match := re.fullmatch(r"(\d*\.?\d+)([gm])bit", name):
        rate = float(match[1]) * {"g": 1e9, "m": 1e6}[match[2]]
        if rate > 0:
            beta = 8 / (rate * GOODPUT)
            nearest = min(LINKS.values(), key=lambda link: max(link.beta / beta, beta / link.beta))
            return replace(nearest, beta=beta)
    return look_up("bandwidth", bandwidth, LINKS, "give a rate such as '25gbit'")
