"""Every row of the table of systems, in real training.

Covers: each row trains two workers, reports figures, keeps replicas as its flag says; sparse ones send little, and of
    every tensor before fusion; dense ones give what DDP gives; the plain ones are refused parts that they have none
    of; the printed table.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_safusion import SYSTEMS, SAFusionStrategy
from lightning_safusion.cli import main
from lightning_safusion.systems import EngineSystem
from tests.models import TinyClassifier, classification, trainer
from tests.process_group import run_launched
from tests.quick import quick_of


def fit(system: str | None, **options: Any) -> tuple[list[Tensor], list[float], dict[str, Any]]:
    """Final weights, losses and figures of this worker; plain DDP for None."""
    strategy = "ddp" if system is None else SAFusionStrategy(system=system, **options)
    model = TinyClassifier()
    trainer(strategy, max_epochs=2).fit(model, classification())
    report = strategy.report() if isinstance(strategy, SAFusionStrategy) else {}
    return [param.detach().clone() for param in model.parameters()], model.losses, report


ENGINE = {name: row for name, row in SYSTEMS.items() if isinstance(row, EngineSystem)}
SPARSE = [name for name, row in ENGINE.items() if row.sparse]
# rows that go on with plain DDP where that is faster, held to what they send
HELD = {f"{name}, held": name for name in SPARSE if ENGINE[name].collective == "auto"}


# the papers' own, those that are compared with DDP below, and one of each other kind; slow tests train the others
USUAL = (
    *("safusion", "saf-pooled", "saf-inter", "saf-naive", "fgbuff", "ssfusion", "adtopk", "oktopk", "behind", "easgd"),
    *("ddp", "dear", "wfbp-dense", "ddp-bf16", "ddp-fp16", "powersgd", "powersgd-rank4"),
)


def fit_usual(rank: int) -> dict[str | None, Any]:
    return {system: fit(system) for system in (None, *USUAL)}


def fit_others(rank: int) -> dict[str | None, Any]:
    return {system: fit(system) for system in SYSTEMS if system not in USUAL}


def fit_held(rank: int) -> dict[str, Any]:
    return {label: fit(system, collective="allgather") for label, system in HELD.items()}


@pytest.fixture(scope="module")
def results() -> list[dict[str | None, Any]]:
    return run_launched(2, fit_usual, timeout=240)


@pytest.fixture(scope="module")
def others() -> list[dict[str | None, Any]]:
    return run_launched(2, fit_others, timeout=240)


@pytest.fixture(scope="module")
def held() -> list[dict[str, Any]]:
    return run_launched(2, fit_held, timeout=240)


@pytest.mark.parametrize("system", quick_of(SYSTEMS, USUAL))
def test_every_system_trains(request: pytest.FixtureRequest, system: str) -> None:
    results = request.getfixturevalue("results" if system in USUAL else "others")
    (first, losses, report), (second, _, _) = (result[system] for result in results)
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    assert report["system"] == system
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    if system in ENGINE and ENGINE[system].collective != "auto":
        assert report["plain_ddp"] is None
        assert report["windows"] == 40
        assert report["bytes_sent"] > 0


@pytest.mark.parametrize(
    "label",
    quick_of([*(name for name in SPARSE if name not in HELD.values()), *HELD], USUAL),
)
def test_sparse_systems_send_little_and_ahead_of_fusion_of_everything(
    request: pytest.FixtureRequest, label: str
) -> None:
    results = request.getfixturevalue("held" if label in HELD else "results" if label in USUAL else "others")
    (first, losses, report), (second, _, _) = (result[label] for result in results)
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert report["windows"] == 40
    assert report["bytes_sent"] < 0.35 * report["dense_bytes"]
    assert report["tensors"] == sum(report["plan"]) == 7
    assert report["tensors_missing"] == 0 or ENGINE[HELD.get(label, label)].scope == "group"


@pytest.mark.parametrize(("system", "tolerance"), [("ddp", 0), ("dear", 1e-6), ("wfbp-dense", 1e-6)])
def test_dense_systems_give_what_ddp_gives(results: list[dict[str | None, Any]], system: str, tolerance: float) -> None:
    for ours, theirs in zip(results[0][system][0], results[0][None][0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("system", ["ddp-bf16", "ddp-fp16"])
def test_rounded_systems_give_nearly_that(results: list[dict[str | None, Any]], system: str) -> None:
    assert not torch.equal(results[0][system][0][0], results[0][None][0][0])
    assert sum(results[0][system][1]) == pytest.approx(sum(results[0][None][1]), rel=0.02)


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
    def run(rank: int) -> tuple[list[Tensor], list[float]]:
        model = Scalars()
        # the first ten steps are dense
        trainer(SAFusionStrategy(system=system), max_steps=14).fit(model, classification())
        return [param.detach() for param in model.parameters()], model.losses

    (ours, losses), (theirs, _) = run_launched(2, run)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert ours[1] != 1.0  # the scalar has been trained
    assert len(losses) == 14
    assert losses[-1] < losses[0]


def test_powersgd_of_a_higher_rank_is_nearer_to_ddp(results: list[dict[str | None, Any]]) -> None:
    def apart(system: str) -> float:
        pairs = zip(results[0][system][0], results[0][None][0], strict=True)
        return float(sum((ours - theirs).square().sum() for ours, theirs in pairs))

    assert 0 < apart("powersgd-rank4") < apart("powersgd")


def test_parts_that_plain_systems_have_none_of_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match="'powersgd' .* has no compressor, wire"):
        SAFusionStrategy(system="powersgd", compressor="topk", wire="bf16")
    with pytest.raises(MisconfigurationException, match="has no transport"):
        SAFusionStrategy(system="easgd", transport="horovod")


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["systems"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in SYSTEMS)
