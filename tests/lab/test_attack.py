"""Attacks on real jobs: what is drawn depends on the seed alone, endings are judged, and a short run holds."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Mapping
from inspect import signature
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from rich.console import Console

from lab.attack import damage, device_messages, disagreement, links, lost, messages, restarts
from lab.attack.apart import ApartError, run_apart
from lab.attack.faults import ACTIONS, SPOTS, Fault
from lab.attack.job import compared
from lab.attack.sealed import missed_damage
from lab.attack.study import ATTACKS, attack, chosen_of, result, table, turns
from lab.attack.trial import TIMEOUT, Outcome, Verdict, choice_of
from lab.attack.workers import End, Job
from lightning_safusion import SAFusionStrategy
from tests.process_group import run_alone

LOST = "a worker was lost during the backward pass in step 4, epoch 0"


def end(rank: int, how: str, at: float = 101.0, said: str = LOST, code: int | None = 1, **told: Any) -> End:
    raised = () if how == "finished" else (how, "RuntimeError")
    return End(rank, 0 if how == "finished" else code, at, {"step": 4, **told}, raised, said)


def test_what_is_drawn_depends_on_kind_and_seed_alone() -> None:
    for each in ATTACKS:
        drawn = [each.draw(choice_of(each.name, seed), seed) for seed in range(30)]
        assert drawn == [each.draw(choice_of(each.name, seed), seed) for seed in range(30)]
        assert len({json.dumps(one) for one in drawn}) > 3
    assert choice_of("kill", 1).random() != choice_of("stop", 1).random()


def test_every_kind_comes_in_its_turn_and_a_trial_is_repeated_by_its_seed() -> None:
    chosen = chosen_of("kill|sig*")
    assert [each.name for each in chosen] == ["kill", "sigint", "sigterm"]
    assert [(each.name, seed) for each, seed in turns(chosen, 5, 2, 0.0)] == [
        (each.name, seed) for seed in (5, 6) for each in chosen
    ]
    assert len(list(turns(chosen, 0, 0, 0.0))) == 3  # each once, whatever the minutes
    assert next(turns(chosen[:1], 6, 1, 0.0)) == next(islice(turns(chosen, 5, 2, 0.0), 3, None))
    with pytest.raises(ValueError, match="no attack is called 'kil'.* Did you mean 'kill'"):
        chosen_of("kil")


def test_every_action_has_places_and_systems() -> None:
    for action in ACTIONS:
        assert len([spot for spot in SPOTS.values() if action in spot.actions]) > 10


@pytest.mark.parametrize(
    ("action", "ends", "wrong"),
    [
        ("kill", [end(0, "WorkerLostError"), end(1, "", code=-9)], None),
        ("kill", [end(0, "WorkerLostError", at=103.0), end(1, "", code=-9)], "after 3.0 s, more than 2"),
        ("stop", [end(0, "WorkerLostError", at=100 + TIMEOUT + 1), end(1, "", code=-9)], None),
        ("stop", [end(0, "WorkerLostError", code=None), end(1, "", code=-9)], "rank 0 hung"),
        ("kill", [end(0, "WorkerLostError", said="Connection closed"), end(1, "", code=-9)], "not told the step"),
        ("kill", [end(0, "ValueError"), end(1, "", code=-9)], "another error"),
        ("kill", [end(0, "finished"), end(1, "", code=-9)], "without an error"),
        ("raise", [end(0, "SomeError", said="rank 1 could not select in step 4"), end(1, "Injected")], None),
        ("term", [end(0, "SIGTERMException"), end(1, "SIGTERMException")], None),
        ("term", [end(0, "SIGTERMException"), end(1, "SIGTERMException", step=5)], "different steps"),
        ("int", [end(0, "WorkerLostError", engine=True), end(1, "KeyboardInterrupt")], "not all ended by the signal"),
        ("int", [end(0, "WorkerLostError"), end(1, "KeyboardInterrupt")], None),  # plain DDP
    ],
)
def test_endings_are_judged(action: str, ends: list[End], wrong: str | None) -> None:
    fault = Fault(action, "before a forward pass", 1, 4, 0, Path())
    verdict = lost.judged(ends, fault, 100.0, 2.0)
    assert verdict.held is (wrong is None)
    assert wrong is None or wrong in verdict.reason
    assert lost.judged(ends, fault, None, 2.0).held is False


def test_resumptions_damage_and_differences_are_judged(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    torch.save({"safusion": {"nonce": "ab", "world_size": 1}}, path)
    beside = tmp_path / "last.ckpt.safusion"
    beside.mkdir()
    (beside / "rank_00000-ab.pt").touch()

    def resumed(*memories: str, digest: str = "a") -> list[End]:
        return [end(rank, "finished", memory=each, digest=digest) for rank, each in enumerate(memories)]

    assert lost.resumed_problem(resumed("as saved", "as saved"), path) is None
    assert lost.resumed_problem(resumed("as saved", "empty"), path) == "resumption: rank 1: empty"
    assert damage.judged(resumed("empty", "empty"), path, True).held
    assert not damage.judged(resumed("empty", "empty"), path, False).held
    assert not damage.judged(resumed("empty", "as saved"), path, True).held
    assert damage.judged([end(rank, "ValueError", said="last.ckpt is damaged") for rank in (0, 1)], path, False).held
    assert not damage.judged([end(rank, "ValueError", said=f"last.ckpt {rank}") for rank in (0, 1)], path, False).held
    (beside / "rank_00000-cd.pt").touch()
    assert "rank_00000-cd.pt" in str(lost.resumed_problem(resumed("as saved", "as saved"), path))
    found = "different settings: density: rank 0 has 0.1, rank 1 has 0.2"
    assert disagreement.judged([end(rank, "RuntimeError", said=found) for rank in (0, 1)], "density").held
    assert not disagreement.judged([end(rank, "finished", digest="a") for rank in (0, 1)], "density").held
    assert disagreement.judged([end(rank, "finished", digest="a") for rank in (0, 1)], "timeout").held
    gone = [end(rank, "WorkerLostError") for rank in (0, 1)]
    assert links.judged(gone, "for good", 99.0, 2.0).held
    assert not links.judged(gone, "a while", 99.0, 2.0).held


def test_restarts_are_judged_beside_stock_ddp() -> None:
    def ended(problem: str | None = None, continues: int = 10, digest: str = "ab") -> restarts.Ended:
        lines = ("rank 1 dies at step 17", f"rank 0 continues at step {continues}", f"rank 0 of 2 ends with {digest}")
        return restarts.Ended(problem, "\n".join(lines))

    held = restarts.judged(ended(), ended(), {"ab"})
    assert (held.held, held.repeated) == (True, 7)
    assert result([held, held]).startswith("7 to 7 steps repeated; ends with the same bits; stock DDP does (2)")
    assert restarts.judged(ended("hung"), ended("hung"), {"ab"}).held
    assert restarts.judged(ended(), ended("hung"), None).held
    assert not restarts.judged(ended("hung"), ended(), {"ab"}).held
    assert not restarts.judged(ended(digest="cd"), ended(), {"ab"}).held
    assert not restarts.judged(ended(continues=0), ended(), {"ab"}).held
    assert not restarts.judged(restarts.Ended(None, ""), ended(), {"ab"}).held


def test_memories_are_compared_with_their_own_or_with_the_mean() -> None:
    def memory(value: float) -> Mapping[str, Any]:
        return {"residual": {"w": torch.full((3,), float(value))}}

    assert compared(memory(1), [memory(1), memory(3)], 0, 2) == "as saved"
    assert compared(memory(2), [memory(1), memory(2), memory(3)], 0, 2) == "as saved"
    assert compared(memory(0), [memory(1), memory(3)], 0, 2) == "empty"
    assert compared(memory(3), [memory(1), memory(3)], 0, 2) == "residual of w is not what was saved"
    assert compared(None, [memory(1)], 0, 1) == "none"


def test_every_argument_has_another_value() -> None:
    """A new one is to be attacked as well."""
    own = set(signature(SAFusionStrategy.__init__).parameters) - {"self", "kwargs"}
    assert own == disagreement.ARGUMENTS.keys() | disagreement.ELSEWHERE.keys()
    assert disagreement.TRAINER.keys() <= signature(Trainer.__init__).parameters.keys()
    assert {len(each.cases) > 8 for each in disagreement.DISAGREEMENTS} == {True}


@pytest.mark.parametrize(("reader", "number"), [(messages, 100), (device_messages, 20)])
def test_damaged_messages_are_read_alike(reader: ModuleType, number: int) -> None:
    if reader is device_messages:
        pytest.importorskip("triton")
    read = reader.read_damaged(3, number)
    assert read["messages"] == number
    assert 0 < read["refused"] < number
    assert read["differ"] == []


def test_damaged_messages_with_checksums_are_not_read() -> None:
    assert missed_damage(3, 200) == 0


def test_a_python_apart_tells_what_it_has_found_or_why_it_has_not() -> None:
    assert run_apart("operator:add", 2, 3, limit=60.0) == 5
    with pytest.raises(ApartError, match="(?s)ended with 1: .*ZeroDivisionError"):
        run_apart("operator:truediv", 1, 0, limit=60.0)


def test_the_table_never_shows_a_row_as_done_that_was_not_run() -> None:
    verdicts = {"kill": Verdict(False, "rank 0 hung"), "link": Verdict(None, "needs root and ip netns", 0)}
    outcomes = [Outcome(name, 7, {}, verdict) for name, verdict in verdicts.items()]
    console = Console(width=250, record=True, file=io.StringIO())
    console.print(table(chosen_of("kill|link|stop"), outcomes))
    shown = console.export_text()
    assert "| NOT HELD: rank 0 hung (1)" in shown
    assert "not run: needs root and ip netns" in shown
    assert "not run: stopped before" in shown
    assert result([Verdict(True, "a", seconds=0.5), Verdict(True, "b", seconds=1.5)]).startswith(
        "ended in 0.5 to 1.5 s"
    )
    assert outcomes[0].record()["again"] == "python -m lab attack --only kill --seed 7 --trials 1"


def test_workers_that_hang_are_ended_and_none_is_left(tmp_path: Path) -> None:
    def work(rank: int, told: dict[str, Any]) -> None:
        told["pid"] = rank
        if rank == 1:
            raise ValueError("broken")
        signal.pause()

    hung, failed = run_alone(lambda: Job(work, 2, tmp_path).run(limit=2.0))
    assert (hung.how, failed.how, failed.said, failed.told) == ("hung", "ValueError", "broken", {"pid": 1})


@pytest.mark.slow
def test_a_short_attack_holds(tmp_path: Path) -> None:
    kinds = "kill|raise|sigterm|part|entry|flip|message|argument|disk|restart"
    run_alone(lambda: attack(output=tmp_path, only=kinds, trials=1, seed=3, patience=10.0), timeout=500)
    records = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert [record["attack"] for record in records] == kinds.split("|")
    assert all(record["held"] for record in records)
