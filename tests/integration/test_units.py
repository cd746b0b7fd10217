"""Units of the update: whose second moments are known, and what training shows of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop
from torch.optim.lr_scheduler import LambdaLR

from lightning_safusion import SAFusionStrategy
from lightning_safusion.integration.optimizer import suited
from lightning_safusion.integration.units import SecondMoments
from lightning_safusion.sparsify.schedule import LinearRamp, Opening
from tests.models import Orthogonalized, TinyClassifier, classification, equal, trainer
from tests.process_group import run_launched


def stepped(make: Callable[[Any], Optimizer], *params: nn.Parameter) -> Optimizer:
    optimizer = make(list(params))
    for _ in range(3):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Adam, "exp_avg_sq"),
        (AdamW, "exp_avg_sq"),
        (NAdam, "exp_avg_sq"),
        (RAdam, "exp_avg_sq"),
        (lambda p: AdamW(p, amsgrad=True), "max_exp_avg_sq"),
        (lambda p: AdamW(p, fused=True, eps=1e-6), "exp_avg_sq"),
        (RMSprop, "square_avg"),
        (Adagrad, "sum"),
        (SGD, None),
        (lambda p: SGD(p, momentum=0.9), None),
    ],
)
def test_second_moments_of_optimizers(make: Callable[[Any], Optimizer], name: str | None) -> None:
    param = nn.Parameter(torch.randn(5, 7))
    optimizer = stepped(make, param)
    moments = SecondMoments([optimizer], [param])
    (moment,) = moments([0])
    if name is None:
        assert moment is None
        return
    assert torch.equal(moment.values, optimizer.state[param][name].flatten())
    assert moment.values.data_ptr() == optimizer.state[param][name].data_ptr()
    (again,), (anew,) = moments([0]), SecondMoments([optimizer], [param])([0])
    assert anew is not again is moment
    assert moment.epsilon == optimizer.param_groups[0]["eps"]


def test_adafactor_moves_elements_as_its_second_moment_says() -> None:
    param, vector = nn.Parameter(torch.randn(5, 7)), nn.Parameter(torch.randn(9))
    optimizer = stepped(Adafactor, param, vector)
    moments = SecondMoments([optimizer], [param, vector])
    factored, whole = moments([0, 1])
    assert whole is None  # Adafactor calls it "variance", and clips the step by its size
    state = optimizer.state[param]
    expected = state["row_var"] * state["col_var"] / state["row_var"].mean()
    torch.testing.assert_close(factored.values, expected.flatten())


def test_parameters_without_a_second_moment() -> None:
    last = nn.Parameter(torch.randn(4, 6, 5, 5).to(memory_format=torch.channels_last))
    other, frozen = nn.Parameter(torch.randn(8, 3)), nn.Parameter(torch.randn(3))
    optimizer = AdamW([{"params": [last]}, {"params": [other], "eps": 1e-3}])
    moments = SecondMoments([optimizer], [last, other, frozen])
    assert moments(range(3)) == [None] * 3  # before the first step
    last.grad, other.grad = torch.randn_like(last), torch.randn_like(other)
    optimizer.step()
    known = moments(range(3))
    assert known[2] is None
    assert torch.equal(known[0].values, optimizer.state[last]["exp_avg_sq"].permute(0, 2, 3, 1).flatten())
    assert known[1].epsilon == 1e-3
    optimizer.state[last]["exp_avg_sq"] = optimizer.state[last]["exp_avg_sq"].contiguous()
    assert moments([0]) == [None]  # its elements lie in another order than those of the gradient
    optimizer.load_state_dict(optimizer.state_dict())
    (again,) = moments([1])
    assert again.values.data_ptr() == optimizer.state[other]["exp_avg_sq"].data_ptr()


def test_a_job_has_the_density_of_its_optimizer_unless_it_has_its_own() -> None:
    def run(rank: int) -> list[float]:
        found = []
        for options in ({}, {"density": 0.05}, {"memory": "residual"}):
            strategy = SAFusionStrategy(collective="allgather", **options)  # type: ignore[arg-type]
            trainer(strategy, max_steps=1).fit(adamw(), classification())
            found.append(strategy.settings.density.lasting())
        return found

    assert run_launched(2, run) == [[0.02, 0.05, 0.25]] * 2


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this version of torch has no Muon")
def test_muon_gets_running_estimates(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """A job that sends everything from there on leaves the momentum to Muon."""

    def run(rank: int) -> Any:
        strategy, model = SAFusionStrategy(collective="allgather"), Orthogonalized()
        job = trainer(strategy, max_steps=12)
        with caplog.at_level(logging.INFO):
            job.fit(model, classification())
        assert strategy.optimizers[0].param_groups[0]["momentum"] == 0.95  # between steps
        found = [strategy.settings.memory.name, strategy.settings.density.lasting(), strategy.figures()["density"]]
        back = suited(strategy.settings, [AdamW(model.parameters())]).memory.name  # as for a later fit
        job.save_checkpoint(tmp_path / "last.ckpt")
        dense = SAFusionStrategy(density=1.0)
        trainer(dense, max_epochs=3, max_steps=16).fit(
            Orthogonalized(), classification(), ckpt_path=tmp_path / "last.ckpt"
        )
        assert dense.report()["plain_ddp"] is None  # what was not sent yet leaves with the first gradients
        assert dense.report()["windows"] > strategy.figures()["windows"]
        assert all(state["momentum_buffer"].any() for state in dense.optimizers[0].state.values())
        return [*found, back], [param.detach().clone() for param in model.parameters()], caplog.text

    (found, weights, said), (_, others, _) = run_launched(2, run)
    assert found == ["ef21", 0.72, 0.72, "auto"]
    assert equal(weights, others)
    assert "in place of the momentum of Muon and AdamW" in said


def adamw(**options: Any) -> TinyClassifier:
    model = TinyClassifier(make=lambda params: AdamW(params, 0.01, **options))
    model.temperature.requires_grad_(False)
    return model


def weights(**options: Any) -> list[Tensor]:
    """After four steps."""
    model = adamw()
    parts: dict[str, Any] = {"density": 0.05, "collective": "allgather"}
    trainer(SAFusionStrategy(**(parts | options)), max_steps=4).fit(model, classification())
    return [param.detach().clone() for param in model.parameters()]


def test_the_default_compares_updates_of_adamw(caplog: pytest.LogCaptureFixture) -> None:
    def run(rank: int) -> Any:
        with caplog.at_level(logging.INFO):
            default = weights()
        others = [weights(select_by=units) for units in ("update", "gradient")]
        nodes = ("hierarchical", "hierarchical-sharded")
        over = [weights(collective=name, **options) for name in nodes for options in ({}, {"select_by": "update"})]
        return [default, *others, *over], caplog.text

    (trained, said), (theirs, _) = run_launched(2, run)
    for default, named in ((0, 1), (3, 4), (5, 6)):
        for weights_ in zip(trained[default], trained[named], theirs[default], strict=True):
            assert all(torch.equal(weights_[0], other) for other in weights_)
    assert not equal(trained[0], trained[2])
    assert "Elements are compared by how far they would move" in said
    assert "; the first 79 steps send more, and longer in a warm-up, so compare longer runs; " in said


def test_the_first_windows_send_more() -> None:
    opening = Opening(0.35, 4, 4)

    class Noting(Callback):
        def __init__(self) -> None:
            self.densities: list[float] = []

        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            engine = trainer.strategy.engine  # type: ignore[attr-defined]  # of this strategy
            first = engine.first_windows
            first.opening = opening if first.opening else None

        def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
            report = trainer.strategy.figures()  # type: ignore[attr-defined]
            self.densities.append(report["density"])
            self.counted = trainer.strategy.engine.planner._schedule.windows  # type: ignore[attr-defined]
            assert report["achieved_density"] < 0.5

    def warming_up(steps: int) -> TinyClassifier:
        model = adamw()
        optimizer = AdamW(model.parameters(), 0.01)
        warm_up = LambdaLR(optimizer, lambda step: min(1.0, 0.25 + step / steps))
        model.configure_optimizers = lambda: ([optimizer], [{"scheduler": warm_up, "interval": "step"}])  # type: ignore[method-assign]
        return model

    def run(rank: int) -> list[tuple[list[float], int]]:
        noted = []
        schedule, late = LinearRamp(0.08, 0.04, 2), warming_up(40 if rank else 4)
        jobs = [("auto", 0.15, adamw()), ("gradient", 0.15, adamw()), ("auto", schedule, adamw()), ("auto", 0.15, late)]
        for units, density, model in jobs:
            noting = Noting()
            strategy = SAFusionStrategy(density=density, collective="allgather", select_by=units)
            trainer(strategy, max_epochs=2, max_steps=16, callbacks=[noting]).fit(model, classification())
            noted.append((noting.densities, noting.counted))
        return noted

    for (update, anew), (gradient, all_windows), (own, throughout), (warmed_up, _) in run_launched(2, run):
        assert anew < all_windows == throughout  # plans are reviewed often again, but not under the user's own schedule
        assert update == [max(0.15, opening(step)) for step in range(16)]
        assert update[0] > update[-1] == 0.15
        assert warmed_up == [0.35, 0.35, *update[:-2]]  # 2.5 of the four steps, and two more; rank 1 follows
        assert gradient == [0.15] * 16
        assert own == pytest.approx([0.08, 0.06, *[0.04] * 14])  # the user's own schedule stays as it is


def test_what_is_learned_does_not_depend_on_the_plan() -> None:
    """Nor do scales, without which values of 32 bits would show no more."""

    def run(rank: int) -> Any:
        options = [{"quota": "proportional", "wire": "q4", "collective": name} for name in ("allgather", "sharded")]
        return [[weights(fusion=fusion, **each) for fusion in ("single", "wfbp", "aligned")] for each in options]

    for single, *others in run_launched(2, run)[0]:
        for other in others:
            assert equal(single, other)
