"""Finished runs as lines of JSON, each with the settings that name it: what is there is not run again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.convergence.scheme import Scheme
from lab.convergence.training import Result
from lab.tasks import Task
from lab.virtual.ledger import Ledger, key_of


@dataclass(frozen=True)
class Run:
    """One training.

    Args:
        task: What is trained.
        scheme: How gradients are averaged.
        seed: Of the weights and the batches.
    """

    task: Task
    scheme: Scheme
    seed: int

    @property
    def config(self) -> str:
        """Task and scheme: runs that differ in the seed only share it."""
        return f"{self.task.name}/{self.scheme.name}"

    def settings(self) -> dict[str, Any]:
        """All that decides the result; plain values."""
        return {
            "task": self.task.name,
            "recipe": self.task.recipe(),
            "scheme": self.scheme.options(),
            "seed": self.seed,
        }

    @property
    def key(self) -> str:
        """The settings as canonical text."""
        return key_of(self.settings())


class Store:
    """A file of finished runs.

    Args:
        path: The file; made with the first run.

    Raises:
        ValueError: If a line is not one of a run. (A last line without an end is the trace of a crash, and is dropped.)
    """

    def __init__(self, path: Path) -> None:
        self._ledger = Ledger(path, Result, "a finished run")

    def add(self, run: Run, result: Result) -> None:
        """Writes a run down; it is on the disk when this returns."""
        self._ledger.add(run.settings(), result)

    def missing(self, runs: Iterable[Run]) -> list[Run]:
        """Those of the runs that have not been done, each once."""
        return list({run.key: run for run in runs if self._ledger.get(run.settings()) is None}.values())

    def results(self, runs: Iterable[Run]) -> dict[str, dict[int, Result]]:
        """Results of those of the runs that have been done, by configuration and seed."""
        done: dict[str, dict[int, Result]] = {}
        for run in runs:
            if (result := self._ledger.get(run.settings())) is not None:
                done.setdefault(run.config, {})[run.seed] = result
        return done
