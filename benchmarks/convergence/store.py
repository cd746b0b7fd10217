"""Finished runs as lines of JSON, each with the settings that name it: what is there is not run again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.convergence.scheme import Scheme
from benchmarks.convergence.training import Result
from lightning_safusion.tasks import Task


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
        return json.dumps(self.settings(), sort_keys=True)


class Store:
    """A file of finished runs.

    Args:
        path: The file; made with the first run.

    Raises:
        ValueError: If a line is not one of a run. (A last line without an end is the trace of a crash, and is dropped.)
    """

    def __init__(self, path: Path) -> None:
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
                self._results[json.dumps(record["settings"], sort_keys=True)] = Result(**record["result"])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"line {number} of {path} is not a finished run: {error!r}. Remove the line."
                ) from error

    def add(self, run: Run, result: Result) -> None:
        """Writes a run down; it is on the disk when this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        record = {"settings": run.settings(), "result": asdict(result)}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._results[run.key] = result

    def missing(self, runs: Iterable[Run]) -> list[Run]:
        """Those of the runs that have not been done, each once."""
        return list({run.key: run for run in runs if run.key not in self._results}.values())

    def results(self, runs: Iterable[Run]) -> dict[str, dict[int, Result]]:
        """Results of those of the runs that have been done, by configuration and seed."""
        done: dict[str, dict[int, Result]] = {}
        for run in runs:
            if run.key in self._results:
                done.setdefault(run.config, {})[run.seed] = self._results[run.key]
        return done
