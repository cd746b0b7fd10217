"""The trace and the costs of a user's job, recorded in turns of their own, and what the simulator says by them."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_safusion.callbacks.trace_recorder import TraceRecorder
from lightning_safusion.comm.calibrate import calibrate
from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.comm.transport.torch_backend import default_transport
from lightning_safusion.fusion.events import WindowEvents
from lightning_safusion.fusion.plans.costs import SelectionCost
from lightning_safusion.fusion.recorder import ProfileRecorder
from lightning_safusion.notation import read
from lightning_safusion.profiling.trace import Trace
from lightning_safusion.strategy import SAFusionStrategy
from lightning_safusion.tools.bench.rows import parse_row
from lightning_safusion.tools.bench.turns import Bench
from lightning_safusion.tools.plan.calibration import Calibration, CollectiveSample, CollectiveTimes
from lightning_safusion.tools.plan.cluster import Cluster
from lightning_safusion.tools.plan.comparison import break_even
from lightning_safusion.tools.plan.device import DEVICES
from lightning_safusion.tools.plan.job import Job as SimulatedJob
from lightning_safusion.tools.plan.rows import simulated_row

# The row whose costs are recorded: its buffers stay as they are.
_ROW = "saf-inter[density=0.02]"
_TRACED, _SKIPPED = 20, 10  # steps of a trace
_SIZES = tuple(1 << bits for bits in range(10, 27, 2))  # bytes, at which a line of costs is written down
_ENTRY_BYTES = 6.0  # of an entry where nothing was counted: systems have formats of their own
# Devices whose speeds are known, by the names that drivers give them and their like.
_NAMES = {"h100": re.compile("H100|H200|GH200|B200"), "a100": re.compile("A100")}
#: Share of a step below which a gain is none.
WORTH = 0.03


@dataclass(frozen=True)
class Recorded:
    """A step of a job without any exchange, and the costs of the group that ran it, with its hardware."""

    trace: Trace
    costs: Calibration


class _CostRecorder(Callback):
    """What selection and decoding take of the processors, as the planner agrees on it."""

    def __init__(self) -> None:
        self._entry_bytes: float | None = None  # in the messages; None before there were some
        self._recorder: ProfileRecorder | None = None
        self._windows = 0

    def observe(self, events: WindowEvents) -> None:
        self._windows += 1
        if self._windows == 1:  # it sets up communicators
            return
        self._recorder = self._recorder or ProfileRecorder(len(events.layout))
        self._recorder.record(events)
        sparse = [each for each in events.buffers if each.collective == "allgather"]
        entries = sum(each.capacity for each in sparse)
        if entries:
            self._entry_bytes = sum(each.bytes_sent for each in sparse) / entries

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(trainer.strategy, SAFusionStrategy)  # noqa: S101 (rows of forecasts have it)
        trainer.strategy.add_observer(self)

    def agree(self, transport: Transport, lines: Mapping[str, LinearCost]) -> tuple[SelectionCost, float] | None:
        """Seconds of a buffer by its elements, and of an entry that is decoded; None without a sparse window.
        Collective; ``lines``: costs of its collectives."""
        if self._recorder is None or self._entry_bytes is None:
            return None
        agreed = self._recorder.agree(transport, lines, "cpu")
        select, decode = agreed.select, agreed.decode
        per_entry = decode.per_byte * self._entry_bytes / transport.world_size
        return SelectionCost(select.fixed + decode.fixed, select.per_byte), per_entry


def record(
    bench: Bench, make: Callable[[str], Any], place: tuple[int, int], accumulated: int, tick: Callable[[], None]
) -> Recorded | None:
    """Records a job, its trace and its costs; None on all processes but the first. Collective. ``make``: a strategy
    for a row; ``place``: machines, and workers on each; ``accumulated``: batches of a step; ``tick``: after a step."""
    recorder, costs, meeting = TraceRecorder(None, _TRACED, _SKIPPED), _CostRecorder(), bench.meeting
    steps = _SKIPPED + _TRACED + 2
    bench.turn(f"{_ROW} recorded", make(_ROW), 0, steps, tick, recorder, costs, accumulated=False)
    transport = default_transport()
    lines = calibrate(transport, meeting.device)
    on_cpu = meeting.device.type == "cpu"
    agreed = costs.agree(transport, lines) if on_cpu else None
    transport.close()
    if recorder.trace is None or (on_cpu and agreed is None):
        return None
    times = {name: CollectiveTimes(tuple(CollectiveSample(n, line(n)) for n in _SIZES)) for name, line in lines.items()}
    name = platform.machine() if on_cpu else torch.cuda.get_device_name(meeting.device)
    select, decode = agreed or (None, None)
    calibration = Calibration(
        meeting.workers,
        times["allgather"],
        times["allreduce"],
        _ENTRY_BYTES,
        select,
        decode,
        source=f"timed on {meeting.workers} workers ({dist.get_backend()}, {name})",
        nodes=place[0],
        per_node=place[1],
        device=None if on_cpu else known_device(name),
    )
    return Recorded(_of_steps(recorder.trace, accumulated), calibration)


def known_device(name: str) -> str | None:
    """The device of :data:`DEVICES` that a driver's name is of, or is like; None if there is none."""
    return next((key for key, pattern in _NAMES.items() if pattern.search(name)), None)


def _of_steps(trace: Trace, accumulated: int) -> Trace:
    """A step of several batches, of which the last one exchanges: the others count as work before it."""
    if accumulated == 1:
        return trace
    batch = trace.seconds - trace.optimizer
    return replace(trace, optimizer=trace.optimizer + (accumulated - 1) * batch)


def simulated_as(row: str) -> str | None:
    """A row as the simulator reads it, but without its density; None if there is no prediction for its options."""
    system, options = read(row)
    options.pop("density", None)
    if options.pop("memory", None):  # no time of its own, but the default's wire format depends on it
        options["wire"] = parse_row(row).strategy(None).settings.wire
    pairs = ",".join(f"{option}={value}" for option, value in options.items())
    try:
        return simulated_row(f"{system}[{pairs}]" if pairs else system).name
    except ValueError:
        return None


def turning_point(
    recorded: Recorded, system: str, density: float | None, baseline: str
) -> tuple[float | None, float | None]:
    """Up to which bandwidth of a node's link a system (see :func:`simulated_as`) is faster than another one.

    Returns:
        Bits per second, None where the system is faster at no bandwidth (infinite where it is at all); and what the
        link carries by the calibration, None where that is not measurable.
    """
    costs = recorded.costs
    beta, (nodes, per_node) = costs.link.beta, costs.placed or (costs.workers, 1)
    cluster = Cluster.calibrated(costs, nodes, per_node, jitter=0.0, device=DEVICES[costs.device or "a100"])
    job = SimulatedJob(recorded.trace, cluster, density or 1.0, _ENTRY_BYTES)
    rate = 1e9 * break_even(job, system, baseline)
    return rate or None, 8 / beta if beta else None


def rate_in_words(bits: float) -> str:
    """A rate, as people write it."""
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= size:
            return f"{bits / size:.2g} {unit}" if bits < 100 * size else f"{bits / size:.0f} {unit}"
    return f"{bits / 1e3:.0f} kbit/s"
