"""What the demo's trainings have reported: a table, what it says in words, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import sqrt
from statistics import fmean, median
from typing import TYPE_CHECKING

from rich.table import Table

from lightning_safusion.systems import DEFAULT
from lightning_safusion.tools.tables import RowName, plain_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The row that others are compared with.
BASELINE = "ddp"
_SHORTER = 0.95  # of the default's time: a row that takes less is named


@dataclass(frozen=True)
class Step:
    """One step of the first worker."""

    loss: float
    seconds: float  # from its batch to the end of the optimizer
    bytes_sent: float  # by its connections; 0 where the kernel does not say
    missing: float  # share of the gradient tensors of which nothing was sent


@dataclass
class History:
    """All that one row has reported."""

    system: str
    title: str  # in the table
    steps: list[Step] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)  # after each epoch; all epochs have as many steps

    def usual(self, figure: str) -> float:
        """Median of a figure over the last quarter of the steps: the first ones of some systems send more."""
        return median(getattr(step, figure) for step in self.steps[3 * len(self.steps) // 4 :])

    def total(self, figure: str) -> float:
        """Sum of a figure over all steps."""
        return sum(getattr(step, figure) for step in self.steps)

    @property
    def missing(self) -> float:
        """Share of all (tensor, step) pairs in which no element of the tensor was sent."""
        return fmean(step.missing for step in self.steps)

    def epoch_ends(self) -> list[float]:
        """Seconds of training at the end of each epoch."""
        seconds = list(accumulate(step.seconds for step in self.steps))
        per_epoch = len(seconds) // len(self.accuracies)
        return seconds[per_epoch - 1 :: per_epoch]

    def seconds_to(self, accuracy: float) -> float | None:
        """Seconds of training until an epoch ended with this accuracy; None if none did."""
        reached = zip(self.epoch_ends(), self.accuracies, strict=True)
        return next((end for end, each in reached if each >= accuracy), None)


@dataclass(frozen=True)
class Comparison:
    """Rows beside each other."""

    histories: Sequence[History]  # one or more
    images: int  # that each accuracy counts

    @property
    def baseline(self) -> History:
        """DDP, or the first row where there is none."""
        return next((each for each in self.histories if each.system == BASELINE), self.histories[0])

    @property
    def noise(self) -> float:
        """Differences in accuracy below this say nothing: two standard errors of the difference of two shares."""
        share = min(self.baseline.accuracies[-1], 1 - 1 / self.images)
        return 2 * sqrt(2 * share * (1 - share) / self.images)

    @property
    def target(self) -> float:
        """The lowest accuracy that cannot be told from the baseline's final one."""
        return self.baseline.accuracies[-1] - self.noise

    def table(self, title: str) -> Table:
        """One row per system."""
        table = plain_table(
            title,
            "Sent: by one worker. Step and sent: medians of the last quarter of the steps. Missing: gradient tensors "
            f"of which a worker sent nothing in a step. {self.target:.1%}: final accuracy of {self.baseline.title}, "
            "less what is noise.",
            "system",
            ("step\nms", "sent\nkB/step", "tensors\nmissing", "all\nsteps, s")
            + (f"until\n{self.target:.1%}, s", "final\naccuracy"),
        )
        for history in self.histories:
            until = history.seconds_to(self.target)
            table.add_row(
                RowName(history.title),
                f"{history.usual('seconds') * 1e3:.1f}",
                f"{sent / 1e3:,.1f}" if (sent := history.usual("bytes_sent")) else "unknown",
                f"{history.missing:.1%}",
                f"{history.total('seconds'):.1f}",
                "never" if until is None else f"{until:.1f}",
                f"{history.accuracies[-1]:.1%}",
            )
        return table

    def conclusions(self) -> list[str]:
        """What the table says about the default, in sentences; nothing where it was not asked for."""
        ours, base = next((each for each in self.histories if each.system == DEFAULT), None), self.baseline
        if ours is None or ours is base:
            return []
        step = _speed(base.usual("seconds"), ours.usual("seconds"))
        whole = _speed(base.total("seconds"), ours.total("seconds"))
        said = [
            f"With {ours.title} a step takes {ours.usual('seconds') * 1e3:.0f} ms, with {base.title} "
            f"{base.usual('seconds') * 1e3:.0f} ms: {step}. All steps, of which the first ones send more: {whole}. "
            f"Until {self.target:.1%}: {_speed(base.seconds_to(self.target), ours.seconds_to(self.target))}."
        ]
        if base.usual("bytes_sent"):
            sent = ours.usual("bytes_sent") / base.usual("bytes_sent")
            all_sent = ours.total("bytes_sent") / base.total("bytes_sent")
            said.append(f"It sends {sent:.1%} of the bytes of {base.title}, over all steps {all_sent:.1%}.")
        fastest = min(self.histories, key=lambda each: each.total("seconds"))
        if fastest.total("seconds") < _SHORTER * ours.total("seconds"):
            said.append(f"Faster still: {fastest.title}, {fastest.total('seconds'):.1f} s for all steps.")
        difference = ours.accuracies[-1] - base.accuracies[-1]
        noise = "noise" if abs(difference) < self.noise else "more than noise"
        said.append(
            f"Its final accuracy differs by {difference * 100:+.1f} points, which is {noise}: of {self.images} images, "
            f"differences below {self.noise * 100:.1f} points say nothing."
        )
        return said

    def plot(self) -> Figure:
        """Draws validation accuracy over time, and the time of a step, a line and a bar for each row."""
        from matplotlib.figure import Figure  # an extra: only where something is drawn
        from matplotlib.ticker import PercentFormatter

        figure = Figure(figsize=(11, 4.5), layout="constrained")
        curves, bars = figure.subplots(1, 2, width_ratios=(3, 2))
        for history in self.histories:
            (line,) = curves.plot(history.epoch_ends(), history.accuracies, ".-", label=history.title)
            bar = bars.barh(history.title, history.usual("seconds") * 1e3, color=line.get_color())
            bars.bar_label(bar, fmt="%.0f", padding=3)
        label = f"final accuracy of {self.baseline.title}, less noise"
        curves.axhline(self.target, linestyle=":", color="grey", label=label)
        # the first epochs would squeeze the differences that matter into a line
        lowest = min(min(history.accuracies[len(history.accuracies) // 4 :]) for history in self.histories)
        curves.set(xlabel="seconds of training", ylabel="validation accuracy", ylim=(max(0.0, lowest - 0.03), 1.0))
        curves.set_xlim(left=0)
        curves.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        curves.legend(loc="lower right", fontsize="small")
        curves.grid(alpha=0.3)
        bars.invert_yaxis()
        bars.set(xlabel="ms of a step")
        bars.spines[["top", "right"]].set_visible(False)
        return figure


def _speed(base: float | None, ours: float | None) -> str:
    if base is None or ours is None:
        return "never"
    return f"{base / ours:.1f} times as fast" if ours <= base else f"{ours / base:.1f} times as long"
