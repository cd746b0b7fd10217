"""Costs measured on a group of workers: of its collectives, of the engine's work on its processors; and their file."""

from __future__ import annotations

import json
from dataclasses import asdict, astuple, dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path

import numpy as np

from lightning_safusion.comm.cost import LinearCost, Link, fit_linear, log2_ceil

_FORMAT = "lightning-safusion-calibration"
_VERSION = 2
_REMEDY = "write a new one with safusion bench --calibrate true"


@dataclass(frozen=True)
class CollectiveSample:
    """Collectives of one size.

    Args:
        nbytes: Of one worker's message, or of the buffer that is reduced.
        alone: Seconds of one collective while no other runs.
        queued: Seconds between the ends of two that were launched at once: the latency of one hides behind the other.
        processor: Seconds of a core that one alone takes on each worker.
        processor_queued: The same of one in a queue.
    """

    nbytes: int
    alone: float
    queued: float
    processor: float
    processor_queued: float


@dataclass(frozen=True)
class CollectiveTimes:
    """One kind of collective, by the bytes of its buffers (two or more, rising), on straight lines between them."""

    samples: tuple[CollectiveSample, ...]

    def at(self, nbytes: float) -> CollectiveSample:
        """The times of a collective of ``nbytes``."""
        rows = self._table
        place = int(np.clip(np.searchsorted(rows[:, 0], nbytes), 1, len(rows) - 1))
        low, high = rows[place - 1], rows[place]
        share = max(0.0, (nbytes - low[0]) / (high[0] - low[0]))
        _, *values = np.maximum(low + share * (high - low), 0.0).tolist()
        return CollectiveSample(int(nbytes), *values)

    @cached_property
    def _table(self) -> np.ndarray:
        return np.array([astuple(sample) for sample in self.samples], np.float64)


@dataclass(frozen=True)
class StageCost:
    """Seconds of a core that one stage takes for a buffer.

    Args:
        fixed: For each buffer.
        per_tensor: For each tensor in it.
        per_element: For each element in it, or for each entry that is decoded.
    """

    fixed: float = 0.0
    per_tensor: float = 0.0
    per_element: float = 0.0

    def __call__(self, tensors: int, elements: float) -> float:
        """Seconds for a buffer."""
        return self.fixed + self.per_tensor * tensors + self.per_element * elements


@dataclass(frozen=True)
class Host:
    """Processors that do all the work of a worker, and that all workers of a machine may share.

    Args:
        cores: For each worker.
        forward: Share of the trace's forward pass in which the worker has a core.
        backward: The same of the backward pass.
        optimizer: The same of the optimizer's step.
        asleep: Share of the rest in which the worker sleeps (a paced job); in the other part it waited for a core.
        hook: Seconds that the engine takes for each gradient, besides the stages below.
        ahead: Selection before fusion, packing and the launch of the collective.
        behind: The same after fusion.
        decode: Decoding, by the entries of all workers.
        drain: Seconds that the end of a window takes besides, by the number of buffers.
    """

    cores: float
    forward: float = 1.0
    backward: float = 1.0
    optimizer: float = 1.0
    asleep: float = 1.0
    hook: float = 0.0
    ahead: StageCost = StageCost()
    behind: StageCost = StageCost()
    decode: StageCost = StageCost()
    drain: LinearCost = LinearCost(0.0, 0.0)


@dataclass(frozen=True)
class Calibration:
    """All costs of a group.

    Args:
        workers: In the group.
        allgather: By the bytes of one worker's message.
        allreduce: By the bytes of the buffer.
        entry_bytes: Bytes of an entry on the wire.
        host: Costs of a step on the processors of a worker; None where accelerators do the work.
        jitter: Relative standard deviation of a worker's step without any exchange.
        source: How they were measured, in words.
        nodes: Machines of the group; None in files that do not say.
        per_node: Workers on each; None with ``nodes``.
        device: Of :data:`~lightning_safusion.simulate.device.DEVICES`: the one that the workers had, or its like; None
            where that is not known, and on CPUs.

    Raises:
        ValueError: If there are fewer than two workers, nodes and workers on each do not make as many, or a number is
            negative or not finite.
    """

    workers: int
    allgather: CollectiveTimes
    allreduce: CollectiveTimes
    entry_bytes: float
    host: Host | None
    jitter: float = 0.0
    source: str = ""
    nodes: int | None = None
    per_node: int | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if self.workers < 2:
            raise ValueError(f"costs are calibrated on two workers or more, got {self.workers}")
        if (self.nodes, self.per_node) != (None, None) and (self.nodes or 0) * (self.per_node or 0) != self.workers:
            placed = f"got nodes={self.nodes} and per_node={self.per_node}"
            raise ValueError(f"calibration: {self.workers} workers are nodes times workers on each, {placed}")
        for name, value in (asdict(self.host) if self.host is not None else {}).items():
            numbers = value.values() if isinstance(value, dict) else [value]
            if not all(isfinite(number) and number >= 0 for number in numbers):
                raise ValueError(f"calibration: the cost of {name} must be finite and not negative, got {value}")
        if not self.entry_bytes > 0:
            raise ValueError(f"calibration: an entry has bytes on the wire, got entry_bytes={self.entry_bytes}")

    @property
    def placed(self) -> tuple[int, int] | None:
        """Nodes and workers on each, as the simulator counts them: each worker of a CPU job is a node, because its
        costs are those between two workers. None where the file does not say."""
        if self.host is not None:
            return self.workers, 1
        return (self.nodes, self.per_node) if self.nodes is not None and self.per_node is not None else None

    @property
    def link(self) -> Link:
        """α and β of the group, for other numbers of workers: both lines have rounds of messages in common."""
        n, rounds = self.workers, log2_ceil(self.workers)
        gather, reduce = (
            fit_linear([(sample.nbytes, sample.alone) for sample in times.samples])
            for times in (self.allgather, self.allreduce)
        )
        alpha = max(0.0, (reduce.fixed - gather.fixed) / rounds)
        return Link(alpha=alpha, beta=gather.per_byte / (n - 1), launch=max(0.0, gather.fixed - rounds * alpha))

    def save(self, path: str | Path) -> None:
        """Writes it as JSON."""
        Path(path).write_text(json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(self)}, indent=1))

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Reads a file of :meth:`save`; a ValueError names a file that is no calibration of this version."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            head = f"{content.pop('format')} version {content.pop('version')}"
            if head != f"{_FORMAT} version {_VERSION}":
                raise ValueError(f"{path} is {head}, expected {_FORMAT} version {_VERSION}; {_REMEDY}")
            for name in ("allgather", "allreduce"):
                samples = content[name]["samples"]
                content[name] = CollectiveTimes(tuple(CollectiveSample(**sample) for sample in samples))
            host = content["host"]
            if host is not None:
                stages = {name: StageCost(**host[name]) for name in ("ahead", "behind", "decode")}
                content["host"] = Host(**(host | stages | {"drain": LinearCost(**host["drain"])}))
            return cls(**content)
        except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no calibration: {error!r}; {_REMEDY}") from error
