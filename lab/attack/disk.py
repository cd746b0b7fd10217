"""A disk that is full for one worker: a limit on the size of its files, from some step on."""

from __future__ import annotations

import random
import resource
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lab.attack.job import SAVES_EVERY, Recipe, train
from lab.attack.lost import orphans, resumption
from lab.attack.trial import Verdict
from lab.attack.workers import Job, mark_hit

_SYSTEMS = ("default", "allgather", "sharded", "shared quotas", "ddp")
_LEAST, _LIMIT_S = 8192, 40.0  # logs have to fit


class Fills(Callback):
    """Lets files of this process have so many bytes, until an error ends training.

    Args:
        step: After which.
        size: Bytes.
        folder: Of the job.
    """

    def __init__(self, step: int, size: int, folder: Path) -> None:
        self.step, self.size, self.folder = step, size, folder

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Sets the limit."""
        if trainer.global_step == self.step:
            mark_hit(self.folder)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, resource.RLIM_INFINITY))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Lifts it: logs are written next."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class FullDisk:
    """All workers are told which file could not be written, and the checkpoint that was there resumes."""

    name = "disk"
    what = "a disk that is full for one worker (RLIMIT_FSIZE); then two resume"

    def draw(self, choice: random.Random, number: int) -> dict[str, Any]:
        """Which system, whose disk, how full."""
        system = choice.choice(_SYSTEMS)
        rank = 0 if system == "ddp" else choice.randint(0, 1)  # the other writes nothing
        return {"system": system, "rank": rank, "full": choice.random()}

    def run(self, drawn: dict[str, Any], folder: Path, patience: float) -> Verdict:
        """Fills the disk after the first save."""
        checkpoints = folder / "checkpoints"
        recipe = Recipe(drawn["system"], 4 * SAVES_EVERY, workers=2, checkpoints=checkpoints)

        def work(rank: int, told: dict[str, Any]) -> None:
            fills = []
            if rank == drawn["rank"]:
                # the main file, and a part, are larger than the weights
                size = int(_LEAST + drawn["full"] * (4 * 5_000 - _LEAST))
                fills = [Fills(SAVES_EVERY + 1, size, folder)]
            train(recipe, fills, told)

        ends = Job(work, 2, folder).run(_LIMIT_S)
        for end in ends:
            if drawn["system"] == "ddp" and end.rank != drawn["rank"] and "WorkerLostError" in end.raised:
                continue  # as under plain DDP: the error is the writer's alone
            if "OSError" not in end.raised or recipe.newest.name not in end.said:
                return Verdict(False, f"rank {end.rank}: {end.how}: {end.said:.200}")
        problem = orphans(recipe.newest) or resumption(recipe, folder)
        return Verdict(problem is None, problem or "OSError with the file on all; the old checkpoint resumes")
