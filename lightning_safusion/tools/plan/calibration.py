"""Costs measured on a group of workers: of its collectives, of selection and decoding on processors; and their file."""

from __future__ import annotations

import json
from dataclasses import asdict, astuple, dataclass, replace
from functools import cached_property
from math import isfinite
from pathlib import Path

import numpy as np

from lightning_safusion.comm.cost import Link, fit_linear, log2_ceil
from lightning_safusion.fusion.plans.costs import SelectionCost

_FORMAT = "lightning-safusion-calibration"
_VERSION = 3
_REMEDY = "write a new one with safusion bench --calibrate true"


@dataclass(frozen=True)
class CollectiveSample:
    """Collectives of one size: bytes of one worker's message, or of the buffer that is reduced, and seconds of one."""

    nbytes: int
    seconds: float


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
        return type(self.samples[0])(int(nbytes), *values)

    @cached_property
    def _table(self) -> np.ndarray:
        return np.array([astuple(sample) for sample in self.samples], np.float64)


@dataclass(frozen=True)
class Calibration:
    """All costs of a group.

    Raises:
        ValueError: If there are fewer than two workers, nodes and workers on each do not make as many, or a number is
            negative or not finite.
    """

    workers: int
    allgather: CollectiveTimes  # by the bytes of one worker's message
    allreduce: CollectiveTimes  # by the bytes of the buffer
    entry_bytes: float  # on the wire
    # selection, packing and launch of a buffer on a worker's processors, and what its decoding takes whatever its size;
    # None where accelerators do the work
    select: SelectionCost | None = None
    decode: float | None = None  # seconds of an entry that is decoded; None with ``select``
    jitter: float = 0.0  # relative standard deviation of a worker's step without any exchange
    source: str = ""  # how they were measured, in words
    nodes: int | None = None  # machines; None in files that do not say
    per_node: int | None = None  # workers on each; None with ``nodes``
    device: str | None = None  # of DEVICES: that of the workers, or its like; None where it is not known, and on CPUs

    def __post_init__(self) -> None:
        if self.workers < 2:
            raise ValueError(f"costs are calibrated on two workers or more, got {self.workers}")
        if (self.nodes, self.per_node) != (None, None) and (self.nodes or 0) * (self.per_node or 0) != self.workers:
            placed = f"got nodes={self.nodes} and per_node={self.per_node}"
            raise ValueError(f"calibration: {self.workers} workers are nodes times workers on each, {placed}")
        costs = {"select": () if self.select is None else astuple(self.select), "decode": (self.decode or 0.0,)}
        for name, numbers in costs.items():
            if not all(isfinite(number) and number >= 0 for number in numbers):
                raise ValueError(f"calibration: the cost of {name} must be finite and not negative, got {numbers}")
        if not self.entry_bytes > 0:
            raise ValueError(f"calibration: an entry has bytes on the wire, got entry_bytes={self.entry_bytes}")

    @property
    def placed(self) -> tuple[int, int] | None:
        """Nodes and workers on each; None where the file does not say. Each worker of a CPU job counts as a node: its
        costs are those between two workers."""
        if self.select is not None:
            return self.workers, 1
        return (self.nodes, self.per_node) if self.nodes is not None and self.per_node is not None else None

    @property
    def machines(self) -> tuple[int, int]:
        """Machines, two or more, and workers on each.

        Raises:
            ValueError: If there was one, or the file does not say how many.
        """
        if self.nodes is None or self.per_node is None:
            unsaid = f"calibration: it does not say on how many machines its {self.workers} workers were"
            raise ValueError(f"{unsaid}; {_REMEDY}")
        if self.nodes == 1:
            raise ValueError(
                f"calibration: its {self.workers} workers were on one machine, so that no link between machines was "
                "measured; give --bandwidth in place of --calibration"
            )
        return self.nodes, self.per_node

    @property
    def card(self) -> Link:
        """The link of one machine, which each message from another one enters once."""
        _, inside = self.machines
        return replace(self.link, beta=self.link.beta * (self.workers - 1) / (self.workers - inside))

    @property
    def link(self) -> Link:
        """α and β of the group, for other numbers of workers: both lines have rounds of messages in common."""
        n, rounds = self.workers, log2_ceil(self.workers)
        gather, reduce = (
            fit_linear([(sample.nbytes, sample.seconds) for sample in times.samples])
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
            if content["select"] is not None:
                content["select"] = SelectionCost(**content["select"])
            return cls(**content)
        except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is no calibration: {error!r}; {_REMEDY}") from error
