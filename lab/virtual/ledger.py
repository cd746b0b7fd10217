"""Finished jobs as lines of JSON, each with the settings that name it: what is there is not done again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Result = TypeVar("Result", bound="DataclassInstance")


def key_of(settings: Mapping[str, Any]) -> str:
    """Settings as canonical text."""
    return json.dumps(settings, sort_keys=True)


class Ledger(Generic[Result]):
    """A file of finished jobs.

    Args:
        path: The file; made with the first job.
        make: Makes a result of its fields.
        what: A job in a word or two, for messages.

    Raises:
        ValueError: If a line is not one of a job. (A last line without an end is the trace of a crash, and is dropped.)
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
        """Writes a job down; it is on the disk when this returns."""
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
