"""Every bit of a checkpoint's parts in turn: two workers read them, and decide alike."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lab.attack.job import Recipe, memory_of, train
from lab.attack.trial import Verdict
from lab.attack.workers import Job
from lightning_safusion.integration.checkpoint.parts import ENTRY
from lightning_safusion.integration.checkpoint.restoring import restore

_FLIPS, _WHOLE = 1000, 100
_LIMIT_S = 300.0
_SYSTEMS = ("allgather", "sharded", "decoupled", "default")


class FlippedBits:
    """A bit of a part is flipped, both workers restore from the checkpoint, and the bit is flipped back."""

    name = "flip"
    what = "one bit of a worker's part of a checkpoint flipped, while two workers restore from it again and again"

    def draw(self, choice: random.Random, number: int) -> dict[str, Any]:
        """Which system, and the seed of the bits."""
        return {"system": choice.choice(_SYSTEMS), "flips": _FLIPS, "seed": choice.getrandbits(32)}

    def run(self, drawn: dict[str, Any], folder: Path, patience: float) -> Verdict:
        """Trains and saves; then flips."""
        recipe = Recipe(drawn["system"], 5, workers=2, checkpoints=folder / "checkpoints")

        def work(rank: int, told: dict[str, Any]) -> None:
            train(recipe, [_Flips(recipe.newest, drawn["seed"], drawn["flips"], told)], told)

        ends = Job(work, 2, folder).run(_LIMIT_S)
        if bad := [end for end in ends if end.how != "finished"]:
            return Verdict(False, f"{bad[0].how}: {bad[0].said:.200}")
        wrong: list[str] = sum((end.told["wrong"] for end in ends), [])
        return Verdict(not wrong, wrong[0] if wrong else "refused by all; the whole one is restored", drawn["flips"])


class _Flips(Callback):
    """At the end of a training: flips bits of the parts of its checkpoint.

    Args:
        path: Of the checkpoint.
        seed: Of the bits, the same on all workers.
        number: How many.
        told: Takes ``"wrong"``, what did not hold.
    """

    def __init__(self, path: Path, seed: int, number: int, told: dict[str, Any]) -> None:
        self.path, self.choice, self.number = path, random.Random(seed), number  # noqa: S311  # no secret
        self.wrong: list[str] = []
        told["wrong"] = self.wrong

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Flips."""
        rank = trainer.global_rank
        files = sorted(Path(f"{self.path}.safusion").iterdir())
        entry = torch.load(self.path, weights_only=False)[ENTRY]
        content = [bytearray(file.read_bytes()) for file in files]
        self._restore(trainer, entry)
        saved = memory_of(trainer)
        for number in range(self.number):
            if number % _WHOLE == 0 and (self._restore(trainer, entry) or not _equal(saved, memory_of(trainer))):
                self.wrong.append(f"flip {number}: the whole checkpoint is not restored")
            whose = self.choice.randrange(len(files))
            bit = self.choice.randrange(8 * len(content[whose]))
            if whose == rank:  # each worker reads its own
                _flip(files[whose], content[whose], bit)
            notes = self._restore(trainer, entry)
            if f"{files[whose]} is damaged" not in "".join(notes):
                self.wrong.append(f"bit {bit} of the part of rank {whose} was not noticed: {notes}")
            if whose == rank:
                _flip(files[whose], content[whose], bit)

    def _restore(self, trainer: Trainer, entry: Mapping[str, Any]) -> list[str]:
        """What all workers say of it, which must be the same."""
        engine = trainer.strategy.engine  # type: ignore[attr-defined]  # of this package
        notes = restore(engine, entry["settings"], entry, self.path)
        said: list[list[str]] = engine.transport.gather_objects(notes)
        if any(each != notes for each in said):
            self.wrong.append(f"workers have decided differently: {said}")
        return notes


def _flip(file: Path, content: bytearray, bit: int) -> None:
    content[bit >> 3] ^= 1 << (bit & 7)
    with file.open("r+b") as out:
        out.seek(bit >> 3)
        out.write(content[bit >> 3 : (bit >> 3) + 1])


def _equal(one: Any, other: Any) -> bool:
    return all(torch.equal(one[name][key], other[name][key]) for name in one for key in one[name])
