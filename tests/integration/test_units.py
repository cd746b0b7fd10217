"""Units of the update: whose second moments are known, what a step does then, and what training shows of it.

Covers: second moments of optimizers; parameters without one, of other layouts, of several groups; the pace of
steps, and the momentum that stays; the default in a Trainer; two plans; what is left after training; what is refused.
"""

from __future__ import annotations

import gc
import logging
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lion_pytorch import Lion
from schedulefree import AdamWScheduleFree
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, LinearLR, OneCycleLR, StepLR

from lightning_safusion import SAFusionStrategy
from lightning_safusion.integration.optimizer import MomentumSwitch, suited
from lightning_safusion.integration.pace import Pace, risen
from lightning_safusion.integration.parameters import caution, refuse_double_momentum, suit_density
from lightning_safusion.integration.units import SecondMoments, compares_updates, is_schedule_free
from lightning_safusion.sparsify import DecoupledMomentum, EF21Memory, ResidualMemory
from lightning_safusion.sparsify.schedule import LinearRamp, Opening, SuitedDensity
from lightning_safusion.tools.accuracy import default_density
from tests.models import Orthogonalized, TinyClassifier, classification, trainer
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
    moment = moments(0)
    if name is None:
        assert moment is None
        return
    assert moment is not None
    assert torch.equal(moment.values, optimizer.state[param][name].flatten())
    assert moment.values.data_ptr() == optimizer.state[param][name].data_ptr()
    assert SecondMoments([optimizer], [param])(0) is not moments(0) is moments(0)
    assert moment.epsilon == optimizer.param_groups[0]["eps"]


def test_adafactor_moves_elements_as_its_second_moment_says() -> None:
    param, vector = nn.Parameter(torch.randn(5, 7)), nn.Parameter(torch.randn(9))
    optimizer = stepped(Adafactor, param, vector)
    moments = SecondMoments([optimizer], [param, vector])
    factored, whole = moments(0), moments(1)
    assert factored is not None
    assert whole is None  # Adafactor calls it "variance", and clips the step by its size
    state = optimizer.state[param]
    expected = state["row_var"] * state["col_var"] / state["row_var"].mean()
    torch.testing.assert_close(factored.values, expected.flatten())


def test_parameters_without_a_second_moment() -> None:
    last = nn.Parameter(torch.randn(4, 6, 5, 5).to(memory_format=torch.channels_last))
    other, frozen = nn.Parameter(torch.randn(8, 3)), nn.Parameter(torch.randn(3))
    optimizer = AdamW([{"params": [last]}, {"params": [other], "eps": 1e-3}])
    moments = SecondMoments([optimizer], [last, other, frozen])
    assert [moments(index) for index in range(3)] == [None] * 3  # before the first step
    last.grad, other.grad = torch.randn_like(last), torch.randn_like(other)
    optimizer.step()
    known = [moments(index) for index in range(3)]
    assert known[2] is None
    assert known[0] is not None
    assert torch.equal(known[0].values, optimizer.state[last]["exp_avg_sq"].permute(0, 2, 3, 1).flatten())
    assert known[1] is not None
    assert known[1].epsilon == 1e-3
    optimizer.state[last]["exp_avg_sq"] = optimizer.state[last]["exp_avg_sq"].contiguous()
    assert moments(0) is None  # its elements lie in another order than those of the gradient
    optimizer.load_state_dict(optimizer.state_dict())
    again = moments(1)
    assert again is not None
    assert again.values.data_ptr() == optimizer.state[other]["exp_avg_sq"].data_ptr()


def keeping(share: float) -> Pace:
    """Steps with a share of the momentum."""
    return Pace(lambda: 0.04 ** (1.0 - share))


def pacing(factor: float) -> Pace:
    """Steps so many times as large."""
    return Pace(lambda: 0.05 / factor**4)


@pytest.mark.parametrize("density", [0.5, 0.05, 0.01, 0.002])
def test_the_pace_rises_below_one_density(density: float) -> None:
    assert Pace(lambda: density).factor == pytest.approx(max(1.0, (0.05 / density) ** 0.25))


@pytest.mark.parametrize("density", [1.0, 0.5, 0.02])
def test_many_workers_step_as_two_that_move_as_many_elements(density: float) -> None:
    alone = (1.0 - density) ** 8  # share of the elements that none of eight workers has selected
    two = Pace(lambda: 1.0 - math.sqrt(alone))
    eight = Pace(lambda: density, workers=8)
    assert (eight.factor, eight.kept) == pytest.approx((two.factor, two.kept))


@pytest.mark.parametrize(("density", "kept"), [(1.0, 1.0), (0.1, 0.285), (0.04, 0.0), (0.001, 0.0)])
def test_the_momentum_that_stays_falls_with_the_density(density: float, kept: float) -> None:
    assert Pace(lambda: density).kept == pytest.approx(kept, abs=0.005)
    for share in (1.0, 0.5, 0.0):  # in the first steps, while it falls, later
        fading = kept + share * max(0.0, 0.95 - kept)
        assert Pace(lambda: density, lambda share=share: share).kept == pytest.approx(fading, abs=0.005)


@pytest.mark.parametrize("make", [Adam, AdamW])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}, {"amsgrad": True}])
def test_some_momentum_stays(make: Any, options: dict[str, Any]) -> None:
    def steps(beta: float, switched: bool) -> Tensor:
        torch.manual_seed(0)
        param = nn.Parameter(torch.ones(6))
        optimizer = make([param], lr=0.1, betas=(beta, 0.99), **options)
        switch = MomentumSwitch(optimizer, lambda _: True, keeping(0.5)) if switched else None
        for _ in range(5):
            param.grad = torch.randn(6)
            optimizer.step()
        assert optimizer.param_groups[0]["betas"] == (beta, 0.99)
        state = optimizer.state[param]["exp_avg"].clone()
        if switch is not None:
            switch.close()
            assert torch.equal(optimizer.state[param]["exp_avg"], state)  # a checkpoint has it too
        return param.detach()

    torch.testing.assert_close(steps(0.8, True), steps(0.4, False))


def test_at_density_one_a_step_is_the_optimizers_own() -> None:
    def steps(switched: bool) -> Tensor:
        torch.manual_seed(0)
        param = nn.Parameter(torch.ones(6))
        optimizer = AdamW([param], lr=0.1)
        if switched:
            MomentumSwitch(optimizer, lambda _: True, Pace(lambda: 1.0))
        for _ in range(5):
            param.grad = torch.randn(6)
            optimizer.step()
        return param.detach()

    assert torch.equal(steps(True), steps(False))


@pytest.mark.parametrize("make", [Adam, AdamW])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}, {"capturable": False, "amsgrad": True}])
def test_a_paced_step_is_larger_and_decays_weights_as_before(make: Any, options: dict[str, Any]) -> None:
    def step(pace: float, decay: float, lr: float) -> Tensor:
        torch.manual_seed(0)
        param = nn.Parameter(torch.ones(6))
        optimizer = make([param], lr=lr, weight_decay=decay, **options)
        switch = MomentumSwitch(optimizer, lambda _: True, pacing(pace))
        param.grad = torch.randn(6)
        optimizer.step()
        switch.close()
        assert optimizer.param_groups[0]["lr"] == lr
        assert optimizer.param_groups[0]["weight_decay"] == decay
        return 1 - param.detach()

    torch.testing.assert_close(step(2.0, 0.0, 0.01), step(1.0, 0.0, 0.02))
    if make is AdamW:  # whose decay is lr x weight_decay
        torch.testing.assert_close(
            step(2.0, 0.1, 0.01) - step(2.0, 0.0, 0.01), step(1.0, 0.1, 0.01) - step(1.0, 0.0, 0.01)
        )


def schedule_free(params: Any) -> Optimizer:
    """Ready to step."""
    optimizer = AdamWScheduleFree(params)
    optimizer.train()
    return optimizer


@pytest.mark.parametrize(
    ("make", "expected", "plain"),
    [
        (AdamW, 0.02, 0.25),
        (RAdam, 0.05, 0.25),
        (NAdam, 0.02, 0.25),
        (lambda params: AdamW(params, betas=(0.0, 0.99)), 0.02, 0.1),
        (lambda params: SGD(params, 0.1, momentum=0.9), 0.1, 0.1),
        (lambda params: SGD(params, 0.1), 0.1, 0.1),
        (Adagrad, 0.02, 0.1),
        (lambda params: Lion(params, 1e-4), 0.25, 0.25),
        (schedule_free, 0.1, 0.25),
    ],
)
def test_the_density_suits_the_optimizers(make: Callable[[Any], Optimizer], expected: float, plain: float) -> None:
    optimizer = make([nn.Parameter(torch.ones(2))])
    for memory, density in (("auto", expected), ("residual", plain)):
        settings = SAFusionStrategy(memory=memory).settings
        assert isinstance(settings.density, SuitedDensity)
        suit_density(settings.density, settings.memory, [optimizer], compares_updates(settings, [optimizer]))
        assert settings.density.density == density
    name = "schedule-free" if is_schedule_free(optimizer) else type(optimizer).__name__
    assert default_density(name) == expected  # what "safusion plan" takes


def test_of_several_optimizers_the_one_that_needs_most_decides() -> None:
    settings = SAFusionStrategy().settings
    optimizers = [make([nn.Parameter(torch.ones(2))]) for make in (AdamW, RAdam, NAdam)]
    assert isinstance(settings.density, SuitedDensity)
    suit_density(settings.density, settings.memory, optimizers, compares_updates(settings, optimizers))
    assert settings.density.density == 0.05


def test_a_job_has_the_density_of_its_optimizer_unless_it_has_its_own() -> None:
    def run(rank: int) -> list[float]:
        found = []
        for options in ({}, {"density": 0.05}, {"memory": "residual"}):
            strategy = SAFusionStrategy(collective="allgather", **options)  # type: ignore[arg-type]
            trainer(strategy, max_steps=1).fit(adamw(), classification())
            found.append(strategy.settings.density.lasting())
        return found

    assert run_launched(2, run) == [[0.02, 0.05, 0.25]] * 2


def test_muon_is_refused_where_no_estimates_are_sent_unless_a_density_is_named() -> None:
    muon = torch.optim.Muon([nn.Parameter(torch.ones(4, 4))])
    with pytest.raises(MisconfigurationException, match=r"with Muon .*density=0.5"):
        suit_density(SuitedDensity(), ResidualMemory(), [muon], by_update=False)


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
    assert found == ["ef21", 0.65, 0.65, "auto"]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, others, strict=True))
    assert "in place of the momentum of Muon and AdamW" in said


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this version of torch has no Muon")
def test_what_suits_muon() -> None:
    def memory(collective: str, optimizer: Optimizer) -> Any:
        return suited(SAFusionStrategy(collective=collective).settings, [optimizer]).memory

    params = [nn.Parameter(torch.ones(4, 4))]
    muon = torch.optim.Muon(params)
    assert memory("allgather", muon).momentum == 0.8
    assert memory("allgather", torch.optim.Muon(params, momentum=0.0)).momentum == 0.0
    assert memory("gtopk", muon).name == "auto"  # it drops some of what estimates would add up
    for optimizer, density in ((muon, 0.65), (AdamW(params), 0.1)):
        suit_density(own := SuitedDensity(), EF21Memory(), [optimizer], by_update=False)
        assert own.density == density
    with pytest.raises(MisconfigurationException, match="Muon would apply it again"):
        refuse_double_momentum(DecoupledMomentum(), muon)
    assert "Muon may end with a higher loss" in str(caution(EF21Memory(), 0.1, muon))
    assert caution(EF21Memory(), 0.65, muon) is None


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this version of torch has no Muon")
def test_muon_without_its_momentum_keeps_its_rate() -> None:
    def stepped(momentum: float, switched: bool) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        param = nn.Parameter(torch.ones(4, 6))
        optimizer = torch.optim.Muon([param], 0.1, momentum=momentum)
        if switched:
            MomentumSwitch(optimizer, lambda _: True)
        for _ in range(3):
            param.grad = torch.randn(4, 6, generator=generator)
            optimizer.step()
        return param.detach()

    assert torch.equal(stepped(0.95, True), stepped(0.0, False))


def test_a_schedule_of_the_momentum_is_followed() -> None:
    def steps(switched: bool) -> tuple[Tensor, list[float]]:
        torch.manual_seed(0)
        param = nn.Parameter(torch.ones(6))
        optimizer = AdamW([param], 0.1, betas=(0.9 if switched else 0.45, 0.99))
        bounds = (0.85, 0.95) if switched else (0.425, 0.475)
        options = {"base_momentum": bounds[0], "max_momentum": bounds[1], "cycle_momentum": True}
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12, **options)
        if switched:
            MomentumSwitch(optimizer, lambda _: True, keeping(0.5))
        seen = []
        for _ in range(10):
            param.grad = torch.randn(6)
            optimizer.step()
            schedule.step()
            seen.append(optimizer.param_groups[0]["betas"][0])
        return param.detach(), seen

    ours, seen = steps(True)
    plain, halves = steps(False)
    assert seen == pytest.approx([2 * beta for beta in halves])  # as the schedule has set it
    torch.testing.assert_close(ours, plain)


def adamw(**options: Any) -> TinyClassifier:
    model = TinyClassifier()
    model.temperature.requires_grad_(False)
    model.configure_optimizers = lambda: AdamW(model.parameters(), 0.01, **options)  # type: ignore[method-assign]  # another optimizer for this model
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
    assert not all(torch.equal(a, b) for a, b in zip(trained[0], trained[2], strict=True))
    assert "Elements are compared by how far they would move" in said
    assert "; the first 100 steps send more, and longer in a warm-up, so compare longer runs; " in said


def test_the_first_windows_send_more() -> None:
    opening = Opening(0.35, 4, 1.0)

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


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        (None, [1, 1]),
        (lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=20, pct_start=0.1, div_factor=5), [0.2, 1]),
        (lambda optimizer: LinearLR(optimizer, 0.25, total_iters=2), [0.25, 0.625]),
        (lambda optimizer: LambdaLR(optimizer, lambda step: step / 10), [0, 0.1]),
        (lambda optimizer: StepLR(optimizer, 1, gamma=0.5), [1, 0.5]),
        (lambda optimizer: ConstantLR(optimizer, 0.5), [0.5, 0.5]),
    ],
)
def test_how_far_a_learning_rate_has_risen(schedule: Callable[[Optimizer], Any] | None, shares: list[float]) -> None:
    param = nn.Parameter(torch.zeros(2))
    optimizer, other = AdamW([param], 0.01), AdamW([param], torch.tensor(0.01))
    scheduler = schedule(optimizer) if schedule else None
    other.param_groups[0]["initial_lr"] = torch.tensor(0.02)
    for share in shares:
        assert risen([optimizer]) == pytest.approx(share)
        assert risen([other]) == 0.5
        assert risen([]) == 1
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def test_what_is_learned_does_not_depend_on_the_plan() -> None:
    """Nor do scales, without which values of 32 bits would show no more."""

    def run(rank: int) -> Any:
        options = [{"quota": "proportional", "wire": "q4", "collective": name} for name in ("allgather", "sharded")]
        return [[weights(fusion=fusion, **each) for fusion in ("single", "wfbp", "aligned")] for each in options]

    for single, *others in run_launched(2, run)[0]:
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(single, other, strict=True))


def test_nothing_holds_an_optimizer_after_training() -> None:
    def run(rank: int) -> bool:
        model = adamw()
        strategy = SAFusionStrategy(density=0.05, collective="allgather")
        job = trainer(strategy, max_steps=4)
        job.fit(model, classification())
        held = weakref.ref(job.optimizers[0])
        del job, model, strategy
        gc.collect()
        return held() is None

    assert run_launched(2, run) == [True, True]


@pytest.mark.parametrize(
    "options", [{"offload": True, "quota": "proportional", "wire": "auto"}, {"collective": "gtopk", "wire": "auto"}]
)
def test_where_updates_cannot_be_compared(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="select_by='update' compares elements before they are sent"):
        SAFusionStrategy(select_by="update", **options)
    SAFusionStrategy(**options)  # the default then compares gradients


def test_unknown_units_are_named() -> None:
    with pytest.raises(ValueError, match="unknown select_by 'updates'. Did you mean 'update'"):
        SAFusionStrategy(select_by="updates")  # type: ignore[arg-type]  # the mistake
