"""What the demo's trainings have reported, as a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING

from rich.table import Table

from lightning_safusion.tools.tables import RowName, plain_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class History:
    """All that one row has reported.

    Args:
        system: The row.
        steps: Figures of each step of the first worker: ``loss``, ``seconds``, ``exposed_s`` (of them, spent on nothing
            but the exchange), ``bytes_sent``, ``density``, ``tensors`` and ``tensors_missing``.
        accuracies: On the validation images after each epoch.
    """

    system: str
    steps: list[dict[str, float]] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)

    @property
    def missing_share(self) -> float:
        """Share of all (tensor, step) pairs in which no element of the tensor was sent."""
        return sum(step["tensors_missing"] for step in self.steps) / sum(step["tensors"] for step in self.steps)

    def median(self, figure: str) -> float:
        """Median of a figure of the steps; the first one opens connections, and a system may send it dense."""
        return median(step[figure] for step in self.steps[1:] or self.steps)

    def epoch_losses(self) -> list[float]:
        """Mean training loss of each epoch (all epochs have the same number of steps)."""
        per_epoch = len(self.steps) // len(self.accuracies)
        losses = [step["loss"] for step in self.steps]
        return [fmean(losses[start : start + per_epoch]) for start in range(0, len(losses), per_epoch)]


def build_table(histories: Sequence[History], title: str) -> Table:
    """One row per system; times and bytes are medians over the steps of the first worker."""
    table = plain_table(
        title,
        "Missing: gradient tensors of which a worker sent nothing in a step. Sent: what one worker hands to the "
        "network. Exposed: time spent on nothing but the exchange. Medians over steps.",
        "system",
        ("validation\naccuracy", "tensors\nmissing", "achieved\ndensity", "sent\nkB/step", "step\nms")
        + ("exposed\nexchange\nms",),
    )
    for history in histories:
        table.add_row(
            RowName(history.system),
            f"{history.accuracies[-1]:.2%}",
            f"{history.missing_share:.1%}",
            f"{history.median('density'):.2%}",
            f"{history.median('bytes_sent') / 1e3:,.1f}",
            f"{history.median('seconds') * 1e3:.1f}",
            f"{history.median('exposed_s') * 1e3:.2f}",
        )
    return table


def plot_curves(histories: Sequence[History]) -> Figure:
    """Draws training loss and validation accuracy by epoch, one line per system."""
    from matplotlib.figure import Figure  # an extra: only where something is drawn
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    loss_axes, accuracy_axes = figure.subplots(1, 2)
    for history in histories:
        epochs = range(1, len(history.accuracies) + 1)
        style = "--" if "memory=none" in history.system else "-"
        loss_axes.plot(epochs, history.epoch_losses(), style, label=history.system)
        accuracy_axes.plot(epochs, history.accuracies, style, label=history.system)
    loss_axes.set(xlabel="epoch", ylabel="training loss (mean of the epoch)", yscale="log")
    accuracy_axes.set(xlabel="epoch", ylabel="validation accuracy")
    accuracy_axes.legend(loc="lower right")
    # The first epochs would squeeze the differences that matter into a line.
    lowest = min(min(history.accuracies[len(history.accuracies) // 4 :]) for history in histories)
    accuracy_axes.set_ylim(max(0.0, lowest - 0.03), 1.0)
    for axes in (loss_axes, accuracy_axes):
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure
