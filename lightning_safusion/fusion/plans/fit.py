"""Cost lines from the samples of a training run, which are noisy and of few sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from lightning_safusion.comm.cost import LinearCost, fit_linear
from lightning_safusion.fusion.plans.plan import CollectiveName

Samples = Sequence[tuple[float, float]]

_FITTED: tuple[CollectiveName, ...] = ("allgather", "allreduce")
_MOST_LATENCY = 2.0  # fixed cost of a fitted line over the one known before
_LEAST_LATENCY = 0.1  # of the prior: what a known fixed cost counts for at least
_LEAST = 0.5  # of what was calibrated, for a collective of which there are no samples


def fit_or_scale(samples: Iterable[tuple[float, float]], shape: LinearCost) -> LinearCost | None:
    """Fits a line to the medians per size.

    A plan has a handful of buffers, at worst one: sizes that are too alike to tell the fixed cost from the slope (less
    than a factor of 2 apart), or from which no rise can be seen, scale a known line instead.

    Args:
        samples: ``(bytes or elements, seconds)``, finite and not negative.
        shape: The line to scale.

    Returns:
        The line, ``None`` without samples.
    """
    by_size: dict[float, list[float]] = {}
    for size, seconds in samples:
        by_size.setdefault(size, []).append(seconds)
    if not by_size:
        return None
    # Disturbances only ever lengthen a measurement, so the mean would follow them.
    medians = [(size, float(np.median(by_size[size]))) for size in sorted(by_size)]
    if len(medians) > 1 and medians[-1][0] >= 2 * medians[0][0]:
        line = fit_linear(medians)
        if line.per_byte > 0:
            return line
    ratios = [seconds / shape(size) for size, seconds in medians if shape(size) > 0]
    factor = float(np.median(ratios)) if ratios else 1.0
    return LinearCost(factor * shape.fixed, factor * shape.per_byte)


def fit_exchanges(
    samples: Mapping[CollectiveName, Samples],
    prior: Mapping[str, LinearCost],
    known: Mapping[str, LinearCost] | None = None,
) -> tuple[LinearCost, LinearCost]:
    """Costs of the all-gather and of the all-reduce.

    Args:
        samples: ``(bytes, seconds)`` of each collective; empty for one that was not used.
        prior: Both lines, from a calibration or a model.
        known: Both lines as fitted before, whose shape samples of one size alone then scale; None takes that of
            ``prior``.
    """
    shape = known or prior
    lines = {name: fit_or_scale(samples[name], shape[name]) for name in _FITTED}
    if known is not None:
        lines = {name: _with_latency_of(known[name], prior[name], line, samples[name]) for name, line in lines.items()}
    allgather, allreduce = (lines[name] for name in _FITTED)
    return (
        allgather or _transferred(prior["allgather"], allreduce, prior["allreduce"]),
        allreduce or _transferred(prior["allreduce"], allgather, prior["allgather"]),
    )


def _with_latency_of(
    known: LinearCost, prior: LinearCost, line: LinearCost | None, samples: Samples
) -> LinearCost | None:
    """The line, if its fixed cost is at most twice the known one; else the line of that fixed cost through the samples.

    The rate of a link can fall to a tenth, its latency does not rise tenfold. The samples of a plan with few buffers
    hardly tell one from the other, and a planner that takes a slow link for a slow start makes fewer buffers where it
    should make more.
    """
    most = _MOST_LATENCY * max(known.fixed, _LEAST_LATENCY * prior.fixed)  # noise can make a known one nothing
    if line is None or line.fixed <= most:
        return line
    slopes = sorted(((seconds - most) / size, size) for size, seconds in samples if size > 0 and seconds > most)
    if not slopes:
        return line
    # the median by bytes: what disturbs a small message says little of the rate
    passed = np.cumsum([size for _, size in slopes])
    return LinearCost(most, slopes[int(np.searchsorted(passed, passed[-1] / 2))][0])


def _transferred(prior: LinearCost, measured: LinearCost | None, expected: LinearCost) -> LinearCost:
    """``prior`` of a collective that was not used, corrected as the used one was: latency and bandwidth apart.

    The samples of a plan with few buffers hardly tell one from the other, so that either can seem to cost nothing; an
    all-reduce of a whole model would too.
    """
    if measured is None:
        return prior
    fixed = measured.fixed / expected.fixed if expected.fixed > 0 else 1.0
    per_byte = measured.per_byte / expected.per_byte if expected.per_byte > 0 else 1.0
    return LinearCost(max(fixed, _LEAST) * prior.fixed, max(per_byte, _LEAST) * prior.per_byte)
