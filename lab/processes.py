"""How studies start processes: workers that train together, and independent jobs with a ledger of their results."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lightning_safusion.literal import literal
from lightning_safusion.tools.team import Place, Team, readable, started

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    class Outcome(DataclassInstance, Protocol):
        """Result of a training: its metric (None if it diverged), and its seconds."""

        @property
        def metric(self) -> float | None: ...
        @property
        def seconds(self) -> float: ...


# Seconds of progress from which the time left is estimated: many trainings, since rows take different times.
_ESTIMATED_FROM = 3600.0


class Job(Protocol):
    """One training of a study."""

    @property
    def label(self) -> str:
        """Its name in messages."""

    def settings(self) -> dict[str, Any]:
        """All that decides the result, as plain values."""


AnyJob = TypeVar("AnyJob", bound=Job)
Result = TypeVar("Result", bound="DataclassInstance")
AnyOutcome = TypeVar("AnyOutcome", bound="Outcome")


def run_workers(place: Place, work: Callable[[int, Connection], None]) -> Iterator[Any]:
    """Forks workers, and yields what they send, as it comes.

    Args:
        place: Where they run.
        work: Called in each process with its rank and a pipe.

    Raises:
        RuntimeError: As soon as one has failed; names the log, which is kept.
    """
    torch.set_num_threads(1)  # no threads before the workers are forked
    folder = Path(tempfile.mkdtemp(prefix="safusion-"))
    with started("study", place, folder / "workers.log", work) as team:
        yield from team.events()
    shutil.rmtree(folder)


def ask(team: Team, message: object) -> list[Any]:
    """Sends a message to all workers, and waits for the answer of each; errors as in :func:`collect`."""
    for pipe in team.pipes:
        pipe.send(message)
    return collect(team)


def collect(team: Team) -> list[Any]:
    """The next message of each worker, in rank order.

    Raises:
        RuntimeError: As soon as one has failed; names the log.
    """
    answers: dict[Connection, Any] = {}
    while left := [pipe for pipe in team.pipes if pipe not in answers]:
        for pipe in readable(left):
            answers[pipe] = team.receive(pipe)
    return [answers[pipe] for pipe in team.pipes]


def key_of(settings: Mapping[str, Any]) -> str:
    """Settings as canonical text."""
    return json.dumps(settings, sort_keys=True)


class Ledger(Generic[Result]):
    """A file of finished jobs: lines of JSON, each with the settings that name the job.

    Args:
        path: The file; made with the first job.
        make: Makes a result of its fields.
        what: A job in a word or two, for messages.

    Raises:
        ValueError: If a line is not one of a job. (A last line without an end is left by a crash, and is dropped.)
    """

    def __init__(self, path: Path, make: Callable[..., Result], what: str) -> None:
        self.path = path
        self._results: dict[str, Result] = {}
        if not path.exists():
            return
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            os.truncate(path, len(whole.encode()))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                record = json.loads(line)
                self._results[key_of(record["settings"])] = make(**record["result"])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"line {number} of {path} is not {what}: {error!r}. Remove the line.") from error

    def add(self, settings: Mapping[str, Any], result: Result) -> None:
        """Writes a job; it is on the disk when this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        record = {"settings": settings, "result": asdict(result)}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._results[key_of(settings)] = result

    def get(self, settings: Mapping[str, Any]) -> Result | None:
        """The result of the job with these settings; None if it has not been done."""
        return self._results.get(key_of(settings))

    def missing(self, jobs: Sequence[AnyJob]) -> list[AnyJob]:
        """Those of the jobs that have not been done, each once."""
        return list({key_of(job.settings()): job for job in jobs if self.get(job.settings()) is None}.values())


def _progress(console: Console) -> Progress:
    """A bar that is refreshed by hand: a thread of its own would be forked with the jobs."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, auto_refresh=False, speed_estimate_period=_ESTIMATED_FROM)


def run_missing(
    what: str,
    jobs: Sequence[AnyJob],
    work: Callable[[AnyJob], AnyOutcome],
    ledger: Ledger[AnyOutcome],
    processes: int,
    console: Console,
) -> bool:
    """Does the jobs that the ledger does not have, in forked processes of one thread each.

    The first Ctrl-C lets the jobs under way finish, the second one ends them.

    Args:
        what: The jobs, for the progress bar.
        jobs: In the order in which they start.
        work: Does one.
        ledger: Takes the results.
        processes: How many run at the same time.
        console: Shows progress, results and failures.

    Returns:
        Whether all jobs have been done.
    """
    torch.set_num_threads(1)  # no threads before jobs are forked
    left, running = deque(ledger.missing(jobs)), dict[Connection, tuple[AnyJob, Team]]()
    total = len({key_of(job.settings()) for job in jobs})
    folder = Path(tempfile.mkdtemp(prefix="safusion-"))
    progress = _progress(console)
    bar = progress.add_task(what, total=total, completed=total - len(left))

    def start(job: AnyJob) -> None:
        team = started(job.label, Place(1), folder / f"{len(left)}.log", lambda _, pipe: pipe.send(work(job)))
        running[team.pipes[0]] = job, team

    def finish(job: AnyJob, team: Team) -> None:
        with team:
            try:
                (result,) = collect(team)
            except RuntimeError as error:
                console.print(literal(error, "red"))
                failed.append(job)
                return
        ledger.add(job.settings(), result)
        metric = "diverged" if result.metric is None else f"{result.metric:.4f}"
        console.print(literal(f"{job.label}: {metric} in {result.seconds:.0f} s"))

    failed: list[AnyJob] = []
    interrupts: list[int] = []
    # an exception would be lost if it came while a job is forked
    before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        with progress:
            while (left or running) and len(interrupts) < 2:
                if interrupts and left:
                    left.clear()
                    console.print(f"stopping: {what} under way are finished first; Ctrl-C again ends them")
                while left and len(running) < processes:
                    start(left.popleft())
                for pipe in wait(list(running), timeout=1.0):
                    finish(*running.pop(pipe))  # type: ignore[call-overload]  # wait has these pipes only
                    progress.advance(bar)
                progress.refresh()
    finally:
        signal.signal(signal.SIGINT, before)
        for _, team in running.values():
            team.end()
    if not failed:  # otherwise the message names a log
        shutil.rmtree(folder)
    return not ledger.missing(jobs)
