"""The file ``metrics.csv`` of a training, as Lightning's CSVLogger writes it: what was logged, by step and by time."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import nan
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

FILE = "metrics.csv"
#: What adds times to the file, whatever the strategy.
TIMES = "callbacks=[ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]))]"

_TIME = re.compile(r"(.*\W)?train\W+time$")  # ThroughputMonitor's, whose separator is an option
# Columns that are no result: of this package, of ThroughputMonitor, of LearningRateMonitor.
_ASIDE = re.compile(
    r"step$|epoch$|safusion/|lr-|(train|validate)\W+(device\W+)?(time|batches|samples|lengths|items|flops|mfu)(_per_sec)?$"
)


@dataclass(frozen=True, eq=False)
class Curve:
    """A logged value over steps."""

    steps: np.ndarray  # int64 [N], in order
    values: np.ndarray  # float64 [N]; NaN and infinite where that was logged


@dataclass(frozen=True, eq=False)
class Logged:
    """What a training has logged."""

    path: Path  # of the file
    curves: Mapping[str, Curve]  # by column, without those that are empty or hold text

    @property
    def results(self) -> list[str]:
        """Names of what the training logged of itself: losses first."""
        names = [name for name in self.curves if not _ASIDE.match(name)]
        return sorted(names, key=lambda name: ("loss" not in name.lower(), name))

    @property
    def last_step(self) -> int:
        """The last step of which anything was logged."""
        return int(max(curve.steps[-1] for curve in self.curves.values()))

    @cached_property
    def times(self) -> Curve | None:
        """Seconds of training since it began, validation left out; None if they were not logged, or stand still."""
        known = next((self.curves[name] for name in sorted(self.curves) if _TIME.match(name)), None)
        return None if known is None or (np.diff([known.steps, known.values]) <= 0).any() else known

    def seconds(self, steps: np.ndarray) -> np.ndarray:
        """float64: when these steps ended; NaN where that is not known.

        Between two steps that are known, and one interval beyond the last, times lie on a straight line.
        """
        if self.times is None or len(self.times.steps) < 2:
            return np.full(len(steps), nan)
        known, values = (np.append(each, 2 * each[-1] - each[-2]) for each in (self.times.steps, self.times.values))
        return np.interp(steps, known, values, left=nan, right=nan)

    @property
    def step_s(self) -> float | None:
        """Seconds of a step: the median between two logged times, else what OverlapProfiler logged."""
        times = self.times
        if times is not None and len(times.steps) > 1:
            return float(np.median(np.diff(times.values) / np.diff(times.steps)))
        return self.typical("safusion/step_s")

    def typical(self, name: str) -> float | None:
        """The median of a column; None if nothing finite was logged."""
        return self._finite(name, np.median)

    def mean(self, name: str) -> float | None:
        """The mean of a column; None if nothing finite was logged."""
        return self._finite(name, np.mean)

    def latest(self, name: str) -> float | None:
        """The last finite value of a column; None if there is none."""
        return self._finite(name, itemgetter(-1))

    def _finite(self, name: str, figure: Callable[[np.ndarray], Any]) -> float | None:
        values = self.curves[name].values if name in self.curves else np.zeros(0)
        finite = values[np.isfinite(values)]
        return float(figure(finite)) if len(finite) else None

    @property
    def handed_over(self) -> int | None:
        """The step after which plain DDP exchanged the gradients, to the nearest logged one; None if none is seen.

        The strategy logs with the training step: from then on rows of the step go on without its figures.
        """
        sent = self.curves.get("safusion/sent_mb")
        if sent is None:
            return None
        beside = [self.curves[name] for name in self.results]
        ends = [int(each.steps[-1]) for each in beside if np.isin(sent.steps, each.steps).all()]
        last = int(sent.steps[-1])
        return last if max(ends, default=last) > last else None


def find_metrics(run: Path) -> Path | None:
    """The file of a run: given itself, its folder, or ``safusion`` in its folder; None if there is none."""
    if run.is_file():
        return run if run.suffix == ".csv" else None
    folders = (run, *([run.parent] if run.name == "safusion" else []))
    return next((folder / FILE for folder in folders if (folder / FILE).is_file()), None)


def read_metrics(path: Path) -> Logged:
    """Reads the file; a ValueError says what is wrong with it, and what to do."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as CSV ({error}): give {FILE} of Lightning's CSVLogger") from error
    if rows and "step" not in rows[0]:
        raise ValueError(f"{path} has no column 'step': give {FILE} of Lightning's CSVLogger")
    if len(rows) < 2:
        raise ValueError(
            f"{path} has {'one row' if rows else 'no rows'}, and a curve needs two: let the training run on (CSVLogger "
            "writes every 100 steps and at the end), or log more often, with Trainer(log_every_n_steps=...)"
        )
    try:
        steps = np.array([int(float(row["step"])) for row in rows])
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"{path} has a row without a step ({error}): it is damaged, train again") from error
    curves = {name: _curve(steps, [row[name] for row in rows]) for name in reader.fieldnames or () if name}
    return Logged(path, {name: curve for name, curve in curves.items() if curve is not None})


def _curve(steps: np.ndarray, cells: Sequence[str | None]) -> Curve | None:
    """The column of these cells; None if it is empty or holds text."""
    places = [place for place, cell in enumerate(cells) if cell]
    try:
        values = np.array([float(cells[place] or nan) for place in places])
    except ValueError:
        return None
    order = np.argsort(steps[places], kind="stable")
    return Curve(steps[places][order], values[order]) if places else None
