"""Fits what the simulator needs to know to what was recorded on the workers and links of a benchmark."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np
import torch
from scipy.optimize import isotonic_regression, nnls

from lightning_safusion.bench.recorders import EngineStep, FloorRecord, FloorStep
from lightning_safusion.bench.session import Rhythm, Run
from lightning_safusion.callbacks.trace_recorder import StepTimes, build_trace
from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.fusion.layout import Layout, TensorSpec
from lightning_safusion.simulate.calibration import Calibration
from lightning_safusion.simulate.engine import mean_iteration
from lightning_safusion.simulate.measured import CollectiveSample, CollectiveTimes, Host, StageCost
from lightning_safusion.simulate.schedule import Planned, Schedule
from lightning_safusion.simulate.trace import Trace

_HALVINGS = 7  # of the interval in which the share of sleep is sought
_NORMAL_IQR = 1.349  # interquartile range of Gaussian noise over its standard deviation


def fit_run(run: Run, rhythm: Rhythm) -> tuple[Trace, Calibration]:
    """The trace and the costs of a run that has recorded them.

    Left out are the first block, in which connections are opened and orders learnt, and the first step of every other
    one, which meets the caches and the network as another team left them.
    """
    block = rhythm.block
    idle = [
        replace(each, steps=tuple(step for number, step in enumerate(each.steps) if _counts(number, block)))
        for each in run.floor
    ]
    ahead, behind = (
        [s for each in records for s in each.steps if _counts(s.number, block)] for records in (run.ahead, run.behind)
    )
    source = (
        f"recorded on {len(idle)} workers (gloo, cpu): medians of {len(idle[0].steps)} steps without any exchange, "
        f"costs of the engine in {len(ahead) // len(idle)} steps, collectives timed alone and in queues"
    )
    costs = fit_calibration(idle, ahead, behind, run.ahead[0].collectives, float(os.cpu_count() or 1), source)
    trace = recorded_trace(idle, source)
    return trace, replace(costs, host=replace(costs.host, asleep=_asleep(trace, costs)))


def _asleep(trace: Trace, costs: Calibration) -> float:
    """Share of the time without a core that the job sleeps: with it the simulated step without exchange is the
    recorded one, in which workers have waited for each other's cores."""
    schedule = Schedule(Planned(()), (0.0,) * len(trace.tensors), engine=False)
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        cluster = costs.cluster(costs.workers)
        cluster = replace(cluster, host=replace(costs.host, asleep=middle))
        if mean_iteration(trace, cluster, schedule).seconds < trace.seconds:
            low = middle
        else:
            high = middle
    return high


def _counts(number: int, block: int) -> bool:
    return number >= block and number % block > 0


def recorded_trace(records: Sequence[FloorRecord], source: str) -> Trace:
    """The job without any exchange: medians over the steps of all ranks, without those that do not count."""
    specs = tuple(
        TensorSpec(name, index, shape, int(np.prod(shape)), torch.float32)
        for index, (name, shape) in enumerate(records[0].tensors)
    )
    times = [
        StepTimes(
            np.diff([moment.seconds for moment in step.ready], prepend=0.0).clip(0.0),
            {layer: moment.seconds for layer, moment in step.layers.items()},
            step.rest.seconds,
        )
        for record in records
        for step in record.steps
    ]
    return build_trace(records[0].name, Layout(specs), times, source)


def fit_calibration(
    floor: Sequence[FloorRecord],
    ahead: Sequence[EngineStep],
    behind: Sequence[EngineStep],
    collectives: Mapping[str, CollectiveTimes],
    cores: float,
    source: str,
) -> Calibration:
    """What the engine and its collectives cost. All steps were made in the same minutes; those of all ranks together.

    Args:
        floor: Of each rank, steps without any exchange.
        ahead: Steps with selection before fusion.
        behind: Steps with selection after fusion.
        collectives: Of the group.
        cores: Of the machine that all workers share.
        source: Where all of that comes from, in words.

    Raises:
        RuntimeError: If no buffer was sparse.
    """
    workers, idle = len(floor), [step for record in floor for step in record.steps]
    ahead, behind = ([step for step in steps if step.buffers] for steps in (ahead, behind))
    if not ahead or not behind:
        raise RuntimeError("nothing to calibrate: no buffer was sparse. Give a density below 1.")
    both = [*ahead, *behind]
    tensors = sum(buffer.tensors for buffer in both[0].buffers)
    hooks = _fit_hooks(both, median(step.ready[-1].processor for step in idle))
    forward, backward, rest = (_share(idle, part) for part in ("forward", "backward", "rest"))
    host = Host(
        cores / workers,
        forward,
        backward,
        rest,
        hook=hooks.fixed / tensors,
        ahead=_fit_stage([[(b.tensors, b.elements, b.select) for b in s.buffers] for s in ahead], hooks.per_byte),
        behind=_fit_stage([[(b.tensors, b.elements, b.select) for b in s.buffers] for s in behind], hooks.per_byte),
        decode=_fit_stage([[(b.tensors, workers * b.entries, b.decode) for b in step.buffers] for step in both]),
        drain=_fit_drain(both, median(step.rest.processor for step in idle)),
    )
    buffers = [buffer for step in both for buffer in step.buffers]
    return Calibration(
        workers,
        _in_job(_rising(collectives["allgather"]), both),
        _rising(collectives["allreduce"]),
        sum(buffer.nbytes for buffer in buffers) / sum(buffer.entries for buffer in buffers),
        host,
        _jitter(floor),
        source,
    )


def _in_job(times: CollectiveTimes, steps: Sequence[EngineStep]) -> CollectiveTimes:
    """The times with the processor time that the collectives of the steps have taken, rather than those timed alone:
    waking up costs less where threads and caches are warm."""
    said = [sum(times.at(buffer.nbytes).processor_queued for buffer in step.buffers) for step in steps]
    taken = [max(0.0, step.process - step.thread) for step in steps]
    scale = median(took / expected for took, expected in zip(taken, said, strict=True) if expected > 0)
    seconds = [scale * sample.processor_queued for sample in times.samples]
    rows = zip(times.samples, seconds, strict=True)
    return CollectiveTimes(tuple(replace(s, processor=each, processor_queued=each) for s, each in rows))


def _rising(times: CollectiveTimes) -> CollectiveTimes:
    """The times in which more bytes never take less, closest in squares."""
    columns = {
        name: isotonic_regression([getattr(sample, name) for sample in times.samples]).x.tolist()
        for name in ("alone", "queued", "processor", "processor_queued")
    }
    rows = zip(times.samples, *columns.values(), strict=True)
    return CollectiveTimes(tuple(CollectiveSample(sample.nbytes, *values) for sample, *values in rows))


def _share(steps: Sequence[FloorStep], part: str) -> float:
    """Share of the time of a part of the step for which the thread had a core."""

    def of(step: FloorStep, field: int) -> float:
        if part == "rest":
            return step.rest[field]
        return step.ready[-1][field] if part == "backward" else sum(layer[field] for layer in step.layers.values())

    return min(1.0, median(of(step, 1) for step in steps) / median(of(step, 0) for step in steps))


def _jitter(records: Sequence[FloorRecord]) -> float:
    """Relative standard deviation of a worker's step, by its quartiles: a few disturbed steps count little."""
    relative: list[float] = []
    for record in records:
        seconds = np.array([step.whole.seconds for step in record.steps])
        relative += (seconds / np.median(seconds)).tolist()
    low, high = np.quantile(relative, (0.25, 0.75))
    return float(high - low) / _NORMAL_IQR


def _fit_hooks(steps: Sequence[EngineStep], idle: float) -> LinearCost:
    """What backward passes cost more than without the engine besides selection, by the number of buffers."""
    # the last buffer is selected from after the last gradient
    return _fit_buffers([(s, s.backward - sum(buffer.select for buffer in s.buffers[:-1]) - idle) for s in steps])


def _fit_drain(steps: Sequence[EngineStep], idle: float) -> LinearCost:
    """What the end of a window and of the step cost more than without the engine, by the number of buffers."""
    decodes = [sum(buffer.decode for buffer in step.buffers) for step in steps]
    rows = zip(steps, decodes, strict=True)
    return _fit_buffers([(s, s.drain + s.rest - decode - s.buffers[-1].select - idle) for s, decode in rows])


def _fit_buffers(costs: Sequence[tuple[EngineStep, float]]) -> LinearCost:
    """Seconds of steps by the number of their buffers: medians, and the line through them."""
    seconds = defaultdict(list)
    for step, taken in costs:
        seconds[len(step.buffers)].append(taken)
    fixed, each = _fit_positive(np.array([(1.0, float(buffers), median(each)) for buffers, each in seconds.items()]))
    return LinearCost(fixed, each)


def _fit_stage(windows: Sequence[Sequence[tuple[int, int, float]]], besides: float = 0.0) -> StageCost:
    """What a stage costs, scaled so that it says the median of what windows take in all: the sum over buffers is larger
    than the fit where times have long tails.

    Args:
        windows: Tensors, elements and seconds of each buffer.
        besides: Seconds that each buffer costs besides.
    """
    seconds = defaultdict(list)
    for window in windows:
        for tensors, elements, taken in window:
            seconds[(tensors, elements)].append(taken)
    rows = [(1.0, float(tensors), float(elements), median(each)) for (tensors, elements), each in seconds.items()]
    cost = StageCost(*_fit_positive(np.array(rows)))
    said = [sum(cost(tensors, elements) for tensors, elements, _ in window) for window in windows]
    ratios = [sum(row[2] for row in window) / total for window, total in zip(windows, said, strict=True) if total > 0]
    scale = median(ratios) if ratios else 1.0
    return StageCost(cost.fixed * scale + besides, cost.per_tensor * scale, cost.per_element * scale)


def _fit_positive(rows: np.ndarray) -> list[float]:
    """Least squares of the relative error with coefficients of at least 0; the last column is the sum [m, k + 1]."""
    rows = rows[rows[:, -1] > 0]
    if not len(rows):
        return [0.0] * (rows.shape[1] - 1)
    solution: np.ndarray = nnls(rows[:, :-1] / rows[:, -1:], np.ones(len(rows)))[0]
    return solution.tolist()
