"""How trainings differ, in words and in a table; what their files do not say is called unknown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import hypot
from pathlib import Path

import numpy as np

from lightning_safusion.tools.report.metrics_file import FILE, TIMES, Curve, Logged

SENT, EXPOSED, DENSITY, DENSE = (f"safusion/{key}" for key in ("sent_mb", "exposed_ms", "density", "dense_mb"))
UNKNOWN = "unknown"
_SCATTERED = 3  # values from which a mean has a scatter


@dataclass(frozen=True)
class End:
    """The mean of a curve's last values, how many these are, and the standard error of their mean."""

    value: float
    count: int
    error: float


def names(paths: Sequence[Path]) -> list[str]:
    """What tells the runs of these files apart: the parts of their paths that are not common to all."""
    parts = [list((path.parent if path.name == FILE else path.with_suffix("")).resolve().parts) for path in paths]
    for end in (0, -1):
        while min(map(len, parts)) > 1 and len({each[end] for each in parts}) == 1:
            for each in parts:
                del each[end]
    return ["/".join(each) if len(paths) > 1 else each[-1] for each in parts]


def shared(runs: Sequence[Logged]) -> list[str]:
    """The results that the first run and another one have logged; of a single run all."""
    others = [name for run in runs[1:] for name in run.results]
    return [name for name in runs[0].results if name in others or len(runs) == 1]


def ending(curve: Curve, until: int) -> End | None:
    """How a curve ends, up to a step: its last tenth, or five values; None if nothing finite was logged before."""
    values = curve.values[(curve.steps <= until) & np.isfinite(curve.values)]
    if not len(values):
        return None
    last = values[-max(1, len(values) // 10, min(5, len(values) // 4)) :]
    error = float(last.std(ddof=1)) / len(last) ** 0.5 if len(last) > 1 else 0.0
    return End(float(last.mean()), len(last), error)


def remarks(run: Logged, name: str) -> Iterator[str]:
    """What is to be said about one run."""
    after = run.handed_over
    if after is not None:
        yield (
            f"{name} became plain DDP: its figures of the exchange end with step {after:,} of {run.last_step:,}. The "
            "log of the training says by which predictions. SAFusionStrategy(collective='allgather') keeps the "
            "exchange sparse, to look at it."
        )
    for result in run.results:
        curve = run.curves[result]
        wrong = curve.steps[~np.isfinite(curve.values)]
        if len(wrong):
            yield (
                f"{run.path}: {result} is not finite in {len(wrong):,} of {len(curve.steps):,} rows, first in step "
                f"{wrong[0]:,}; these are left out. Where the training has diverged, try a lower learning rate."
            )


def timeless(runs: Sequence[Logged], called: Sequence[str]) -> Iterator[str]:
    """Which runs have no times, and how to have them."""
    silent = [name for run, name in zip(runs, called, strict=True) if run.times is None]
    if silent:
        yield (
            f"When steps ended is unknown in {' and '.join(silent)}. Lightning's ThroughputMonitor logs it under any "
            f"strategy: Trainer({TIMES})."
        )


def differences(first: Logged, other: Logged, a: str, b: str) -> Iterator[str]:
    """How the first run, called ``a``, differs from another, called ``b``."""
    both = shared([first, other])
    for result in both:
        yield _result(result, first.curves[result], other.curves[result], a, b)
    if not both:
        yield (
            f"{a} and {b} have logged nothing under the same name ({', '.join(first.results) or 'nothing'}; "
            f"{', '.join(other.results) or 'nothing'}): log the loss of both under one."
        )
    yield _bytes(first, other, a, b)
    yield _steps(first, other, a, b)
    waits = [(name, run.typical(EXPOSED)) for name, run in ((a, first), (b, other))]
    if any(wait is not None for _, wait in waits):
        said = [f"{_or_unknown(wait, '{:.3g} ms')} in {name}" for name, wait in waits]
        yield f"The backward pass was over and waited for the exchange: {' and '.join(said)} (medians)."


def _result(result: str, first: Curve, other: Curve, a: str, b: str) -> str:
    until = int(min(first.steps[-1], other.steps[-1]))
    one, two = ending(first, until), ending(other, until)
    if one is None or two is None:
        return f"How {result} ended is unknown: {a if one is None else b} has no finite value up to step {until:,}."
    counts = (one.count, two.count)
    means = f"means of the last {' and '.join(map(str, sorted(set(counts))))} values, " if max(counts) > 1 else ""
    values = f"{one.value:.4g} in {a}, {two.value:.4g} in {b} ({means}up to step {until:,})"
    change = one.value - two.value
    if change == 0:
        return f"{result} ended alike: {values}."
    scatter = min(counts) >= _SCATTERED and abs(change) < 2 * hypot(one.error, two.error)
    unclear = " (no clear difference: single values scatter as much)" if scatter else ""
    share = abs(change / two.value) * 100 if two.value else 0.0
    much = f"{share:{',.0f' if share >= 10 else '.2g'}} % " if share else ""
    return f"{result} ended {much}{'lower' if change < 0 else 'higher'} in {a}{unclear}: {values}."


def _bytes(first: Logged, other: Logged, a: str, b: str) -> str:
    mine, theirs = first.mean(SENT), other.mean(SENT)
    if mine is not None and theirs is not None:
        return (
            f"A worker sent {mine:.3g} MB in a step of {a}, {theirs:.3g} MB in one of {b} (means of the logged steps)"
            f"{_fewer(mine, theirs, a, b, 'fewer bytes')}."
        )
    if mine is None and theirs is None:
        return f"What was sent is unknown: neither file has {SENT}, which SAFusionStrategy logs."
    run, name, silent = (first, a, b) if theirs is None else (other, b, a)
    return f"{''.join(sent_alone(run, name))} What {silent} sent is unknown: its file has no {SENT}."


def sent_alone(run: Logged, name: str) -> Iterator[str]:
    """What a run sent, against whole gradients; nothing if that was not logged."""
    sent, dense, last = run.mean(SENT), run.latest(DENSE), run.latest(SENT)
    if sent is None:
        return
    text = f"A worker sent {sent:.3g} MB in a step of {name} (mean of the logged steps)"
    if dense is not None and sent and last:
        text += (
            f", {dense / sent:.3g} times fewer bytes than the {dense:.3g} MB of whole gradients, which DDP hands to "
            f"its all-reduce; at the end {dense / last:.3g} times fewer"
        )
    yield f"{text}."


def _steps(first: Logged, other: Logged, a: str, b: str) -> str:
    mine, theirs = first.step_s, other.step_s
    if mine is None or theirs is None:
        steps = ((a, mine), (b, theirs))
        silent = " and ".join(name for name, step in steps if step is None)
        known = [f"; it took {_ms(step)} in {name}" for name, step in steps if step is not None]
        return f"How long a step took is unknown in {silent}{''.join(known)}."
    ratio = _fewer(mine, theirs, a, b, "shorter")
    return f"A step took {_ms(mine)} in {a}, {_ms(theirs)} in {b} (medians){ratio}."


def _fewer(mine: float, theirs: float, a: str, b: str, what: str) -> str:
    """How many times, and in which run; nothing where there is no difference to speak of, or no ratio."""
    low, high = sorted((mine, theirs))
    return f": {high / low:.3g} times {what} in {a if mine < theirs else b}" if high > 1.005 * low > 0 else ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _or_unknown(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else form.format(value)


def table(runs: Sequence[Logged]) -> list[tuple[str, list[str]]]:
    """Rows of figures: the name of each, and its text in every run."""
    rows: list[tuple[str, str, Callable[[Logged], float | None]]] = [
        ("last step", "{:,.0f}", lambda run: run.last_step),
        ("training without validation", "{:,.1f} s", lambda run: None if run.times is None else run.times.values[-1]),
        ("step, median", "{:.4g} ms", lambda run: None if run.step_s is None else run.step_s * 1e3),
        ("exposed exchange, median", "{:.3g} ms", lambda run: run.typical(EXPOSED)),
        ("sent by a worker in a step, mean", "{:.4g} MB", lambda run: run.mean(SENT)),
        ("sent at the end", "{:.4g} MB", lambda run: run.latest(SENT)),
        ("whole gradients", "{:.4g} MB", lambda run: run.latest(DENSE)),
        ("density at the end", "{:.3%}", lambda run: run.latest(DENSITY)),
    ]
    ends = [(f"{name} at the end", [_end(run, name) for run in runs]) for name in shared(runs)]
    return ends + [(name, [_or_unknown(of(run), form) for run in runs]) for name, form, of in rows]


def _end(run: Logged, name: str) -> str:
    end = ending(run.curves[name], run.last_step) if name in run.curves else None
    return UNKNOWN if end is None else f"{end.value:.4g}"
