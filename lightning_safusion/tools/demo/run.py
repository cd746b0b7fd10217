"""``safusion demo``: trains each row on workers of its own, and shows progress, a table and pictures."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typing_extensions import override

from lightning_safusion.callbacks import OverlapProfiler
from lightning_safusion.kernels import cpu as native
from lightning_safusion.literal import plural
from lightning_safusion.profiling import load_timeline, plot_step
from lightning_safusion.strategy import SAFusionStrategy
from lightning_safusion.systems import DEFAULT
from lightning_safusion.tools.bench.rows import parse_row
from lightning_safusion.tools.demo.curves import BASELINE, Comparison, History, Step
from lightning_safusion.tools.demo.digits import WIDTHS, DigitsNet, Loaders, digits_loaders, load_digits
from lightning_safusion.tools.demo.link import Paced, paced_rate, sent_bytes
from lightning_safusion.tools.plan.cluster import resolve_link
from lightning_safusion.tools.team import Place, make_trainer, started

_LEARNING_RATE = 2e-3
_UNPACED = 1.5  # times the rate that was asked for: the kernel does not pace; so many times less: it need not

#: Rows, and what the table calls them.
SYSTEMS = {
    "ddp": "DDP",
    "ddp-bf16": "DDP in bf16",
    "powersgd": "PowerSGD",
    "behind[density=0.02]": "after fusion",
    "safusion[density=0.02]": "before fusion",
    DEFAULT: "the default",
}


@dataclass(frozen=True)
class Settings:
    """Arguments of :func:`run_demo`; images per worker and step, channels of the network's stages.

    Raises:
        ValueError: If a value cannot be used; names it, and what to give instead.
    """

    systems: tuple[str, ...] = tuple(SYSTEMS)
    bandwidth: str | None = "100mbit"
    density: float | None = None
    epochs: int = 8
    workers: int = 2
    seed: int = 0
    batch_size: int = 24
    widths: tuple[int, ...] = WIDTHS

    def __post_init__(self) -> None:
        if self.density is not None and not 0 < self.density <= 1:
            raise ValueError(f"density is {self.density}: give a share in (0, 1], for example 0.05")
        if self.epochs < 1:
            raise ValueError(f"epochs is {self.epochs}: give 1 or more")
        if self.workers < 2:
            raise ValueError(f"workers is {self.workers}: a single worker exchanges nothing, give 2 or more")
        if len(set(self.systems)) < len(self.systems):
            raise ValueError(f"systems are {','.join(self.systems)}: give each once")
        for system in self.systems:
            self.strategy(system)
        _ = self.rate  # raises

    @property
    def rate(self) -> float | None:
        """Of the link, in bytes per second; None: as fast as the loopback is."""
        return None if self.bandwidth is None else resolve_link(self.bandwidth).card_gbit * 1e9 / 8

    def loaders(self, rank: int) -> Loaders:
        """Those of one worker."""
        return digits_loaders(self.seed, self.batch_size, self.workers, rank)

    def strategy(self, system: str) -> SAFusionStrategy:
        """The strategy of one row, as a user gets it.

        Without a link, a compressed row that names no collective exchanges by all-gather: left to itself, the strategy
        would take the dense all-reduce on links as fast as the loopback.
        """
        row = parse_row(system)
        auto = self.bandwidth is None and row.published.ddp_hook is None and row.published.collective == "auto"
        return row.strategy(self.density, **({"collective": "allgather"} if auto else {}))


def run_demo(
    bandwidth: str | None = Settings.bandwidth,
    density: float | None = Settings.density,
    epochs: int = Settings.epochs,
    workers: int = Settings.workers,
    seed: int = Settings.seed,
    systems: Sequence[str] = tuple(SYSTEMS),
    output: Path = Path("safusion_demo"),
) -> list[History]:
    """Trains a small network on real data under several systems, over a slow link, and compares them.

    Args:
        bandwidth: Of the link between the workers, which the kernel paces, such as 100mbit or 1gbit; null leaves the
            loopback as fast as it is, and sparse systems exchange by all-gather there.
        density: Share of the gradient elements that a worker sends, in (0, 1]; the systems' own by default.
        epochs: Passes over the training images.
        workers: Processes that train together, at least 2.
        seed: Of the split, the batches and the initial weights; the same for all systems.
        systems: Names of the systems, separated by commas, with options as in "safusion[memory=none]"; "safusion
            systems" lists them.
        output: Folder for the pictures (curves.png, step.png) and the logs of the workers.

    Returns:
        What each system reported, in the order given.

    Raises:
        ValueError: If an argument cannot be used; names the value and what to give instead.
        RuntimeError: If a training failed; names the log.
    """
    return compare(Settings(tuple(systems), bandwidth, density, epochs, workers, seed), output, Console())


def compare(settings: Settings, output: Path, console: Console) -> list[History]:
    """As :func:`run_demo`, on a console of the caller's choice."""
    steps = settings.epochs * len(settings.loaders(rank=0)[0])
    if not steps:
        raise ValueError(
            f"workers is {settings.workers}: there are not {settings.batch_size} images for each, give fewer"
        )
    output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # no threads before the workers are forked
    settings, said = _with_link(settings)
    console.print(said)
    if not native.usable():
        console.print(
            "NumPy selects, which takes longer: installed with a C compiler, the package has kernels that do."
        )
    histories = [History(system, SYSTEMS.get(system, system)) for system in settings.systems]
    with _progress(console) as progress:
        for history in histories:
            _train(settings, history, steps, output / history.system, progress)
    comparison = Comparison(histories, len(load_digits(settings.seed)[1]))
    workers, epochs = plural(settings.workers, "worker"), plural(settings.epochs, "epoch")
    link = f"link of {settings.bandwidth}" if settings.bandwidth else "no slow link"
    console.print(comparison.table(f"{workers}, {link}, {epochs} ({steps} steps) of AdamW, seed {settings.seed}"))
    for sentence in comparison.conclusions():
        console.print(sentence)
    pictures: dict[str, Any] = {"curves.png": comparison.plot()}
    if DEFAULT in settings.systems:
        pictures["step.png"] = plot_step(load_timeline(output / DEFAULT))
    for name, figure in pictures.items():
        figure.savefig(output / name, dpi=120)
        console.print(f"Picture: {output / name}", soft_wrap=True)
    if {BASELINE, DEFAULT} <= set(settings.systems):
        console.print(f"Both on a page: safusion report {output / BASELINE} {output / DEFAULT}", soft_wrap=True)
    return histories


def _with_link(settings: Settings) -> tuple[Settings, str]:
    """The settings that this machine can have, and what is said about its link."""
    if settings.rate is None:
        return settings, "Exchanges are as fast as the loopback: times say nothing about a network."
    asked, measured = settings.rate * 8e-6, paced_rate(settings.rate) * 8e-6
    if measured > _UNPACED * asked:
        without = f"This kernel does not pace connections: {measured:.0f} Mbit/s measured in place of {asked:g}. "
        settings = replace(settings, bandwidth=None)
        return settings, without + _with_link(settings)[1]
    said = f"The kernel paces the workers' connections at {asked:g} Mbit/s ({measured:.0f} measured)"
    slower = measured < asked / _UNPACED
    said += f", {'more than this machine carries' if slower else 'as a link between machines would'}."
    if settings.workers > 2:
        said += " Each connection has this rate: an exchange that uses several at once is faster than over a link."
    return settings, said


def _train(settings: Settings, history: History, steps: int, folder: Path, progress: Progress) -> None:
    folder.mkdir(exist_ok=True)
    bar = progress.add_task(escape(history.title), total=steps, figures="")
    work = partial(_work, settings, history.system, steps, folder)
    with started(history.title, Place(settings.workers), folder / "log", work) as team:
        for event in team.events():
            if isinstance(event, Step):
                history.steps.append(event)
            else:
                history.accuracies.append(event)
            accuracy = f"  accuracy {history.accuracies[-1]:.1%}" if history.accuracies else ""
            figures = f"loss {history.steps[-1].loss:.4f}{accuracy}"
            progress.update(bar, completed=len(history.steps), figures=figures, refresh=True)
    progress.stop_task(bar)


def _progress(console: Console) -> Progress:
    text, figures = TextColumn("{task.description}"), TextColumn("{task.fields[figures]}")
    columns = (text, BarColumn(), MofNCompleteColumn(), figures, TimeElapsedColumn())
    # refreshed by hand: a thread of its own would be forked with the workers
    return Progress(*columns, console=console, auto_refresh=False)


def _work(settings: Settings, system: str, steps: int, folder: Path, rank: int, pipe: Connection) -> None:
    seed_everything(settings.seed, workers=True, verbose=False)
    profiler = OverlapProfiler(dirpath=folder, progress_bar=False, table=False)
    clock = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]))
    paced = [] if settings.rate is None else [Paced(settings.rate)]
    callbacks: list[Callback] = [*paced, _Reporter(pipe), profiler, clock]
    logger = CSVLogger(folder, name="", version="")
    options: dict[str, Any] = {"max_epochs": settings.epochs, "num_sanity_val_steps": 0, "log_every_n_steps": 10}
    trainer = make_trainer(settings.workers, settings.strategy(system), callbacks, logger=logger, **options)
    adamw = partial(torch.optim.AdamW, lr=_LEARNING_RATE)
    trainer.fit(DigitsNet(settings.widths, adamw, steps), *settings.loaders(rank))


class _Reporter(Callback):
    """Sends a :class:`Step` after each step of the first worker, and the accuracy after each epoch."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._begin, self._sent = 0.0, 0

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._sent = sent_bytes()
        self._begin = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        seconds = time.perf_counter() - self._begin
        if trainer.is_global_zero:
            figures = cast(SAFusionStrategy, trainer.strategy).figures()
            missing = (figures["tensors_missing"] or 0) / (figures["tensors"] or 1)  # None with plain DDP
            self._pipe.send(Step(float(outputs["loss"]), seconds, sent_bytes() - self._sent, missing))

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self._pipe.send(float(trainer.callback_metrics["val_accuracy"]))
