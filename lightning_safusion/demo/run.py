"""Runs the demo: starts the workers, shows their progress, prints the table, saves the picture."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_safusion.bench.extras import need
from lightning_safusion.bench.team import Place, started
from lightning_safusion.demo.data import DigitsData
from lightning_safusion.demo.events import History, Settings
from lightning_safusion.demo.train import build_strategy, train

SYSTEMS = ("ddp", "behind[memory=none]", "behind", "safusion", "saf-pooled")


def run_demo(
    density: float = 0.05,
    epochs: int = 20,
    workers: int = 2,
    seed: int = 0,
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
    settings = Settings(tuple(systems), density=density, epochs=epochs, workers=workers, seed=seed)
    return compare(settings, output, Console())


def compare(settings: Settings, output: Path, console: Console) -> list[History]:
    """Does the work of :func:`run_demo` on a console of the caller's choice; same arguments, result and errors."""
    _validate(settings)
    need("matplotlib", "plot")
    from lightning_safusion.demo import curves  # draws with matplotlib, which is an extra

    output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # no threads before the workers are forked
    steps = settings.epochs * DigitsData(max(1, settings.batch_size), settings.seed).steps_per_epoch(settings.workers)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
    )
    # refreshed by hand: a thread of its own would be forked with the workers
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        results = [_train(system, settings, output, progress, steps) for system in settings.systems]
    console.print(curves.build_table(results, settings))
    curves.plot_curves(results).savefig(output / "curves.png", dpi=120)
    console.print(f"Curves: {output / 'curves.png'}", soft_wrap=True)
    return results


def _validate(settings: Settings) -> None:
    if not 0 < settings.density <= 1:
        raise ValueError(f"density is {settings.density}: give a share in (0, 1], for example 0.05")
    if settings.epochs < 1:
        raise ValueError(f"epochs is {settings.epochs}: give 1 or more")
    if settings.workers < 2:
        raise ValueError(f"workers is {settings.workers}: a single worker exchanges nothing, give 2 or more")
    if len(set(settings.systems)) < len(settings.systems):
        raise ValueError(f"systems are {','.join(settings.systems)}: give each once")
    for system in settings.systems:
        build_strategy(system, settings.density)


def _train(system: str, settings: Settings, output: Path, progress: Progress, steps: int) -> History:
    """Trains one row, with its loss and accuracy on a bar."""
    history, place = History(system), Place(settings.workers)
    bar = progress.add_task(escape(system), total=steps, figures="")
    work = partial(train, system, settings)
    with started(system, place, output / f"{system}.log", place.port(0), work) as team:
        for event in team.events():
            history.add(event)
            accuracy = f"  accuracy {history.accuracies[-1]:.2%}" if history.accuracies else ""
            figures = f"loss {history.steps[-1].loss:.4f}{accuracy}"
            progress.update(bar, completed=len(history.steps), figures=figures, refresh=True)
    progress.stop_task(bar)
    return history
