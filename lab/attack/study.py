"""Attacks on real jobs, in turn until the time is over, and a table of what held.

$ python -m lab attack --minutes 15 --output attacks
$ python -m lab attack --only kill --seed 7 --trials 1
"""

from __future__ import annotations

import fnmatch
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from lab.attack.damage import DamagedEntry, DamagedPart
from lab.attack.device_messages import DeviceMessages
from lab.attack.disagreement import DISAGREEMENTS
from lab.attack.disk import FullDisk
from lab.attack.flips import FlippedBits
from lab.attack.links import CutLink
from lab.attack.lost import LostWorker
from lab.attack.messages import DamagedMessages
from lab.attack.restarts import RESTARTS
from lab.attack.sealed import FlippedMessages
from lab.attack.trial import Attack, Outcome, Verdict, choice_of
from lightning_safusion.literal import literal
from lightning_safusion.lookup import suggestion

ATTACKS: tuple[Attack, ...] = (
    LostWorker("kill", "kill -9 of one worker, anywhere in a job; then two resume", "kill"),
    LostWorker("stop", "SIGSTOP of one worker, anywhere", "stop"),
    LostWorker("raise", "an exception in one worker, anywhere", "raise"),
    LostWorker("exit", "sys.exit in one worker, anywhere", "exit"),
    LostWorker("sigint", "SIGINT to one worker, anywhere", "int"),
    LostWorker("sigterm", "SIGTERM to one worker, anywhere", "term"),
    DamagedPart(),
    DamagedEntry(),
    FlippedBits(),
    DamagedMessages(),
    DeviceMessages(),
    FlippedMessages(),
    *DISAGREEMENTS,
    FullDisk(),
    CutLink(),
    *RESTARTS,
)
_SHOWN = 3


def attack(
    minutes: float = 15.0,
    output: Path = Path("attacks"),
    only: str = "*",
    seed: int = 0,
    trials: int = 0,
    patience: float = 2.0,
) -> None:
    """Attacks real jobs of two to four worker processes on this machine, and shows what held.

    Every trial is a line in OUTPUT/trials.jsonl, with the command that repeats it. Ctrl-C shows what there is so far.

    Args:
        minutes: So long attacks are drawn in turn; each kind comes at least once.
        output: Folder; the files of trials that did not hold stay there.
        only: Kinds of attack, a shell pattern such as "sig*", or several with "|" between them.
        seed: Of the first trial of each kind; the next has the next one.
        trials: So many of each kind, in place of minutes; 0: minutes count.
        patience: Seconds in which the survivors of a lost worker have to end.

    Raises:
        ValueError: If no attack has such a name.
        SystemExit: With 1 if anything did not hold.
    """
    chosen = chosen_of(only)
    torch.set_num_threads(1)  # no threads before workers are forked
    console = Console()
    output.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    try:
        with (output / "trials.jsonl").open("a") as file:
            for each, its_seed in turns(chosen, seed, trials, minutes):
                outcome = tried(each, its_seed, output / f"{each.name}-{its_seed}", patience)
                outcomes.append(outcome)
                file.write(json.dumps(outcome.record()) + "\n")
                file.flush()
                _show(console, outcome)
    except KeyboardInterrupt:
        console.print("stopped: this is what there is so far")
    console.print(table(chosen, outcomes))
    broken = [outcome for outcome in outcomes if outcome.verdict.held is False]
    for outcome in broken:
        console.print(literal(f"{outcome.verdict.reason}\n    {outcome.record()['again']}", "red"))
    if broken or not outcomes:
        sys.exit(1)


def chosen_of(only: str) -> list[Attack]:
    """The attacks with names of these patterns.

    Raises:
        ValueError: If a pattern has none.
    """
    names = [each.name for each in ATTACKS]
    for pattern in only.split("|"):
        if not fnmatch.filter(names, pattern):
            raise ValueError(
                f"no attack is called {pattern!r}.{suggestion(pattern, names)} There are: {', '.join(names)}"
            )
    return [each for each in ATTACKS if any(fnmatch.fnmatch(each.name, pattern) for pattern in only.split("|"))]


def turns(chosen: Sequence[Attack], seed: int, trials: int, minutes: float) -> Iterator[tuple[Attack, int]]:
    """Attacks in turn, each with the seed of its trial; those that cannot be made here end with their first turn."""
    until = time.monotonic() + 60 * minutes
    for turn in range(trials) if trials else count():
        for each in chosen:
            if turn and not trials and time.monotonic() > until:
                return
            yield each, seed + turn


def tried(each: Attack, seed: int, folder: Path, patience: float) -> Outcome:
    """Runs one trial. Its files stay if it did not hold."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    drawn = each.draw(choice_of(each.name, seed), seed)
    verdict = each.run(drawn, folder, patience)
    if verdict.held is not False:
        shutil.rmtree(folder)
    return Outcome(each.name, seed, drawn, verdict)


def _show(console: Console, outcome: Outcome) -> None:
    verdict = outcome.verdict
    said = {True: "held", False: "DID NOT HOLD", None: "not run"}[verdict.held]
    drawn = ", ".join(map(str, outcome.drawn.values()))
    line = f"{outcome.name} {outcome.seed} ({drawn:.160}): {said}: {verdict.reason}"
    console.print(literal(line, "red" if verdict.held is False else ""))


def table(chosen: Sequence[Attack], outcomes: Sequence[Outcome]) -> Table:
    """What / how often / result, a row for each kind of attack."""
    made = Table(box=box.MARKDOWN, title=None)
    for heading in ("what", "trials", "attacks", "held", "result"):
        made.add_column(
            heading, justify="right" if heading in ("trials", "attacks", "held") else "left", overflow="fold"
        )
    for each in chosen:
        verdicts = [outcome.verdict for outcome in outcomes if outcome.name == each.name]
        ran = [verdict for verdict in verdicts if verdict.held is not None]
        held = sum(bool(verdict.held) for verdict in ran)
        attacks = sum(verdict.count for verdict in ran)
        made.add_row(
            literal(each.what), str(len(ran)), f"{attacks:,}", f"{held} of {len(ran)}", literal(result(verdicts))
        )
    return made


def result(verdicts: Sequence[Verdict]) -> str:
    """How the trials of one kind have ended, in a line."""
    if not verdicts:
        return "not run: stopped before"
    if all(verdict.held is None for verdict in verdicts):
        return f"not run: {verdicts[0].reason}"
    reasons = Counter(("" if verdict.held else "NOT HELD: ") + verdict.reason for verdict in verdicts)
    common = [f"{reason} ({number})" for reason, number in reasons.most_common(_SHOWN)]
    if len(reasons) > _SHOWN:
        common.append(f"{len(reasons) - _SHOWN} other endings")
    seconds = [verdict.seconds for verdict in verdicts if verdict.seconds is not None]
    times = [f"ended in {min(seconds):.1f} to {max(seconds):.1f} s"] if seconds else []
    repeated = [verdict.repeated for verdict in verdicts if verdict.repeated is not None]
    steps = [f"{min(repeated)} to {max(repeated)} steps repeated"] if repeated else []
    return "; ".join(times + steps + common)
