"""Runs the demo: starts the training process, shows its progress, prints the table, saves the picture."""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from lightning_safusion.demo.events import Event, Failed, Finished, History, Report, Settings, Started
from lightning_safusion.demo.train import SYSTEMS, train_all
from lightning_safusion.literal import literal


def run_demo(
    density: float = 0.05,
    epochs: int = 20,
    workers: int = 2,
    seed: int = 0,
    systems: str = ",".join(SYSTEMS),
    output: Path = Path("safusion_demo"),
) -> list[History]:
    """Trains a small network on real data under several systems and compares them.

    Args:
        density: Share of the gradient elements that a worker sends, in (0, 1].
        epochs: Passes over the training images.
        workers: Processes that train together, at least 2.
        seed: Seed of the split, the batches and the initial weights; the same for all systems.
        systems: Names of the systems, separated by commas.
        output: Folder for the picture (curves.png) and the log of the training processes (train.log).

    Returns:
        What each system reported, in the order given.

    Raises:
        ValueError: If an argument cannot be used; names the value and what to give instead.
        ModuleNotFoundError: If scikit-learn or matplotlib is missing; names the extra that brings it.
        RuntimeError: If a training failed; names the log.
    """
    names = tuple(name.strip() for name in systems.split(","))
    settings = Settings(systems=names, density=density, epochs=epochs, workers=workers, seed=seed)
    return compare(settings, output, Console())


def compare(settings: Settings, output: Path, console: Console) -> list[History]:
    """Does the work of :func:`run_demo` on a console of the caller's choice; same arguments, result and errors."""
    _validate(settings)
    _require("sklearn", "examples")
    _require("matplotlib", "plot")
    from lightning_safusion.demo import report  # needs matplotlib, which is optional

    output.mkdir(parents=True, exist_ok=True)
    log = output / "train.log"
    histories = {system: History(system) for system in settings.systems}
    with _training(settings, log) as events, Display(settings, console) as display:
        for event in events:
            if isinstance(event, Failed):
                last = event.trace.strip().splitlines()[-1]
                raise RuntimeError(f"the training of {event.system!r} failed: {last} (all of it is in {log})")
            history = histories[event.system]
            history.add(event)
            display.show(event, history)
    results = list(histories.values())
    console.print(report.build_table(results, settings))
    console.print(literal(f"Curves: {report.save_curves(results, output)}"), soft_wrap=True)
    return results


def _validate(settings: Settings) -> None:
    unknown = [name for name in settings.systems if name not in SYSTEMS]
    if unknown:
        raise ValueError(f"unknown systems {unknown}: choose from {', '.join(SYSTEMS)}, separated by commas")
    if len(set(settings.systems)) < len(settings.systems):
        raise ValueError(f"systems are {','.join(settings.systems)}: give each once")
    if not 0 < settings.density <= 1:
        raise ValueError(f"density is {settings.density}: give a share in (0, 1], for example 0.05")
    if settings.epochs < 1:
        raise ValueError(f"epochs is {settings.epochs}: give 1 or more")
    if settings.workers < 2:
        raise ValueError(f"workers is {settings.workers}: a single worker exchanges nothing, give 2 or more")


def _require(module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(f'the demo needs {module}: pip install "lightning-safusion[{extra}]"')


@contextmanager
def _training(settings: Settings, log: Path) -> Iterator[Iterator[Report | Failed]]:
    """Starts the training process, yields its events, and ends it with the block.

    The process is spawned, so that it has no thread before it forks the workers.
    """
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=train_all, args=(settings, writer, log), name="safusion-demo")
    process.start()
    writer.close()  # the end of the process then reads as the end of the events
    try:
        yield _receive(reader, log)
    finally:
        process.terminate()
        process.join()


def _receive(reader: Connection, log: Path) -> Iterator[Report | Failed]:
    while True:
        try:
            event: Event = reader.recv()
        except EOFError:
            raise RuntimeError(f"the training process ended before its work was done: see {log}") from None
        if isinstance(event, Finished):
            return
        yield event


class Display:
    """A progress bar per system, with its latest loss and accuracy.

    Args:
        settings: What is trained.
        console: Where to show it.
    """

    def __init__(self, settings: Settings, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {
            system: self._progress.add_task(system, start=False, total=None, figures="") for system in settings.systems
        }

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, event: Report, history: History) -> None:
        """Brings the bar of the event's system up to date."""
        task = self._tasks[event.system]
        if isinstance(event, Started):
            self._progress.start_task(task)
            self._progress.update(task, total=event.steps)
            return
        loss = f"loss {history.steps[-1].loss:.4f}" if history.steps else ""
        accuracy = f"  accuracy {history.accuracy:.2%}" if history.accuracies else ""
        self._progress.update(task, completed=len(history.steps), figures=loss + accuracy)
