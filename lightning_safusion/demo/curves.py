"""The demo's table and picture."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.markup import escape
from rich.table import Table

from lightning_safusion.demo.events import History, Settings


def build_table(histories: Sequence[History], settings: Settings) -> Table:
    """One row per system; times and bytes are medians over the steps of the first worker."""
    table = Table(
        title=f"{settings.workers} workers, density {settings.density:g}, "
        f"{settings.epochs} epochs, seed {settings.seed}",
        caption="Missing: gradient tensors of which a worker sent nothing in a step. Sent: what one worker hands to "
        "the network. Exposed: time spent on nothing but the exchange. "
        "Medians over steps.",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,  # fits 80 columns
        pad_edge=False,
    )
    table.add_column("system", no_wrap=True)
    for quantity in ("validation\naccuracy", "tensors\nmissing", "achieved\ndensity", "sent\nkB/step", "step\nms"):
        table.add_column(quantity, justify="right", no_wrap=True)
    table.add_column("exposed\nexchange\nms", justify="right", no_wrap=True)
    for history in histories:
        table.add_row(
            escape(history.system),
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
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    loss_axes, accuracy_axes = figure.subplots(1, 2)
    for history in histories:
        epochs = range(1, len(history.accuracies) + 1)
        style = "--" if "memory=none" in history.system else "-"
        loss_axes.plot(epochs, epoch_losses(history), style, label=history.system)
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


def epoch_losses(history: History) -> list[float]:
    """Mean training loss of each epoch (all epochs have the same number of steps)."""
    per_epoch = len(history.steps) // len(history.accuracies)
    losses = [step.loss for step in history.steps]
    return [fmean(losses[start : start + per_epoch]) for start in range(0, len(losses), per_epoch)]
