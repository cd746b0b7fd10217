"""Damaged checkpoints: parts, and the entry of the engine. They are refused by all workers alike, or do no harm."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lab.attack.job import Compares, Recipe, train
from lab.attack.lost import resumed_problem
from lab.attack.trial import Verdict
from lab.attack.workers import End, Job
from lightning_safusion.integration.checkpoint.parts import ENTRY, dump

_STEPS, _LIMIT_S = 5, 40.0
_SYSTEMS = ("allgather", "sharded", "decoupled")
#: Values that are no entry's: of another type, or no number.
_WRONG: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "a text": lambda: "x",
    "-5": lambda: -5,
    "nan": lambda: float("nan"),
    "an empty list": list,
    "an empty table": dict,
    "a table": lambda: {"x": 1},
    "a list of numbers": lambda: [1, 2, 3],
    "a tensor": lambda: torch.zeros(3),
}


class DamagedPart:
    """The file of one worker's residual, or what a faulty program would have written there."""

    name = "part"
    what = "a worker's part of a checkpoint: bits, ends, content, missing, swapped"

    def draw(self, choice: random.Random, number: int) -> dict[str, Any]:
        """Which system, which damage, of whose part, where."""
        kind = choice.choice(("flip", "truncate", "empty", "missing", "swap", "nan", "inf", "shape", "value", "value"))
        return {
            "system": choice.choice(_SYSTEMS),
            "kind": kind,
            "rank": choice.randint(0, 1),
            "where": choice.random(),
            "value": choice.choice(list(_WRONG)),
        }

    def run(self, drawn: dict[str, Any], folder: Path, patience: float) -> Verdict:
        """Saves, damages, resumes."""
        recipe = Recipe(drawn["system"], _STEPS, workers=2, checkpoints=folder / "checkpoints")
        if problem := _saved(recipe, folder):
            return Verdict(False, problem)
        kind, rank, where = drawn["kind"], drawn["rank"], drawn["where"]
        files = sorted(Path(f"{recipe.newest}.safusion").iterdir())
        if len(files) != 2:
            return Verdict(False, f"there are {len(files)} parts of 2 workers")
        if kind in ("flip", "truncate", "empty", "missing", "swap"):
            _damage(files, kind, rank, where)
        else:
            _rewrite(recipe.newest, files, rank, partial(_change, kind=kind, where=where, value=drawn["value"]))
        return _resumed(recipe, folder)


class DamagedEntry:
    """What the main checkpoint has of the engine."""

    name = "entry"
    what = "the engine's entry in a checkpoint: a field missing or of another type"

    def draw(self, choice: random.Random, number: int) -> dict[str, Any]:
        """Which system, which field, which value."""
        return {
            "system": choice.choice(_SYSTEMS),
            "where": choice.random(),
            "value": choice.choice(["missing", *_WRONG]),
        }

    def run(self, drawn: dict[str, Any], folder: Path, patience: float) -> Verdict:
        """Saves, damages, resumes."""
        recipe = Recipe(drawn["system"], _STEPS, workers=2, checkpoints=folder / "checkpoints")
        if problem := _saved(recipe, folder):
            return Verdict(False, problem)
        checkpoint = torch.load(recipe.newest, weights_only=False)
        _spoil(checkpoint[ENTRY], drawn["where"], drawn["value"])
        torch.save(checkpoint, recipe.newest)
        return _resumed(recipe, folder)


def _saved(recipe: Recipe, folder: Path) -> str | None:
    """Trains until there is a checkpoint; what is wrong with that."""
    ends = Job(lambda rank, told: train(recipe, [], told), 2, folder).run(_LIMIT_S)
    bad = [end for end in ends if end.how != "finished"]
    return f"the job itself failed: {bad[0].how}: {bad[0].said:.200}" if bad else None


def _damage(files: Sequence[Path], kind: str, rank: int, where: float) -> None:
    file, other = files[rank], files[1 - rank]
    content = bytearray(file.read_bytes())
    if kind == "flip":
        bit = int(where * 8 * len(content))
        content[bit >> 3] ^= 1 << (bit & 7)
        file.write_bytes(content)
    elif kind == "truncate":
        file.write_bytes(content[: int(where * len(content))])
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "missing":
        file.unlink()
    else:
        file.write_bytes(other.read_bytes())
        other.write_bytes(content)


def _rewrite(path: Path, files: Sequence[Path], rank: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes a part, and its digest in the entry with it, as a faulty program would have written both."""
    checkpoint = torch.load(path, weights_only=False)
    part = torch.load(files[rank], weights_only=True)
    change(part)
    with files[rank].open("wb") as file:
        checkpoint[ENTRY]["digests"][rank] = dump(part, file)
    torch.save(checkpoint, path)


def _change(part: dict[str, Any], kind: str, where: float, value: str) -> None:
    if kind == "value":
        _spoil(part, where, value)
        return
    tensors: dict[str, Any] = next(iter(part["memory"].values()), {})
    if not tensors:  # the engine holds nothing back
        return
    name = list(tensors)[int(where * len(tensors))]
    if kind == "shape":
        tensors[name] = torch.ones(3, 5, 7)
    else:
        tensors[name] = torch.full_like(tensors[name], float(kind))


def _spoil(table: dict[str, Any], where: float, value: str) -> None:
    """Gives a field of a table, or of a table in it, another value, or takes it away."""
    places = [(table, key) for key in table]
    places += [(inner, key) for inner in table.values() if isinstance(inner, dict) for key in inner]
    owner, key = places[int(where * len(places))]
    if value == "missing":
        del owner[key]
    else:
        owner[key] = _WRONG[value]()


def _resumed(recipe: Recipe, folder: Path) -> Verdict:
    """Resumes from the damaged checkpoint, and judges that."""
    resumed, held = recipe.resumed(), folder / "checkpoints"

    def work(rank: int, told: dict[str, Any]) -> None:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            train(resumed, [Compares(held, told)], told)
        told["warned"] = any(f"resumes from {resumed.newest} with differences" in str(each.message) for each in said)

    ends = Job(work, 2, folder / "resumed").run(_LIMIT_S)
    return judged(ends, resumed.newest, bool(ends[0].told.get("warned")))


def judged(ends: Sequence[End], path: Path, warned: bool) -> Verdict:
    """Whether a damaged checkpoint was refused, with its name and by all workers alike, or has done no harm.

    Args:
        ends: Of the workers that have resumed.
        path: Of the checkpoint.
        warned: A line has said what could not be resumed.
    """
    if any(end.code is None for end in ends):
        return Verdict(False, "hung: " + ", ".join(end.how for end in ends))
    if all(end.how == "finished" for end in ends):
        memories = {end.told["memory"] for end in ends}
        problem = resumed_problem(ends, path, [each for each in memories if "not what was saved" not in each])
        if problem is None and len({("empty" in each) for each in memories}) > 1:
            problem = f"workers have decided differently: {sorted(memories)}"
        if problem is None and not warned and memories != {"as saved"}:
            problem = f"in silence: {sorted(memories)}"
        return Verdict(
            problem is None, problem or ("resumed as saved" if memories == {"as saved"} else "told, begins empty")
        )
    said = {end.said for end in ends}
    if len(said) > 1 or len({end.how for end in ends}) > 1:
        return Verdict(
            False, "workers have ended differently: " + "; ".join(f"{end.how}: {end.said:.150}" for end in ends)
        )
    named = path.name in ends[0].said
    return Verdict(
        named, "refused by all" if named else f"refused without its name: {ends[0].how}: {ends[0].said:.200}"
    )
