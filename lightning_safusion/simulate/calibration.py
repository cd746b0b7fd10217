"""Costs fitted to measurements on a group of workers, as a file that the planner takes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path

from lightning_safusion.comm.cost import LinearCost, Link, log2_ceil
from lightning_safusion.fusion.behind import SelectionCost
from lightning_safusion.simulate.cluster import Cluster, Device

_FORMAT = "lightning-safusion-calibration"
_VERSION = 1


@dataclass(frozen=True)
class Calibration:
    """What was measured.

    Args:
        workers: In the group.
        allgather: Seconds by the bytes of one worker's message.
        allreduce: Seconds by the bytes of the buffer.
        select: Seconds of selecting from a buffer, packing it and starting its collective, by its elements.
        decode: Seconds of decoding a buffer, by the entries of all workers in it.
        entry_bytes: Bytes of an entry on the wire.
        on_host: Selection and decoding run on the thread of the backward pass (CPU).
        source: How, in words.

    Raises:
        ValueError: If there are fewer than two workers, or a number is negative or not finite.
    """

    workers: int
    allgather: LinearCost
    allreduce: LinearCost
    select: LinearCost
    decode: LinearCost
    entry_bytes: float
    on_host: bool = True
    source: str = ""

    def __post_init__(self) -> None:
        if self.workers < 2:
            raise ValueError(f"costs are calibrated on two workers or more, got {self.workers}")
        for name in ("allgather", "allreduce", "select", "decode"):
            line: LinearCost = getattr(self, name)
            if not all(isfinite(number) and number >= 0 for number in (line.fixed, line.per_byte)):
                raise ValueError(f"calibration: the cost of {name} must be finite and not negative, got {line}")
        if not self.entry_bytes > 0:
            raise ValueError(f"calibration: an entry has bytes on the wire, got entry_bytes={self.entry_bytes}")

    @property
    def device(self) -> Device:
        """The local costs; every kind of selection costs what was measured."""
        select = SelectionCost(self.select.fixed, self.select.per_byte)
        kinds = {"threshold": select, "exact": select}
        decode, fixed = self.decode.per_byte, self.decode.fixed
        return Device(kinds, decode, decode_fixed=fixed, decodes_last=self.on_host, memory=_HOST_MEMORY)

    @property
    def link(self) -> Link:
        """α and β of the group, for other numbers of workers: both lines have rounds of messages in common."""
        n, rounds = self.workers, log2_ceil(self.workers)
        alpha = max(0.0, (self.allreduce.fixed - self.allgather.fixed) / rounds)
        return Link(
            alpha=alpha,
            beta=self.allgather.per_byte / (n - 1),
            launch=max(0.0, self.allgather.fixed - rounds * alpha),
        )

    def cluster(self, nodes: int, gpus_per_node: int = 1, jitter: float = 0.0, seed: int = 0) -> Cluster:
        """A cluster with these costs: those measured where it has as many nodes, otherwise those of :attr:`link`."""
        same = nodes == self.workers and gpus_per_node == 1
        measured = {"allgather": self.allgather, "allreduce": self.allreduce} if same else {}
        return Cluster(nodes, gpus_per_node, self.link, device=self.device, jitter=jitter, seed=seed, measured=measured)

    def save(self, path: str | Path) -> None:
        """Writes it as JSON."""
        Path(path).write_text(json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(self)}, indent=1))

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Reads what :meth:`save` wrote.

        Raises:
            ValueError: If there is no such file, or it is not a calibration of this format and version.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            head = (content.pop("format"), content.pop("version"))
            if head != (_FORMAT, _VERSION):
                raise ValueError(f"{path} has format and version {head}, expected {(_FORMAT, _VERSION)}")
            for name in ("allgather", "allreduce", "select", "decode"):
                content[name] = LinearCost(**content[name])
            return cls(**content)
        except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path} is no calibration: {error!r}; write one with safusion bench --calibrate true"
            ) from error


# Bytes per second of a processor's memory for one thread; what PowerSGD's and casts' passes take.
_HOST_MEMORY = 8e9
