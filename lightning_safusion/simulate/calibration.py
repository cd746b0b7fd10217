"""Costs fitted to measurements on a group of workers, as a file that the planner takes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path

from lightning_safusion.comm.cost import LinearCost, Link, log2_ceil
from lightning_safusion.fusion.plans.costs import SelectionCost
from lightning_safusion.simulate.cluster import Cluster, Device
from lightning_safusion.simulate.measured import CollectiveSample, CollectiveTimes, Host, StageCost

_FORMAT = "lightning-safusion-calibration"
_VERSION = 2
_REMEDY = "write a new one with safusion bench --calibrate true"


@dataclass(frozen=True)
class Calibration:
    """What was measured.

    Args:
        workers: In the group.
        allgather: By the bytes of one worker's message.
        allreduce: By the bytes of the buffer.
        entry_bytes: Bytes of an entry on the wire.
        host: What the work of a step costs the processors of a worker.
        jitter: Relative standard deviation of a worker's step without any exchange.
        source: How, in words.

    Raises:
        ValueError: If there are fewer than two workers, or a number is negative or not finite.
    """

    workers: int
    allgather: CollectiveTimes
    allreduce: CollectiveTimes
    entry_bytes: float
    host: Host
    jitter: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        if self.workers < 2:
            raise ValueError(f"costs are calibrated on two workers or more, got {self.workers}")
        for name, value in asdict(self.host).items():
            numbers = value.values() if isinstance(value, dict) else [value]
            if not all(isfinite(number) and number >= 0 for number in numbers):
                raise ValueError(f"calibration: the cost of {name} must be finite and not negative, got {value}")
        if not self.entry_bytes > 0:
            raise ValueError(f"calibration: an entry has bytes on the wire, got entry_bytes={self.entry_bytes}")

    @property
    def device(self) -> Device:
        """The local costs; every kind of selection costs what was measured."""
        select = SelectionCost(self.host.ahead.fixed, self.host.ahead.per_element)
        kinds = {"threshold": select, "exact": select}
        return Device(kinds, self.host.decode.per_element, decodes_last=True, memory=_HOST_MEMORY)

    @property
    def link(self) -> Link:
        """α and β of the group, for other numbers of workers: both lines have rounds of messages in common."""
        n, rounds = self.workers, log2_ceil(self.workers)
        gather, reduce = self.allgather.line, self.allreduce.line
        alpha = max(0.0, (reduce.fixed - gather.fixed) / rounds)
        return Link(alpha=alpha, beta=gather.per_byte / (n - 1), launch=max(0.0, gather.fixed - rounds * alpha))

    def cluster(self, nodes: int, gpus_per_node: int = 1, jitter: float | None = None, seed: int = 0) -> Cluster:
        """A cluster with these costs: those measured where it has as many nodes, otherwise those of :attr:`link`; with
        as many cores for each worker as there were, and the measured jitter if no other is given."""
        same = nodes == self.workers and gpus_per_node == 1
        measured = {"allgather": self.allgather, "allreduce": self.allreduce} if same else {}
        jitter = self.jitter if jitter is None else jitter
        return Cluster(
            nodes,
            gpus_per_node,
            self.link,
            device=self.device,
            jitter=jitter,
            seed=seed,
            measured=measured,
            host=self.host,
        )

    def save(self, path: str | Path) -> None:
        """Writes it as JSON."""
        Path(path).write_text(json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(self)}, indent=1))

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Reads what :meth:`save` wrote; a ValueError names a file that is no calibration of this version."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            head = f"{content.pop('format')} version {content.pop('version')}"
            if head != f"{_FORMAT} version {_VERSION}":
                raise ValueError(f"{path} is {head}, expected {_FORMAT} version {_VERSION}; {_REMEDY}")
            for name in ("allgather", "allreduce"):
                samples = content[name]["samples"]
                content[name] = CollectiveTimes(tuple(CollectiveSample(**sample) for sample in samples))
            host = content["host"]
            stages = {name: StageCost(**host[name]) for name in ("ahead", "behind", "decode")}
            content["host"] = Host(**(host | stages | {"drain": LinearCost(**host["drain"])}))
            return cls(**content)
        except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no calibration: {error!r}; {_REMEDY}") from error


# Bytes per second of a processor's memory for one thread; what PowerSGD's and casts' passes take.
_HOST_MEMORY = 8e9
