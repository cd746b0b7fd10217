"""Missing tensors and accuracy by fusion degree: sparsification after fusion, before it, with and without feedback.

    $ python -m lab missing-rate --output docs/images/missing_rate.png

SAFusion's first observation, on real trainings: a residual network on scikit-learn's digits (the demo's), two forked
workers on the CPU. Every row has top-k, the same density, batches and start; a row with degree ``d`` fuses ``d``
tensors, and selects from the buffer (after) or from each tensor (before, where the degree does not matter: one run).
Prints a markdown table and saves a picture. Accuracy is that of the last epoch on 449 held-out images: one image is
0.22 points, so look at the spread of the seeds before drawing conclusions.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
from lightning.pytorch import seed_everything
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from lab.markdown import markdown
from lab.processes import run_workers
from lightning_safusion.callbacks import TensorMissingRateMonitor
from lightning_safusion.tools.bench.rows import parse_row
from lightning_safusion.tools.demo.digits import WIDTHS, DigitsNet, digits_loaders
from lightning_safusion.tools.team import Place, make_trainer

BEFORE_DEGREE = 8
_BATCH = 32  # images of a worker


@dataclass(frozen=True)
class Row:
    """One scheme.

    Args:
        scope: ``"group"``: after fusion; ``"tensor"``: before it; ``"dense"``: everything is sent.
        degree: Tensors in a buffer.
        memory: ``"residual"`` or ``"none"``.
    """

    scope: Literal["dense", "group", "tensor"]
    degree: int
    memory: str

    @property
    def system(self) -> str:
        """The row as the benchmark's."""
        if self.scope == "dense":
            return "ddp"
        parts = f"compressor=topk,fusion=aligned[tensors_per_buffer={self.degree}],memory={self.memory}"
        return f"behind[scope={self.scope},{parts}]"


@dataclass(frozen=True)
class Result:
    """Figures of one training of a row.

    Args:
        missing: Share of the gradients of which nothing was sent, over workers and steps.
        density: Share of the elements sent.
        accuracy: On the held-out images after the last epoch.
    """

    missing: float
    density: float
    accuracy: float


@dataclass(frozen=True)
class Conditions:
    """What all rows have in common.

    Args:
        density: Of sparse rows.
        epochs: Of each training.
        workers: That train together.
        lr: Learning rate.
    """

    density: float
    epochs: int
    workers: int
    lr: float


def _work(row: Row, seed: int, conditions: Conditions, rank: int, pipe: Connection) -> None:
    """Trains one row, as one of the workers; the first one sends the result."""
    seed_everything(seed, workers=True, verbose=False)
    loaders = digits_loaders(seed, _BATCH, conditions.workers, rank)
    monitor = TensorMissingRateMonitor(every_n_steps=5, worst=0)
    trainer = make_trainer(
        conditions.workers,
        parse_row(row.system).strategy(conditions.density),
        [monitor],
        max_epochs=conditions.epochs,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=conditions.epochs,
        default_root_dir=tempfile.mkdtemp(),  # of the monitor's file
    )
    sgd = partial(torch.optim.SGD, lr=conditions.lr, momentum=0.9, weight_decay=1e-4)
    trainer.fit(DigitsNet(WIDTHS, sgd, conditions.epochs * len(loaders[0])), *loaders)
    if rank == 0:
        missing, density, statistics = 0.0, 1.0, monitor.statistics
        if statistics is not None and statistics.samples:  # otherwise plain DDP
            missing, density = float(statistics.missing.compute()), float(statistics.density.compute())
        pipe.send(Result(missing, density, float(trainer.callback_metrics["val_accuracy"])))


def label(row: Row) -> str:
    """The row in the table and the picture."""
    if row.scope == "dense":
        return "dense"
    return f"{'after' if row.scope == 'group' else 'before'} fusion, {'no ' if row.memory == 'none' else ''}feedback"


def table(results: dict[Row, list[Result]], tensors: int) -> str:
    """Means over seeds, and the lowest and highest accuracy, in markdown."""
    lines = []
    for row, runs in results.items():
        accuracies = [run.accuracy for run in runs]
        degree = "any" if row.scope != "group" else f"all {tensors}" if row.degree >= tensors else str(row.degree)
        shares = f"{fmean(run.missing for run in runs):.1%}", f"{fmean(run.density for run in runs):.2%}"
        spread = f"{min(accuracies):.2%} to {max(accuracies):.2%}"
        lines.append((label(row), degree, *shares, f"{fmean(accuracies):.2%}", spread))
    return markdown(("scheme", "tensors in a buffer", "missing", "density", "accuracy", "lowest to highest"), lines)


def picture(results: dict[Row, list[Result]], tensors: int, title: str) -> Figure:
    """Missing rate (left) and accuracy (right) by fusion degree; before fusion and dense as lines across."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    for color, memory in (("tab:blue", "residual"), ("tab:red", "none")):
        rows = [row for row in results if row.scope == "group" and row.memory == memory]
        degrees = [min(row.degree, tensors) for row in rows]
        left.plot(degrees, means(results, rows, "missing"), "o-", color=color, label=label(rows[0]))
        right.plot(degrees, means(results, rows, "accuracy"), "o-", color=color, label=label(rows[0]))
        for degree, row in zip(degrees, rows, strict=True):
            right.plot(
                [degree] * len(results[row]), [run.accuracy for run in results[row]], ".", color=color, alpha=0.4
            )
    styles = {"dense": ("black", ":"), "residual": ("tab:blue", "--"), "none": ("tab:red", "--")}
    for row in (row for row in results if row.scope != "group"):
        color, style = styles["dense" if row.scope == "dense" else row.memory]
        left.axhline(means(results, [row], "missing")[0], color=color, ls=style, label=label(row))
        right.axhline(means(results, [row], "accuracy")[0], color=color, ls=style, label=label(row))
    left.set(ylabel="share of tensors that send nothing")
    right.set(ylabel="validation accuracy after the last epoch")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda degree, _: f"{degree:g}"))
        axes.set(xlabel="tensors in a buffer")
        axes.grid(alpha=0.3)
    right.legend()
    return figure


def means(results: dict[Row, list[Result]], rows: Iterable[Row], field: str) -> list[float]:
    """Means over the seeds."""
    return [fmean(getattr(run, field) for run in results[row]) for row in rows]


def rows_of(degrees: Sequence[int]) -> list[Row]:
    """All rows, in the order of the table."""
    rows = [Row("dense", BEFORE_DEGREE, "none")]
    for memory in ("residual", "none"):
        rows.append(Row("tensor", BEFORE_DEGREE, memory))
        rows += [Row("group", degree, memory) for degree in degrees]
    return rows


def missing_rate(
    density: float = 0.01,
    degrees: Sequence[int] = (1, 2, 4, 8, 16, 62),
    epochs: int = 10,
    seeds: Sequence[int] = (0, 1, 2),
    workers: int = 2,
    lr: float = 0.01,
    output: Path = Path("missing_rate.png"),
) -> None:
    """Missing tensors and accuracy by fusion degree, on real trainings of the demo's network.

    Args:
        density: Share of the elements that is sent.
        degrees: Tensors in a buffer, where selection comes after fusion.
        epochs: Of each training.
        seeds: Of weights and batches.
        workers: Processes that train together.
        lr: Learning rate.
        output: Picture.
    """
    conditions = Conditions(density, epochs, workers, lr)
    tensors = len(list(DigitsNet(WIDTHS, torch.optim.SGD, 1).parameters()))
    results: dict[Row, list[Result]] = {row: [] for row in rows_of(degrees)}
    for seed in seeds:
        for row, runs in results.items():
            runs += run_workers(Place(workers), partial(_work, row, seed, conditions))
    title = f"{tensors} gradient tensors, top-k at density {density:g}, {workers} workers, {epochs} epochs"
    print(f"{title}, seeds {', '.join(map(str, seeds))}\n\n{table(results, tensors)}")
    output.parent.mkdir(parents=True, exist_ok=True)
    picture(results, tensors, title).savefig(output, dpi=100)
