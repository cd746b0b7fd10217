"""The trace and the costs of a user's job, recorded in turns of their own, and what the simulator says by them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from lightning_safusion.bench.measure import Rhythm, Run
from lightning_safusion.bench.meeting import Meeting
from lightning_safusion.bench.recorders import EngineRecorder, FloorRecorder, Kept
from lightning_safusion.bench.rows import parse_row
from lightning_safusion.bench.turns import Bench
from lightning_safusion.callbacks.trace_recorder import TraceRecorder
from lightning_safusion.comm.calibrate import calibrate
from lightning_safusion.comm.transport.torch_backend import default_transport
from lightning_safusion.notation import read
from lightning_safusion.simulate.calibration import Calibration, CollectiveSample, CollectiveTimes
from lightning_safusion.simulate.cluster import Cluster
from lightning_safusion.simulate.comparison import break_even
from lightning_safusion.simulate.device import DEVICES
from lightning_safusion.simulate.job import Job as SimulatedJob
from lightning_safusion.simulate.rows import simulated_row
from lightning_safusion.simulate.trace import Trace

#: Rows whose costs are recorded: selection before and after fusion, in buffers that all ranks cut alike.
_AHEAD, _BEHIND, _DENSITY = "saf-inter", "behind", 0.02
_BLOCKS = 7  # of steps: one that does not count, and one for each size of buffers
_TRACED, _SKIPPED = 20, 10  # steps of a trace on a device
_SIZES = tuple(1 << bits for bits in range(10, 27, 2))  # bytes, at which a line of costs is written down
_ENTRY_BYTES = 6.0  # of an entry where nothing was counted: systems have formats of their own
# Devices whose speeds are known, by the names that drivers give them and their like.
_NAMES = {"h100": re.compile("H100|H200|GH200|B200"), "a100": re.compile("A100")}
#: Share of a step below which a gain is none.
WORTH = 0.03


@dataclass(frozen=True)
class Recorded:
    """A job and its costs.

    Args:
        trace: A step of it without any exchange.
        costs: Of the group that ran it, with its hardware.
    """

    trace: Trace
    costs: Calibration

    @property
    def cluster(self) -> Cluster:
        """The cluster that the job ran on, without jitter."""
        nodes, per_node = self.costs.placed or (self.costs.workers, 1)
        return Cluster.calibrated(self.costs, nodes, per_node, jitter=0.0, device=DEVICES[self.costs.device or "a100"])


def record(
    bench: Bench,
    meeting: Meeting,
    make: Callable[[str], Any],
    place: tuple[int, int, bool],
    block: int,
    accumulated: int,
    tick: Callable[[], None],
) -> Recorded | None:
    """Records a job, its trace and its costs. Collective.

    Args:
        bench: The job.
        meeting: Its processes.
        make: A new strategy for a row.
        place: Machines, workers on each, and whether all share one clock.
        block: Steps with buffers of one size.
        accumulated: Batches of a step.
        tick: Called after every step.

    Returns:
        What was recorded on the first process; None on others.
    """
    nodes, per_node, one_clock = place
    if meeting.device.type != "cpu":
        return _record_device(bench, meeting, make, nodes, per_node, accumulated, tick)
    length = _BLOCKS * block

    def turn(row: str, pipe: Kept, recorder: Callback) -> list[Any]:
        bench.turn(f"{row} recorded", make(row), 0, length, tick, recorder, accumulated=False)
        records: list[Any] | None = [None] * meeting.workers if meeting.rank == 0 else None
        dist.gather_object(pipe.record, records)
        return records or []

    kept, sparse = (Kept(), Kept(True), Kept(False)), f"[density={_DENSITY}]"
    floor = turn("no-exchange", kept[0], FloorRecorder(kept[0]))
    ahead = turn(f"{_AHEAD}{sparse}", kept[1], EngineRecorder(kept[1], block, one_clock))
    behind = turn(f"{_BEHIND}{sparse}", kept[2], EngineRecorder(kept[2], block, one_clock))
    if meeting.rank != 0:
        return None
    from lightning_safusion.bench.calibrate import fit_run  # scipy is an extra

    trace, costs = fit_run(Run({}, floor, ahead, behind), Rhythm(block=block), per_node)
    return Recorded(_of_steps(trace, accumulated), costs)


def _record_device(
    bench: Bench,
    meeting: Meeting,
    make: Callable[[str], Any],
    nodes: int,
    per_node: int,
    accumulated: int,
    tick: Callable[[], None],
) -> Recorded | None:
    """On a device events say when gradients are ready, and collectives have costs of their own."""
    recorder = TraceRecorder(None, _TRACED, _SKIPPED)
    row = f"{_AHEAD}[density={_DENSITY}]"
    bench.turn(f"{row} recorded", make(row), 0, _SKIPPED + _TRACED + 2, tick, recorder, accumulated=False)
    transport = default_transport()
    lines = calibrate(transport, meeting.device)
    transport.close()
    if recorder.trace is None:
        return None
    times = {
        name: CollectiveTimes(tuple(CollectiveSample(n, line(n), line.per_byte * n, 0.0, 0.0) for n in _SIZES))
        for name, line in lines.items()
    }
    name = torch.cuda.get_device_name(meeting.device)
    source = f"timed on {meeting.workers} workers ({dist.get_backend()}, {name})"
    costs = Calibration(
        meeting.workers,
        times["allgather"],
        times["allreduce"],
        _ENTRY_BYTES,
        host=None,
        source=source,
        nodes=nodes,
        per_node=per_node,
        device=known_device(name),
    )
    return Recorded(_of_steps(recorder.trace, accumulated), costs)


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
    """Up to which bandwidth of a node's link a system is faster than another one, by simulation.

    Args:
        recorded: The job.
        system: As :func:`simulated_as` has it.
        density: Of the system; None: it has none.
        baseline: Name of the other one.

    Returns:
        Bits per second, None where the system is faster at no bandwidth (infinite where it is at all); and what the
        link carries by the calibration, None where that is not measurable.
    """
    beta = recorded.costs.link.beta
    job = SimulatedJob(recorded.trace, recorded.cluster, density or 1.0, _ENTRY_BYTES)
    rate = 1e9 * break_even(job, system, baseline)
    return rate or None, 8 / beta if beta else None


def rate_in_words(bits: float) -> str:
    """A rate, as people write it."""
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= size:
            return f"{bits / size:.2g} {unit}" if bits < 100 * size else f"{bits / size:.0f} {unit}"
    return f"{bits / 1e3:.0f} kbit/s"
