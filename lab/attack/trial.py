"""What all attacks have in common: a trial is drawn by a seed, run, and judged."""

from __future__ import annotations

import random
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

#: Seconds of the process groups of attacked jobs: after so long without an answer a worker counts as lost.
TIMEOUT = 6.0


@dataclass(frozen=True)
class Verdict:
    """What became of a trial.

    Args:
        held: Nothing was lost, nothing hung, nothing was silent; None: it could not be run here.
        reason: How it ended, in few words, where it held; else what is wrong, or why it was not run.
        count: How many attacks the trial has made.
        seconds: From the attack to the end of the last survivor, where that is bounded.
        repeated: Steps that were made twice, where a job goes on.
    """

    held: bool | None
    reason: str
    count: int = 1
    seconds: float | None = None
    repeated: int | None = None


class Attack(Protocol):
    """One kind of attack, a row of the table."""

    name: str  #: for ``--only``
    what: str  #: in the table

    def draw(self, choice: random.Random, number: int) -> dict[str, Any]:
        """What a trial does, as plain values.

        Args:
            choice: For all that is left to chance.
            number: Of the trial; those that follow each other may take cases in turn.
        """

    def run(self, drawn: dict[str, Any], folder: Path, patience: float) -> Verdict:
        """Runs and judges a trial.

        Args:
            drawn: What :meth:`draw` returned.
            folder: Empty, for its files.
            patience: Seconds in which survivors have to end, once they can know of a loss.
        """


def choice_of(name: str, seed: int) -> random.Random:
    """The generator of a trial: the same for the same kind of attack and the same seed."""
    return random.Random(zlib.crc32(name.encode()) + (seed << 32))  # noqa: S311  # of trials, not of secrets


@dataclass(frozen=True)
class Outcome:
    """A judged trial.

    Args:
        name: Kind of attack.
        seed: Of this trial.
        drawn: What was left to chance.
        verdict: What became of it.
    """

    name: str
    seed: int
    drawn: dict[str, Any]
    verdict: Verdict

    def record(self) -> dict[str, Any]:
        """As plain values, with the command that repeats it."""
        again = f"python -m lab attack --only {self.name} --seed {self.seed} --trials 1"
        return {"attack": self.name, "seed": self.seed, **asdict(self.verdict), "drawn": self.drawn, "again": again}
