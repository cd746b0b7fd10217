"""What a stranger gets wrong: a compressor that breaks the contract, a schedule of nonsense, a misspelled argument."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn

from lightning_safusion import (
    ConstantDensity,
    DensitySchedule,
    DGCMemory,
    EF21Memory,
    Memory,
    SAFusionStrategy,
    Segments,
    Selection,
    Sparsifier,
)
from lightning_safusion.comm.cost import LinearCost
from lightning_safusion.fusion import build, planning, replan
from lightning_safusion.integration.signals import DeferredSignals
from lightning_safusion.sparsify.schedule import BY_GRADIENT
from tests.cluster import Cluster, settings
from tests.models import Fitted, Orthogonalized, TinyClassifier, distance, equal, fit, fit_both, switched
from tests.process_group import run_launched


class Foreign(Sparsifier):
    """Somebody's top-k over the whole span; ``spoil`` breaks its result."""

    name = "foreign"

    def __init__(self, spoil: Callable[[Tensor, Tensor], Any]) -> None:
        self.spoil = spoil

    def select(self, x: Tensor, segments: Segments, step: int) -> Selection:
        indices = x.abs().topk(min(segments.capacity, len(x))).indices.sort().values
        return self.spoil(indices, x[indices])


SPOILED: list[tuple[Callable[[Tensor, Tensor], Any], str]] = [
    (lambda i, v: Selection(i.flip(0), v.flip(0), len(i)), "not ascending"),
    (lambda i, v: Selection(i.clamp(min=int(i[1])), v, len(i)), "unique"),
    (lambda i, v: Selection(i + 10**6, v, len(i)), "below"),
    (lambda i, v: Selection(i.int(), v, len(i)), "int64"),
    (lambda i, v: Selection(i, v.double(), len(i)), "float32"),
    (lambda i, v: Selection(i, v[:-1], len(i)), "one for one"),
    (lambda i, v: Selection(i, v, 0), "selected 0 elements"),
    (lambda i, v: Selection(i, v, len(i) + 1), "possible are"),
    (lambda i, v: (i, v), "must return a Selection"),
    (
        lambda i, v: Selection(i, v, len(i)),
        r"; segment \d+ \(key \d+\) has a quota of \d+ and sent \d+",
    ),
]


@pytest.mark.parametrize(("spoil", "message"), SPOILED)
def test_a_compressor_that_breaks_the_contract_is_told(spoil: Any, message: str) -> None:
    cluster = Cluster(1, lambda: settings(compressor=Foreign(spoil), collective="allgather"))
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        cluster.step(cluster.random_grads(0))
    assert "'foreign'" in str(caught.value)
    cluster.close()


class Nonsense(DensitySchedule):
    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, step: int, epoch: int) -> float:
        return self.value


@pytest.mark.parametrize("value", [0.0, 2.0, float("nan"), "0.1", None])
def test_a_schedule_that_returns_no_density_is_refused_by_value(value: Any) -> None:
    cluster = Cluster(1, lambda: settings(density=Nonsense(value)))
    with pytest.raises((TypeError, ValueError), match="density must be"):
        cluster.step(cluster.random_grads(0))
    cluster.close()


def test_what_a_compressor_learns_stays_in_its_job() -> None:
    def run(rank: int) -> bool:
        strategy = SAFusionStrategy(compressor="oktopk", density=0.1, collective="allgather")
        before = strategy.settings.compressor.state_dict()
        fit(strategy, limit_train_batches=8)
        return strategy.settings.compressor.state_dict() == before

    assert all(run_launched(2, run))


@pytest.mark.parametrize(("memory", "momentum", "dampening"), [(DGCMemory(0.9), 0.9, 0.0), (EF21Memory(0.8), 0.8, 0.8)])
def test_a_memory_with_momentum_keeps_it_on_one_worker(memory: Memory, momentum: float, dampening: float) -> None:
    def trained(strategy: Any, **options: float) -> list[Tensor]:
        model = TinyClassifier(make=lambda params: torch.optim.SGD(params, 0.05, **options))
        return fit(strategy, model, devices=1, use_distributed_sampler=False, limit_train_batches=8).weights

    def both(rank: int) -> float:
        ours = trained(SAFusionStrategy(density=1.0, memory=memory))
        return distance(ours, trained("auto", momentum=momentum, dampening=dampening))

    assert run_launched(1, both)[0] < 1e-5


def on_a_network(monkeypatch: pytest.MonkeyPatch, sparse: LinearCost, dense: LinearCost) -> None:
    costs = {"allgather": sparse, "allreduce": dense}
    monkeypatch.setattr(build, "calibrate", lambda transport, device: costs)


@pytest.mark.flaky(reruns=2, reason="a trial compares times of a machine that may stand still for a second")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("density", "steps", "accumulate"),
    [
        (ConstantDensity(0.05), 30, 1),
        pytest.param(0.4, 100, 1, marks=pytest.mark.slow),
        pytest.param(ConstantDensity(0.05), 30, 3, marks=pytest.mark.slow),
    ],
)
def test_plain_ddp_goes_on_where_every_buffer_is_dense_for_good(
    monkeypatch: pytest.MonkeyPatch, density: float | ConstantDensity, steps: int, accumulate: int
) -> None:
    on_a_network(monkeypatch, LinearCost(1.0, 1.0), LinearCost(1e-6, 1e-12))  # a sparse exchange never pays
    options = {"max_epochs": -1, "max_steps": steps, "accumulate_grad_batches": accumulate}
    (first, _, report), (second, _, _) = fit_both(SAFusionStrategy(density=density), **options)
    (plain, _, _), _ = fit_both("ddp", **options)
    assert "predicted to be faster" in report["plain_ddp"]
    assert report["bytes_sent"] is None  # plain DDP says nothing of it
    if not isinstance(density, ConstantDensity):  # not before the density has come down
        assert report["windows"] >= BY_GRADIENT.lasts(density)
    assert equal(first, second)
    torch.testing.assert_close(first, plain, rtol=1e-5, atol=1e-6)


@pytest.fixture
def slow_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network on which a sparse exchange always pays, and selection that takes longer than what it saves."""
    on_a_network(monkeypatch, LinearCost(1e-6, 1e-12), LinearCost(1.0, 1.0))
    monkeypatch.setattr(planning, "predict_plain_ddp", lambda costs, allreduce: 0.0)
    monkeypatch.setattr(replan, "LENIENCE", 10.0)  # windows this short are noise


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.usefixtures("slow_selection")
@pytest.mark.parametrize("kind", [pytest.param("SGD", marks=pytest.mark.slow), "AdamW", "Muon"])
def test_plain_ddp_takes_over_from_sparse_windows(kind: str) -> None:
    if kind == "Muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this version of torch has no Muon")

    def run(rank: int) -> tuple[Fitted, list[str], int]:
        model = (
            Orthogonalized() if kind == "Muon" else TinyClassifier(make=torch.optim.AdamW if kind == "AdamW" else None)
        )
        strategy = SAFusionStrategy(density=ConstantDensity(0.05))
        seen: list[tuple[bool, bool]] = []

        def look(trainer: Trainer, *_: Any) -> None:
            handler = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
            seen.append((bool(switched(trainer)), isinstance(handler, DeferredSignals)))

        callbacks = [LambdaCallback(on_train_batch_end=look)]
        fitted = fit(strategy, model, max_epochs=4, limit_train_batches=10, callbacks=callbacks)
        # the memory carries the momentum, and messages the news of signals, until then
        assert (seen[0], seen[-1]) == ((kind != "SGD", True), (False, False))
        return fitted, actions(strategy), strategy.settings.memory.accumulated(0, 1).numel()

    ((first, _, report), decided, held), ((second, _, _), _, _) = run_launched(2, run)
    assert "predicted to be faster" in report["plain_ddp"]
    assert report["windows"] > 20  # exchanged before
    assert decided[-2:] == ["dense", "keep"]
    assert held == 0  # the residual was emptied, and is freed
    assert equal(first, second)


class Abandoned(TinyClassifier):
    """A branch of it learns for a few steps only, and leaves something in the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(32, 10)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss + self.branch(batch[0]).square().mean() if self.trainer.global_step < 5 else loss


@pytest.mark.flaky(reruns=2, reason="a trial compares times of a machine that may stand still for a second")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.usefixtures("slow_selection")
def test_the_engine_goes_on_where_something_is_held_back() -> None:
    def run(rank: int) -> tuple[dict[str, Any], list[str]]:
        strategy = SAFusionStrategy(density=ConstantDensity(0.05), find_unused_parameters=True)
        return fit(strategy, Abandoned(), max_epochs=4, limit_train_batches=12).figures, actions(strategy)

    report, decided = run_launched(2, run)[0]
    assert report["plain_ddp"] is None
    assert decided.count("dense") == 1
    assert decided[(tried := decided.index("dense")) : tried + 3] == ["dense", "keep", "revert"]
    assert report["collectives"]  # by what: measured times say


def actions(strategy: SAFusionStrategy) -> list[str]:
    """What the planner has decided, but for reviews that changed nothing."""
    return [decision.action for decision in strategy.decisions if decision.action != "stay"]


def test_a_lazy_module_is_named() -> None:
    def run(rank: int) -> None:
        model = TinyClassifier()
        model.lazy = nn.LazyLinear(3)
        with pytest.raises(Exception, match="lazy.weight"):
            fit(SAFusionStrategy(density=0.1), model)

    run_launched(2, run)
