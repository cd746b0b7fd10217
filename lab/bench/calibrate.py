"""Fits the simulator's costs and trace to what was recorded on the workers and links of a benchmark."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from statistics import median

import numpy as np
from scipy.optimize import isotonic_regression, nnls

from lab.bench.measure import Rhythm, Run
from lab.bench.recorders import EngineStep, FloorRecord, FloorStep
from lab.clock.cores import mean_iteration
from lab.clock.costs import Host, HostCluster, HostCosts, QueuedSample, QueuedTimes, StageCost, planned_costs
from lightning_safusion.callbacks.trace_recorder import StepTimes, build_trace
from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.profiling.trace import Trace
from lightning_safusion.tools.plan.calibration import Calibration
from lightning_safusion.tools.plan.schedule import Schedule

_HALVINGS = 7  # of the interval in which the share of sleep is sought
_NORMAL_IQR = 1.349  # interquartile range of Gaussian noise over its standard deviation


def fit_run(run: Run, rhythm: Rhythm) -> tuple[Trace, HostCosts]:
    """The trace and the costs of a run that has recorded them: workers stand for machines, and share the cores of one.

    Left out are the first block, in which connections are opened and orders learnt, and the first step of every other
    one, which meets the caches and the network as another team left them.

    Args:
        run: The run.
        rhythm: Of its steps.

    Raises:
        RuntimeError: If no buffer was sparse.
    """

    def counts(number: int) -> bool:
        return number >= rhythm.block and number % rhythm.block > 0

    idle = [[step for number, step in enumerate(record.steps) if counts(number)] for record in run.floor]
    ahead, behind = ([s for each in ranks for s in each.steps if counts(s.number)] for ranks in (run.ahead, run.behind))
    source = (
        f"recorded on {len(idle)} workers (gloo, cpu): medians of {len(idle[0])} steps without any exchange, "
        f"costs of the engine in {len(ahead) // len(idle)} steps, collectives timed alone and in queues"
    )
    costs = _fit_costs(idle, ahead, behind, run.ahead[0].collectives, source)
    trace = _fit_trace(run.floor[0], [step for steps in idle for step in steps], source)
    return trace, replace(costs, host=replace(costs.host, asleep=_asleep(trace, costs)))


def _asleep(trace: Trace, costs: HostCosts) -> float:
    """Share of the time without a core that the job sleeps: with it the simulated step without exchange is the
    recorded one, in which workers have waited for each other's cores."""
    schedule = Schedule([], engine=False)
    cluster = HostCluster.of(costs, costs.calibration.workers)
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        at = replace(cluster, host=replace(costs.host, asleep=middle))
        if mean_iteration(trace, at, schedule).seconds < trace.seconds:
            low = middle
        else:
            high = middle
    return high


def _fit_trace(record: FloorRecord, steps: Sequence[FloorStep], source: str) -> Trace:
    """The job without any exchange: medians over the steps of all ranks."""
    times = [
        StepTimes(
            np.diff(step.ready[:, 0], prepend=0.0).clip(0.0),
            {layer: float(seconds) for layer, (seconds, _) in step.layers.items()},
            float(step.rest[0]),
        )
        for step in steps
    ]
    return build_trace(record.name, record.layout, times, source)


def _fit_costs(
    idle: Sequence[Sequence[FloorStep]],
    ahead: Sequence[EngineStep],
    behind: Sequence[EngineStep],
    collectives: Mapping[str, QueuedTimes],
    source: str,
) -> HostCosts:
    """What the engine and its collectives cost, from steps without any exchange of each rank, and from steps with
    selection before and after fusion of all ranks. All were made in the same minutes."""
    ahead, behind = ([step for step in steps if step.buffers] for steps in (ahead, behind))
    if not ahead or not behind:
        raise RuntimeError("nothing to calibrate: no buffer was sparse. Give a density below 1.")
    workers, both = len(idle), [*ahead, *behind]
    buffers = [buffer for step in both for buffer in step.buffers]
    parts = [np.array([step.parts for step in steps]) for steps in idle]
    medians = np.median(np.concatenate(parts), axis=0)  # of forward, backward and rest: seconds, and those with a core
    _, idle_backward, idle_rest = medians[:, 1].tolist()
    forward, backward, rest = np.minimum(1.0, medians[:, 1] / medians[:, 0]).tolist()
    hooks, drains = [], []
    for step in both:
        # the last buffer is selected from after the last gradient
        *early, last = [buffer.select for buffer in step.buffers]
        decode = sum(buffer.decode for buffer in step.buffers)
        hooks.append((len(step.buffers), step.backward - sum(early) - idle_backward))
        drains.append((len(step.buffers), step.drain + step.rest - decode - last - idle_rest))
    hook_fixed, hook_buffer = _fit(hooks)
    host = Host(
        float(os.cpu_count() or 1) / workers,
        forward,
        backward,
        rest,
        hook=hook_fixed / sum(buffer.tensors for buffer in both[0].buffers),
        ahead=_fit_stage([[(b.tensors, b.elements, b.select) for b in s.buffers] for s in ahead], hook_buffer),
        behind=_fit_stage([[(b.tensors, b.elements, b.select) for b in s.buffers] for s in behind], hook_buffer),
        decode=_fit_stage([[(b.tensors, workers * b.entries, b.decode) for b in s.buffers] for s in both]),
        drain=LinearCost(*_fit(drains)),
    )
    calibration = Calibration(
        workers,
        _in_job(_rising(collectives["allgather"]), both),
        _rising(collectives["allreduce"]),
        sum(buffer.nbytes for buffer in buffers) / sum(buffer.entries for buffer in buffers),
        **planned_costs(host),
        jitter=_jitter([each.sum(axis=1)[:, 0] for each in parts]),
        source=source,
        nodes=workers,
        per_node=1,
    )
    return HostCosts(calibration, host)


def _in_job(times: QueuedTimes, steps: Sequence[EngineStep]) -> QueuedTimes:
    """The times with the processor time that the collectives of the steps have taken, rather than those timed alone:
    waking up costs less where threads and caches are warm."""
    timed = [sum(times.at(buffer.nbytes).processor_queued for buffer in step.buffers) for step in steps]
    scale = median(max(0.0, step.others) / alone for step, alone in zip(steps, timed, strict=True) if alone > 0)
    seconds = [scale * sample.processor_queued for sample in times.samples]
    rows = zip(times.samples, seconds, strict=True)
    return QueuedTimes(tuple(replace(s, processor=each, processor_queued=each) for s, each in rows))


def _rising(times: QueuedTimes) -> QueuedTimes:
    """The times in which more bytes never take less, closest in squares."""
    rows = np.array([astuple(sample) for sample in times.samples], np.float64)
    columns = [isotonic_regression(column).x for column in rows.T[1:]]
    return QueuedTimes(
        tuple(QueuedSample(int(nbytes), *values) for nbytes, *values in zip(rows[:, 0], *columns, strict=True))
    )


def _jitter(steps: Sequence[np.ndarray]) -> float:
    """Relative standard deviation of a worker's step, by its quartiles: a few disturbed steps count little.

    Args:
        steps: Seconds of the steps of each rank.
    """
    low, high = np.quantile(np.concatenate([seconds / np.median(seconds) for seconds in steps]), (0.25, 0.75))
    return float(high - low) / _NORMAL_IQR


def _fit_stage(windows: Sequence[Sequence[tuple[int, int, float]]], besides: float = 0.0) -> StageCost:
    """What a stage costs, scaled so that it gives the median of the sums over windows: where times have long tails, the
    sum over the buffers of a window is larger than the fit.

    Args:
        windows: Tensors, elements and seconds of each buffer.
        besides: Seconds that each buffer costs besides.
    """
    cost = StageCost(*_fit([buffer for window in windows for buffer in window]))
    fitted = [sum(cost(tensors, elements) for tensors, elements, _ in window) for window in windows]
    ratios = [sum(row[2] for row in window) / total for window, total in zip(windows, fitted, strict=True) if total > 0]
    scale = median(ratios) if ratios else 1.0
    return StageCost(cost.fixed * scale + besides, cost.per_tensor * scale, cost.per_element * scale)


def _fit(samples: Sequence[tuple[float, ...]]) -> list[float]:
    """A constant and a cost of each size, at least 0, by least squares of the relative error.

    Args:
        samples: Sizes and, last, seconds; of equal sizes the median counts.
    """
    seconds = defaultdict(list)
    for *sizes, taken in samples:
        seconds[tuple(sizes)].append(taken)
    rows = np.array([(1.0, *sizes, median(taken)) for sizes, taken in seconds.items()], np.float64)
    rows = rows[rows[:, -1] > 0]
    if not len(rows):
        return [0.0] * (rows.shape[1] - 1)
    solution: np.ndarray = nnls(rows[:, :-1] / rows[:, -1:], np.ones(len(rows)))[0]
    return solution.tolist()
