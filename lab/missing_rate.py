"""Missing tensors and accuracy by fusion degree: sparsification behind fusion, ahead of it, with and without feedback.

    $ python benchmarks/missing_rate.py --output docs/images/missing_rate.png

SAFusion's first observation, on real trainings: a residual network on scikit-learn's digits (the demo's), two forked
workers on the CPU. Every row has top-k, the same density, batches and start; a row with degree ``d`` fuses ``d``
tensors, and selects from the buffer (behind) or from each tensor (ahead, where the degree does not matter: one run).
Prints a markdown table and saves a picture. Accuracy is that of the last epoch on 449 held-out images: one image is
0.22 points, so look at the spread of the seeds before drawing conclusions.
"""

from __future__ import annotations

import argparse
import multiprocessing
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from statistics import fmean

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from matplotlib.figure import Figure

from lightning_safusion import Aligned, SAFusionStrategy
from lightning_safusion.callbacks import TensorMissingRateMonitor
from lightning_safusion.demo.data import DigitsData
from lightning_safusion.demo.events import Settings
from lightning_safusion.demo.model import DigitsNet

AHEAD_DEGREE = 8


@dataclass(frozen=True)
class Row:
    """One scheme.

    Args:
        scope: ``"group"``: behind; ``"tensor"``: ahead; ``"dense"``: everything is sent.
        degree: Tensors in a buffer.
        memory: ``"residual"`` or ``"none"``.
    """

    scope: str
    degree: int
    memory: str


@dataclass(frozen=True)
class Result:
    """What one training of a row came to.

    Args:
        missing: Share of the gradients of which nothing was sent, over workers and steps.
        density: Share of the elements sent.
        accuracy: On the held-out images after the last epoch.
    """

    missing: float
    density: float
    accuracy: float


class Sender(Callback):
    """Sends the result of the first worker to the process that started it.

    Args:
        queue: Takes it.
        monitor: Samples the row.
    """

    def __init__(self, queue: SimpleQueue[Result], monitor: TensorMissingRateMonitor) -> None:
        self.queue, self.monitor = queue, monitor

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # one thread each, or the workers fight for the cores; denormals slow a small network down up to three times
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            accuracy = float(trainer.callback_metrics["val_accuracy"])
            statistics = self.monitor.statistics
            if statistics is None or not statistics.samples:  # plain DDP
                self.queue.put(Result(0.0, 1.0, accuracy))
            else:
                missing, density = statistics.missing.compute(), statistics.density.compute()
                self.queue.put(Result(float(missing), float(density), accuracy))


def train(row: Row, seed: int, args: argparse.Namespace) -> Result:
    """Trains one row from one start."""
    seed_everything(seed, workers=True, verbose=False)
    settings = Settings(systems=())
    data = DigitsData(settings.batch_size, seed)
    strategy = SAFusionStrategy(
        system="behind",
        compressor="topk",
        density=1.0 if row.scope == "dense" else args.density,
        scope="tensor" if row.scope == "dense" else row.scope,
        fusion=Aligned(row.degree),
        memory=row.memory,
        process_group_backend="gloo",
        start_method="fork",
    )
    queue: SimpleQueue[Result] = multiprocessing.get_context("fork").SimpleQueue()
    monitor = TensorMissingRateMonitor(every_n_steps=5, worst=0)
    trainer = Trainer(
        accelerator="cpu",
        devices=args.workers,
        strategy=strategy,
        max_epochs=args.epochs,
        callbacks=[monitor, Sender(queue, monitor)],
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=args.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    steps = args.epochs * data.steps_per_epoch(args.workers)
    trainer.fit(DigitsNet(settings.widths, args.lr, steps), data)
    return queue.get()


def label(row: Row) -> str:
    """The row in the table and the picture."""
    if row.scope == "dense":
        return "dense"
    return f"{'behind' if row.scope == 'group' else 'ahead'}, {'no ' if row.memory == 'none' else ''}feedback"


def markdown(results: dict[Row, list[Result]], tensors: int) -> str:
    """The table: means over seeds, and the lowest and highest accuracy."""
    lines = [
        "| scheme | tensors in a buffer | missing | density | accuracy | lowest to highest |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for row, runs in results.items():
        accuracies = [run.accuracy for run in runs]
        degree = "any" if row.scope != "group" else f"all {tensors}" if row.degree >= tensors else str(row.degree)
        lines.append(
            f"| {label(row)} | {degree} | {fmean(r.missing for r in runs):.1%} | {fmean(r.density for r in runs):.2%} "
            f"| {fmean(accuracies):.2%} | {min(accuracies):.2%} to {max(accuracies):.2%} |"
        )
    return "\n".join(lines)


def picture(results: dict[Row, list[Result]], tensors: int, title: str) -> Figure:
    """Missing rate (left) and accuracy (right) by fusion degree; ahead and dense as lines across."""
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
    left.set(ylabel="share of gradient tensors of which nothing was sent")
    right.set(ylabel="validation accuracy after the last epoch")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set(xlabel="tensors in a buffer")
        axes.grid(alpha=0.3)
    right.legend()
    return figure


def means(results: dict[Row, list[Result]], rows: Iterable[Row], field: str) -> list[float]:
    """Means over the seeds."""
    return [fmean(getattr(run, field) for run in results[row]) for row in rows]


def rows_of(degrees: Sequence[int]) -> list[Row]:
    """All rows, in the order of the table."""
    rows = [Row("dense", AHEAD_DEGREE, "none")]
    for memory in ("residual", "none"):
        rows.append(Row("tensor", AHEAD_DEGREE, memory))
        rows += [Row("group", degree, memory) for degree in degrees]
    return rows


def main() -> None:
    """Trains all rows, prints the table, saves the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--degrees", default="1,2,4,8,16,62", help="tensors in a buffer, behind fusion")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--output", type=Path, default=Path("missing_rate.png"))
    args = parser.parse_args()
    torch.set_num_threads(1)  # before the workers are forked: a forked thread pool hangs
    warnings.filterwarnings("ignore")
    tensors = len(list(DigitsNet(Settings(systems=()).widths, args.lr, 1).parameters()))
    results: dict[Row, list[Result]] = {row: [] for row in rows_of([int(d) for d in args.degrees.split(",")])}
    for seed in map(int, args.seeds.split(",")):
        for row, runs in results.items():
            runs.append(train(row, seed, args))
    title = (
        f"{tensors} gradient tensors, top-k at density {args.density:g}, {args.workers} workers, {args.epochs} epochs"
    )
    print(f"{title}, seeds {args.seeds}\n\n{markdown(results, tensors)}")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    picture(results, tensors, title).savefig(args.output, dpi=100)


if __name__ == "__main__":
    main()
