"""Workers that are killed, stopped, fail or are asked to end, somewhere in a job."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lab.attack.faults import SPOTS, Fault
from lab.attack.job import SYSTEMS, Compares, Recipe, train
from lab.attack.trial import TIMEOUT, Verdict
from lab.attack.workers import End, Job, hit_at

_STEPS, _LATEST = 60, 9
_LIMIT_S = 60.0
_PLACES = re.compile(r"step \d+|batch \d+|epoch \d+|lost during \S+|could (not )?be (saved|written)")
_LOST = ("WorkerLostError", "OutOfStepError")
_SIGNALS = {"int": ("KeyboardInterrupt", "SystemExit"), "term": ("SIGTERMException", "SystemExit")}
_ENDED_BY = {"int": "SIGINT", "term": "SIGTERM"}


class LostWorker:
    """One worker is hit; the others end soon and say where; the newest checkpoint resumes.

    Args:
        name: Of the attack.
        what: For the table.
        action: What happens to the worker.
    """

    def __init__(self, name: str, what: str, action: str) -> None:
        self.name, self.what, self.action = name, what, action

    def draw(self, choice: random.Random, number: int) -> dict[str, Any]:
        """Where, whom, when, in which system."""
        spot = choice.choice([name for name, spot in SPOTS.items() if self.action in spot.actions])
        system = choice.choice(list(SPOTS[spot].systems))
        last = SYSTEMS[system].workers - 1
        return {
            "action": self.action,
            "spot": spot,
            "system": system,
            "rank": 0 if SPOTS[spot].main else choice.randint(0, last),
            "step": choice.randint(4, _LATEST),
            "call": 0 if SPOTS[spot].once else choice.choice((0, 0, 1)),
            "asynchronous": choice.random() < 0.3,
        }

    def run(self, drawn: dict[str, Any], folder: Path, patience: float) -> Verdict:
        """Attacks, then resumes."""
        recipe = Recipe(drawn["system"], _STEPS, checkpoints=folder / "checkpoints", asynchronous=drawn["asynchronous"])
        fault = Fault.of(drawn, folder)

        def work(rank: int, told: dict[str, Any]) -> None:
            train(recipe, [fault.install()] if rank == fault.rank else [], told)

        workers, nodes = recipe.size
        ends = Job(work, workers, folder, nodes).run(_LIMIT_S, TIMEOUT + patience + 5, [fault.rank])
        verdict = judged(ends, fault, hit_at(folder), patience)
        if verdict.held and not SPOTS[fault.spot].begins:
            problem = resumption(recipe, folder)
            if problem:
                return Verdict(False, problem)
        return verdict


def judged(ends: Sequence[End], fault: Fault, hit: float | None, patience: float) -> Verdict:
    """Whether a job has ended as it should, once one of its workers was hit.

    A worker that is stopped is noticed by the timeout of the process group.

    Args:
        ends: Of all workers.
        fault: What hit one.
        hit: When.
        patience: Seconds in which the others have to end.
    """
    if hit is None:
        return Verdict(False, f"the attack never came ({', '.join(end.how for end in ends)})")
    others = [end for end in ends if end.rank != fault.rank]
    defers = SPOTS[fault.spot].defers and any(end.told.get("engine") for end in ends)
    late = [end for end in ends if end.code is None]
    seconds = max(end.at for end in others) - hit
    if late:
        return Verdict(False, f"rank {late[0].rank} hung", seconds=seconds)
    # where signals are Lightning's own, its handlers call collectives in the middle of others
    waits = fault.action == "stop" or (fault.action in _SIGNALS and not defers)
    most = patience + (TIMEOUT if waits else 0.0)
    if seconds > most:
        return Verdict(False, f"a survivor ended after {seconds:.1f} s, more than {most:g}", seconds=seconds)
    if fault.action in _SIGNALS and all(_by_signal(end, fault.action) for end in ends):
        steps = {end.told.get("step") for end in ends if end.code not in (-2, -15)}
        if len(steps) > 1:
            return Verdict(False, f"ranks ended at different steps: {sorted(map(str, steps))}", seconds=seconds)
        return Verdict(True, "all by the signal, at one step", seconds=seconds)
    if fault.action in _SIGNALS and defers:
        return Verdict(False, f"not all ended by the signal: {', '.join(end.how for end in ends)}", seconds=seconds)
    for end in others:
        if problem := _problem(end, fault):
            return Verdict(False, f"rank {end.rank} {problem}", seconds=seconds)
    return Verdict(True, " and ".join(sorted({end.how for end in others})), seconds=seconds)


def _by_signal(end: End, action: str) -> bool:
    return end.how == _ENDED_BY[action] or any(name in end.raised for name in _SIGNALS[action])


def _problem(end: End, fault: Fault) -> str | None:
    """What is wrong with the end of a survivor."""
    if not end.raised:
        return f"ended without an error: {end.how}"
    named = any(name in end.raised for name in _LOST)
    told = fault.action in ("raise", "exit") and f"rank {fault.rank}" in end.said  # the victim itself could tell
    if not named and not told:
        return f"ended by another error: {end.how}: {end.said:.200}"
    return None if _PLACES.search(end.said) else f"was not told the step or stage: {end.said:.200}"


def resumption(recipe: Recipe, folder: Path) -> str | None:
    """Resumes from the newest checkpoint with two workers; what is wrong with that, None if nothing is."""
    if not recipe.newest.exists():
        return "there is no checkpoint"
    resumed = recipe.resumed()
    held = recipe.checkpoints
    assert held is not None

    def work(rank: int, told: dict[str, Any]) -> None:
        train(resumed, [Compares(held, told)], told)

    ends = Job(work, 2, folder / "resumed").run(_LIMIT_S)
    return resumed_problem(ends, resumed.newest)


def resumed_problem(ends: Sequence[End], path: Path, memories: Sequence[str] = ("as saved", "none")) -> str | None:
    """What is wrong with a training that was resumed, None if nothing is.

    Args:
        ends: Of its workers.
        path: Of the checkpoint that it has replaced.
        memories: What may have become of the residuals.
    """
    for end in ends:
        if end.how != "finished":
            return f"resumption: rank {end.rank} {end.how}: {end.said:.200}"
        if end.told["memory"] not in memories:
            return f"resumption: rank {end.rank}: {end.told['memory']}"
    if len({end.told["digest"] for end in ends}) > 1:
        return "resumption: replicas differ"
    return orphans(path)


def orphans(path: Path) -> str | None:
    """Files beside a checkpoint that are none of its own, None if there are none."""
    entry = torch.load(path, weights_only=False).get("safusion")
    own = {f"rank_{rank:05d}-{entry['nonce']}.pt" for rank in range(entry["world_size"])} if entry else set()
    beside = path.with_name(f"{path.name}.safusion")
    found = {file.name for file in beside.iterdir()} if beside.exists() else set()
    extra = sorted(found ^ own) + sorted(file.name for file in path.parent.glob("*.tmp"))
    return f"files beside the resumed checkpoint: {', '.join(extra)}" if extra else None
