"""ADTopk and SSFusion in real trainings on two ranks: the rows, and the options that make their variants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lab.probe import ConvergenceProbe
from lightning_safusion import ADTopk, SAFusionStrategy, Selective
from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.fusion import build
from tests.ledger import HeldBack, Ledger, assert_balanced
from tests.models import TinyClassifier, equal, fit
from tests.process_group import run_launched
from tests.quick import quick_of

SSFUSION = ("ssfusion-naive", "ssfusion-o", "ssfusion-i", "ssfusion")
JOBS: dict[str, dict[str, Any]] = {
    "adtopk": {"system": "adtopk"},
    "adtopk interleaved": {"system": "adtopk", "compressor": ADTopk(interleave=True)},
    "adtopk partial": {"system": "adtopk", "fusion": Selective(2)},
    "adtopk hybrid": {"system": "adtopk", "collective": "hybrid"},
    # with 20 buffers each of the seven tensors would be alone
    **{name: {"system": name, "fusion": Selective(2)} for name in SSFUSION},
}


QUICK = ("adtopk", "ssfusion")


class Books(Ledger):
    """Of parameters that may have no gradient of their own."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.local = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in pl_module.named_parameters()}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """What was delivered is all that is looked at."""


class Branches(TinyClassifier):
    """A frozen norm, a branch that only rank 1 takes, in every third step, and one that nobody takes."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1].requires_grad_(False)
        self.branch, self.nobody = nn.Linear(32, 10), nn.Linear(32, 10)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits = self(batch[0])
        if self.global_rank == 1 and batch_idx % 3 == 0:
            logits = logits + self.branch(batch[0])
        return nn.functional.cross_entropy(logits, batch[1])


class Overflowing(TinyClassifier):
    """One gradient of rank 1 is not finite in one step, which is then left out, as a user might."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.global_rank == 1 and batch_idx == 4 else loss

    def on_after_backward(self) -> None:
        if not all(p.grad is None or bool(p.grad.isfinite().all()) for p in self.parameters()):
            self.zero_grad()


def strategy(name: str, **options: Any) -> SAFusionStrategy:
    return SAFusionStrategy(**({"density": 0.05} | JOBS[name] | options))


STEPS = 9


def each(rank: int, names: Sequence[str]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in names:
        ledger, probe, held = Books(), ConvergenceProbe(every_n_steps=STEPS - 1), HeldBack()
        chosen = strategy(name, find_unused_parameters=True)
        branches = fit(chosen, Branches(), callbacks=[ledger, probe], limit_train_batches=STEPS)
        options: dict[str, Any] = {"callbacks": [held], "limit_train_batches": STEPS, "deterministic": True}
        plain = fit(strategy(name), **options)
        results[name] = {
            "ledger": ledger,
            "weights": branches.weights,
            "bad": fit(strategy(name), Overflowing(), limit_train_batches=7).weights,
            "losses": plain.losses,
            "report": plain.figures,
            "held": {key: float(value.abs().sum()) for key, value in held.held.items()},
            "figures": probe.latest.values(),
        }
    return results


def trained(names: Sequence[str]) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        free = LinearCost(0.0, 0.0)  # the thread takes every tensor that it may
        patch.setattr(build, "selection_costs", lambda *_: (free, free))
        return run_launched(2, each, names, timeout=240)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """What both ranks have ended with, of the rows themselves."""
    return trained(QUICK)


@pytest.fixture(scope="module")
def results(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same of all jobs."""
    others = trained([name for name in JOBS if name not in QUICK])
    return [own | other for own, other in zip(rows, others, strict=True)]


@pytest.mark.parametrize("name", quick_of(JOBS, QUICK))
def test_nothing_is_lost_and_replicas_are_equal(request: pytest.FixtureRequest, name: str) -> None:
    results = request.getfixturevalue("rows" if name in QUICK else "results")
    mine, theirs = (result[name] for result in results)
    names = [n for n, p in Branches().named_parameters() if p.requires_grad and not n.startswith("nobody")]
    assert_balanced(mine["ledger"], theirs["ledger"], to="delivered", names=names)
    for key in ("weights", "bad"):
        assert equal(mine[key], theirs[key])
        assert all(bool(a.isfinite().all()) for a in mine[key])
    assert sum(mine["losses"][-4:]) < sum(mine["losses"][:4])
    assert 0 < mine["figures"]["contraction"] < 1


def test_adtopk_sends_vectors_whole_and_the_same_from_every_row(rows: list[dict[str, Any]]) -> None:
    result = rows[0]["adtopk"]
    report = result["report"]
    assert report["plan"] == [1] * 7  # one message per tensor
    # rows of 32 and of 256 elements send 1 and 12
    sent = 256 * 1 + 10 * 12 + 256 + 256 + 256 + 10 + 1
    assert report["achieved_density"] * (256 * 32 + 10 * 256 + 779) == pytest.approx(sent)
    assert result["figures"]["coverage"] == 1
    vectors = [key for key in result["held"] if key not in ("net.0.weight", "net.3.weight")]
    assert {key: result["held"][key] for key in vectors} == dict.fromkeys(vectors, 0.0)
    assert result["held"]["net.0.weight"] > 0


@pytest.mark.slow
def test_the_options_of_adtopk_do_what_they_say(results: Any) -> None:
    reports = {name: results[0][name]["report"] for name in JOBS}
    # every second step selects over the whole matrix: rows are left out
    assert results[0]["adtopk interleaved"]["figures"]["coverage"] < 1
    assert results[0]["adtopk interleaved"]["losses"] != results[0]["adtopk"]["losses"]
    assert len(reports["adtopk partial"]["plan"]) < len(reports["adtopk"]["plan"])
    # two workers receive as much by all-gather as by all-reduce, but for what is said of the tensors
    assert results[0]["adtopk hybrid"]["losses"] == pytest.approx(results[0]["adtopk"]["losses"], rel=1e-4)


@pytest.mark.slow
def test_ssfusion_differs_by_what_its_names_say(results: Any) -> None:
    jobs = {name: results[0][name] for name in SSFUSION}
    assert all(job["report"]["plan"] == [3, 3, 1] for job in jobs.values())
    # offloading changes no bit
    assert jobs["ssfusion-o"]["losses"] == jobs["ssfusion-naive"]["losses"]
    assert jobs["ssfusion"]["losses"] == jobs["ssfusion-i"]["losses"]
    for name in SSFUSION:
        # within the density: what travels whole is paid for by others
        quotas = sum(max(1, p.numel() // 20) for p in TinyClassifier().parameters())
        sent = jobs[name]["report"]["achieved_density"] * sum(p.numel() for p in TinyClassifier().parameters())
        assert sent == pytest.approx(quotas)
