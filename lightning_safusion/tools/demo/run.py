"""``safusion demo``: trains each row on workers of its own, and shows their progress, the table and the picture."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typing_extensions import override

from lightning_safusion.literal import plural
from lightning_safusion.lookup import need
from lightning_safusion.strategy import SAFusionStrategy
from lightning_safusion.tools.bench.rows import parse_row
from lightning_safusion.tools.demo.curves import History, build_table, plot_curves
from lightning_safusion.tools.demo.digits import WIDTHS, DigitsNet, Loaders, digits_loaders
from lightning_safusion.tools.team import Place, make_trainer, started

SYSTEMS = ("ddp", "behind[memory=none]", "behind", "safusion", "saf-pooled")


@dataclass(frozen=True)
class Settings:
    """Arguments of :func:`run_demo`; images per worker and step, channels of the network's stages, learning rate.

    Raises:
        ValueError: If a value cannot be used; names it, and what to give instead.
    """

    systems: tuple[str, ...] = SYSTEMS
    density: float = 0.05
    epochs: int = 20
    workers: int = 2
    seed: int = 0
    batch_size: int = 32
    widths: tuple[int, ...] = WIDTHS
    lr: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density is {self.density}: give a share in (0, 1], for example 0.05")
        if self.epochs < 1:
            raise ValueError(f"epochs is {self.epochs}: give 1 or more")
        if self.workers < 2:
            raise ValueError(f"workers is {self.workers}: a single worker exchanges nothing, give 2 or more")
        if len(set(self.systems)) < len(self.systems):
            raise ValueError(f"systems are {','.join(self.systems)}: give each once")
        for system in self.systems:
            self.strategy(system)

    def loaders(self, rank: int) -> Loaders:
        """Training and validation batches of one worker."""
        return digits_loaders(self.seed, self.batch_size, self.workers, rank)

    def strategy(self, system: str) -> SAFusionStrategy:
        """The strategy of one row.

        A compressed row that names no collective exchanges by all-gather: left to itself, the strategy would take the
        dense all-reduce on links as fast as the loopback.
        """
        row = parse_row(system)
        auto = row.published.ddp_hook is None and row.published.collective == "auto"
        strategy = row.strategy(self.density, **({"collective": "allgather"} if auto else {}))
        strategy.settings.density.opens = False  # all rows send the same
        return strategy


def run_demo(
    density: float = Settings.density,
    epochs: int = Settings.epochs,
    workers: int = Settings.workers,
    seed: int = Settings.seed,
    systems: Sequence[str] = SYSTEMS,
    output: Path = Path("safusion_demo"),
) -> list[History]:
    """Trains a small network on real data under several systems and compares them.

    Args:
        density: Share of the gradient elements that a worker sends, in (0, 1].
        epochs: Passes over the training images.
        workers: Processes that train together, at least 2.
        seed: Seed of the split, the batches and the initial weights; the same for all systems.
        systems: Names of the systems, separated by commas, with options as in "safusion[memory=none]"; "safusion
            systems" lists them.
        output: Folder for the picture (curves.png) and the logs of the workers.

    Returns:
        What each system reported, in the order given.

    Raises:
        ValueError: If an argument cannot be used; names the value and what to give instead.
        ModuleNotFoundError: If scikit-learn or matplotlib is missing; names the extra that brings it.
        RuntimeError: If a training failed; names the log.
    """
    return compare(Settings(tuple(systems), density, epochs, workers, seed), output, Console())


def compare(settings: Settings, output: Path, console: Console) -> list[History]:
    """As :func:`run_demo`, on a console of the caller's choice."""
    need("matplotlib", "plot")
    output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # no threads before the workers are forked
    steps = settings.epochs * len(settings.loaders(rank=0)[0])
    text, figures = TextColumn("{task.description}"), TextColumn("{task.fields[figures]}")
    columns = (text, BarColumn(), MofNCompleteColumn(), figures, TimeElapsedColumn())
    histories = [History(system) for system in settings.systems]
    # refreshed by hand: a thread of its own would be forked with the workers
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        for history in histories:
            bar = progress.add_task(escape(history.system), total=steps, figures="")
            work, log = partial(_work, settings, history.system, steps), output / f"{history.system}.log"
            with started(history.system, Place(settings.workers), log, work) as team:
                for event in team.events():
                    if isinstance(event, float):
                        history.accuracies.append(event)
                    else:
                        history.steps.append(event)
                    accuracy = f"  accuracy {history.accuracies[-1]:.2%}" if history.accuracies else ""
                    shown = f"loss {history.steps[-1]['loss']:.4f}{accuracy}"
                    progress.update(bar, completed=len(history.steps), figures=shown, refresh=True)
            progress.stop_task(bar)
    workers, epochs = plural(settings.workers, "worker"), plural(settings.epochs, "epoch")
    title = f"{workers}, density {settings.density:g}, {epochs}, seed {settings.seed}"
    console.print(build_table(histories, title))
    plot_curves(histories).savefig(output / "curves.png", dpi=120)
    console.print(f"Curves: {output / 'curves.png'}", soft_wrap=True)
    return histories


def _work(settings: Settings, system: str, steps: int, rank: int, pipe: Connection) -> None:
    seed_everything(settings.seed, workers=True, verbose=False)
    options: dict[str, Any] = {"max_epochs": settings.epochs, "num_sanity_val_steps": 0}
    trainer = make_trainer(settings.workers, settings.strategy(system), [_Reporter(pipe)], **options)
    trainer.fit(DigitsNet(settings.widths, settings.lr, steps), *settings.loaders(rank))


class _Reporter(Callback):
    """Sends the figures of each step of the first worker, see :class:`History`, and the accuracy after each epoch."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._begin = 0.0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy: Any = trainer.strategy
        if strategy.engine is None:
            strategy.model._set_ddp_runtime_logging_sample_rate(1)  # time every step, not every hundredth

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._begin = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        seconds = time.perf_counter() - self._begin
        if trainer.is_global_zero:
            figures = _figures(trainer.strategy, pl_module)
            self._pipe.send({"loss": float(outputs["loss"]), "seconds": seconds, **figures})

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self._pipe.send(float(trainer.callback_metrics["val_accuracy"]))


def _figures(strategy: Any, model: LightningModule) -> dict[str, float]:
    """What the exchange of the latest step did: from the strategy's report, or from DDP's own timers."""
    if strategy.engine is not None:
        report = strategy.figures()
        figures = {key: report[key] for key in ("exposed_s", "bytes_sent", "tensors", "tensors_missing")}
        return {**figures, "density": report["achieved_density"]}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    timers = strategy.model._get_ddp_logging_data()
    exposed_ns = timers.get("backward_comm_time", 0) - timers.get("backward_compute_comm_overlap_time", 0)
    return {
        "exposed_s": exposed_ns / 1e9,
        "bytes_sent": sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        "density": 1.0,
        "tensors": len(parameters),
        "tensors_missing": 0,
    }
