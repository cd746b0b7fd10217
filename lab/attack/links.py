"""Links that go down, for good or for a while, or become slow: a network namespace for every worker."""

from __future__ import annotations

import random
import subprocess
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lab.attack.job import Recipe, train
from lab.attack.trial import TIMEOUT, Verdict
from lab.attack.workers import End, Job, hit_at, mark_hit
from lab.bench.links import Machines, Namespace, linked_namespaces, why_no_links

_RATE, _SLOW = "1gbit", "1mbit"
_WHILE_S, _LIMIT_S = 2.5, 90.0
_STEPS, _STEP = 24, 6
_SYSTEMS = ("default", "allgather", "sharded", "ddp")


class Marks(Callback):
    """Notes that a step is reached: the parent then cuts.

    Args:
        folder: Of the job.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Marks, and lets the parent act."""
        if trainer.global_step == _STEP:
            mark_hit(self.folder)
        if trainer.global_step >= _STEP:
            time.sleep(0.05)


class Link:
    """The link of one worker, which is cut once the job has come so far.

    Args:
        machine: Whose.
        kind: What happens.
        folder: Of the job.
    """

    def __init__(self, machine: Namespace, kind: str, folder: Path) -> None:
        self.machine, self.kind, self.folder = machine, kind, folder
        self.cut: float | None = None
        self._mended = False

    def tick(self) -> None:
        """Cuts, and mends, when it is time."""
        now = time.monotonic()
        if self.cut is None and hit_at(self.folder) is not None:
            self.cut = now
            self._turn("down")
        elif self.cut is not None and self.kind == "a while" and not self._mended and now > self.cut + _WHILE_S:
            self._mended = True
            self._turn("up")

    def _turn(self, way: str) -> None:
        if self.kind == "slow":
            self.machine.shape(_SLOW)
        else:
            # wherever the system has it
            subprocess.run(["ip", "link", "set", "dev", self.machine.device, way], check=True)  # noqa: S607  # where the system has it


class CutLink:
    """The link of one worker goes down for good, for a while, or becomes slow."""

    name = "link"
    what = f"the link of one worker cut, down for {_WHILE_S:g} s, or at {_SLOW}"

    def draw(self, choice: random.Random, number: int) -> dict[str, Any]:
        """Which system, whose link, what happens to it."""
        workers = choice.choice((2, 3))
        return {
            "system": choice.choice(_SYSTEMS),
            "workers": workers,
            "rank": choice.randint(0, workers - 1),
            "kind": ("for good", "a while", "slow")[number % 3],
        }

    def run(self, drawn: dict[str, Any], folder: Path, patience: float) -> Verdict:
        """Trains over links, and cuts one."""
        if (reason := why_no_links()) is not None:
            return Verdict(None, f"needs root and ip netns: {reason}", 0)
        recipe = Recipe(drawn["system"], _STEPS, workers=drawn["workers"], spread=True)

        def work(rank: int, told: dict[str, Any]) -> None:
            train(recipe, [Marks(folder)] if rank == 0 else [], told)

        try:
            with linked_namespaces(drawn["workers"], _RATE) as machines:
                place = Machines(len(machines), tuple(machines))
                link = Link(machines[drawn["rank"]], drawn["kind"], folder)
                after = TIMEOUT + patience + 5 if drawn["kind"] == "for good" else _LIMIT_S
                ends = Job(work, len(machines), folder, place=place).run(_LIMIT_S, after, tick=link.tick)
        except RuntimeError as error:
            return Verdict(None, f"needs root and ip netns: {error}", 0)
        return judged(ends, drawn["kind"], link.cut, patience)


def judged(ends: list[End], kind: str, cut: float | None, patience: float) -> Verdict:
    """Whether a job has gone on over a link that came back, or has ended soon where none did."""
    if cut is None:
        return Verdict(False, f"the link was never cut ({', '.join(end.how for end in ends)})")
    if kind != "for good":
        bad = [end for end in ends if end.how != "finished"]
        if bad:
            return Verdict(False, f"{kind}: rank {bad[0].rank} {bad[0].how}: {bad[0].said:.200}")
        equal = len({end.told["digest"] for end in ends}) == 1
        return Verdict(equal, f"{kind}: goes on" if equal else f"{kind}: replicas differ")
    seconds = max(end.at for end in ends) - cut
    for end in ends:
        if end.code is None or not {"WorkerLostError", "OutOfStepError"} & set(end.raised):
            return Verdict(False, f"for good: rank {end.rank} {end.how}: {end.said:.200}", seconds=seconds)
    held = seconds <= TIMEOUT + patience
    return Verdict(held, "for good: all end" if held else f"for good: ended after {seconds:.1f} s", seconds=seconds)
