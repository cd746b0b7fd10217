"""Every row of the table of systems, in real training: replicas are equal, sparse rows send little, and dense ones give
what DDP gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_safusion import SYSTEMS, SAFusionStrategy
from lightning_safusion.systems import EngineSystem
from tests.models import Fitted, TinyClassifier, distance, equal, fit, fit_both
from tests.process_group import run_launched
from tests.quick import quick_of

STEPS = 14  # PowerSGD approximates after the first ten
ENGINE = {name: row for name, row in SYSTEMS.items() if isinstance(row, EngineSystem)}
SPARSE = [name for name, row in ENGINE.items() if row.sparse]
# rows that go on with plain DDP where that is faster, held to what they send
HELD = {f"{name}, held": name for name in SPARSE if ENGINE[name].collective == "auto"}
SENDING = [*(name for name in SPARSE if name not in HELD.values()), *HELD]

# the papers' own, and those that are compared with DDP below; slow tests train the others (the default is in all tests)
USUAL = ("safusion", "saf-inter", "saf-naive", "fgbuff", "ssfusion", "adtopk", "oktopk", "behind")
DENSE = (None, "ddp", "dear", "easgd", "wfbp-dense", "ddp-bf16", "ddp-fp16", "powersgd", "powersgd-rank4")
OTHERS = tuple(system for system in SYSTEMS if system not in (*USUAL, *DENSE))

Results = Callable[[str | None], list[Fitted]]


@pytest.fixture(scope="module")
def results() -> Results:
    """What both workers have ended with. Systems of a group are trained together, when one of them is asked for."""
    trained: list[dict[str | None, Any]] = [{}, {}]

    def of(system: str | None) -> list[Fitted]:
        if system not in trained[0]:
            (group,) = (names for names in (USUAL, DENSE, OTHERS, tuple(HELD)) if system in names)
            for rank, found in enumerate(run_launched(2, fit_all, group, timeout=240)):
                trained[rank] |= found
        return [each[system] for each in trained]

    return of


def fit_all(rank: int, systems: Sequence[str | None]) -> dict[str | None, Any]:
    def strategy(name: str | None) -> Any:
        options = {"collective": "allgather"} if name in HELD else {}
        return "ddp" if name is None else SAFusionStrategy(system=HELD.get(name, name), **options)

    return {name: fit(strategy(name), max_steps=STEPS) for name in systems}


@pytest.mark.costly(reason="the first of them trains all systems of the quick tests")
@pytest.mark.parametrize("name", quick_of([*SYSTEMS, *HELD], (*USUAL, *DENSE)))
def test_every_system_trains(results: Results, name: str) -> None:
    (first, losses, report), (second, _, _) = results(name)
    system = HELD.get(name, name)
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    assert report["system"] == system
    assert equal(first, second)
    if name in HELD or (name in ENGINE and ENGINE[name].collective != "auto"):
        assert report["plain_ddp"] is None
        assert report["windows"] == STEPS
        assert report["bytes_sent"] > 0
    if name in SENDING:  # little, and of every tensor where selection is before fusion
        assert report["bytes_sent"] < 0.35 * report["dense_bytes"]
        assert report["tensors"] == sum(report["plan"]) == 7
        assert report["tensors_missing"] == 0 or ENGINE[system].scope == "group"


@pytest.mark.parametrize(("system", "tolerance"), [("ddp", 0), ("dear", 1e-6), ("wfbp-dense", 1e-6)])
def test_dense_systems_give_what_ddp_gives(results: Results, system: str, tolerance: float) -> None:
    assert distance(results(system)[0].weights, results(None)[0].weights) <= tolerance


@pytest.mark.parametrize("system", ["ddp-bf16", "ddp-fp16"])
def test_rounded_systems_give_nearly_that(results: Results, system: str) -> None:
    (rounded, losses, _), (exact, plain, _) = results(system)[0], results(None)[0]
    assert not torch.equal(rounded[0], exact[0])
    assert sum(losses) == pytest.approx(sum(plain), rel=0.02)


class Scalars(TinyClassifier):
    """A scalar, and a tensor without elements, among the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.empty.sum()


@pytest.mark.parametrize("system", ["powersgd", "powersgd-rank4"])
def test_powersgd_takes_scalars_and_tensors_without_elements(system: str) -> None:
    ours, theirs = fit_both(SAFusionStrategy(system=system), Scalars(), max_steps=STEPS)
    assert equal(ours.weights, theirs.weights)
    assert ours.weights[1] != 1.0  # the scalar has been trained
    assert len(ours.losses) == STEPS
    assert ours.losses[-1] < ours.losses[0]


def test_powersgd_of_a_higher_rank_is_nearer_to_ddp(results: Results) -> None:
    def apart(system: str) -> float:
        pairs = zip(results(system)[0].weights, results(None)[0].weights, strict=True)
        return float(sum((ours - theirs).square().sum() for ours, theirs in pairs))

    assert 0 < apart("powersgd-rank4") < apart("powersgd")


def test_parts_that_plain_systems_have_none_of_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match="'powersgd' .* has no compressor, wire"):
        SAFusionStrategy(system="powersgd", compressor="topk", wire="bf16")
    with pytest.raises(MisconfigurationException, match="has no transport"):
        SAFusionStrategy(system="easgd", transport="horovod")
    for system in ("ddp", "powersgd", "dear"):
        with pytest.raises(MisconfigurationException, match="works without the engine: it has no density"):
            SAFusionStrategy(system=system, density=0.1)
