"""What a step does while the memory carries the optimizer's momentum, and how large it is."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, LinearLR, OneCycleLR, StepLR

from lightning_safusion.integration.momentum import MomentumSwitch, Pace, risen

Make = Callable[[Any], Optimizer]


def steps(
    make: Make, count: int, carried: Callable[[int], bool] | None, closures: bool = False, pace: Pace | None = None
) -> list[Tensor]:
    """Three parameters after some steps with gradients that depend on nothing."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.linspace(-1, 1, 8).view(2, 4)) for _ in range(3)]
    optimizer = make(params)
    made = deepcopy(optimizer.state_dict()["param_groups"])
    if carried is not None:
        MomentumSwitch(optimizer, lambda param: carried([p is param for p in params].index(True)), pace)
    for number in range(count):
        for param in params:
            param.grad = torch.randn(2, 4, generator=generator)
        if not closures:
            optimizer.step()
        elif number % 2:
            optimizer.step(lambda: 0.0)
        else:
            optimizer.step(closure=lambda: 0.0)
    assert optimizer.state_dict()["param_groups"] == made
    return [param.detach() for param in params]


def everything(_: int) -> bool:
    return True


RATES = {"lr": 0.02, "weight_decay": 0.1}
MAKES: dict[str, tuple[Make, Make]] = {
    "AdamW": (lambda p: AdamW(p, **RATES), lambda p: AdamW(p, betas=(0.0, 0.999), **RATES)),
    "Adam, one by one": (lambda p: Adam(p, foreach=False), lambda p: Adam(p, betas=(0.0, 0.999), foreach=False)),
    "AMSGrad": (lambda p: Adam(p, amsgrad=True), lambda p: Adam(p, betas=(0.0, 0.999), amsgrad=True)),
    "SGD": (
        lambda p: SGD(p, momentum=0.9, nesterov=True, **RATES),
        lambda p: SGD(p, **{**RATES, "lr": RATES["lr"] / (1.0 - 0.9)}),
    ),
    "fused SGD": (
        lambda p: SGD(p, momentum=0.5, fused=True, **RATES),
        lambda p: SGD(p, fused=True, **{**RATES, "lr": RATES["lr"] / 0.5}),
    ),
}
if hasattr(torch.optim, "Muon"):  # it keeps its rate
    MAKES["Muon"] = (lambda p: torch.optim.Muon(p, 0.1), lambda p: torch.optim.Muon(p, 0.1, momentum=0.0))


@pytest.mark.parametrize("closures", [False, True])
@pytest.mark.parametrize("name", MAKES)
def test_a_step_has_no_momentum_for_what_is_carried_and_its_own_for_the_rest(name: str, closures: bool) -> None:
    with_it, without = MAKES[name]
    own, none = steps(with_it, 6, None), steps(without, 6, None)
    some = steps(with_it, 6, lambda index: index != 1, closures)
    for index, (mine, theirs) in enumerate(zip(some, [none[0], own[1], none[2]], strict=True)):
        assert torch.equal(mine, theirs), index
    assert not torch.equal(own[0], none[0])
    for mine, theirs in zip(steps(with_it, 6, lambda _: False, closures), own, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("make", [AdamW, lambda p: SGD(p, 0.1, momentum=0.9)])
def test_only_the_update_sees_another_optimizer(make: Make) -> None:
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = make(params)
    before = deepcopy(optimizer.state_dict()["param_groups"])
    switch = MomentumSwitch(optimizer, lambda param: param is params[0])
    seen = []

    def closure() -> float:
        seen.append(deepcopy(optimizer.state_dict()["param_groups"]))
        optimizer.param_groups[0]["lr"] = 0.5  # as a warm-up in a training step would
        for param in params:
            param.grad = torch.ones(3)
        return 1.0

    assert optimizer.step(closure) == 1.0
    assert seen == [before]
    assert optimizer.state_dict()["param_groups"] == [{**before[0], "lr": 0.5}]
    switch.close()
    optimizer.step()
    assert len(optimizer._optimizer_step_pre_hooks) == len(optimizer._optimizer_step_post_hooks) == 0


def test_an_error_in_a_step_leaves_the_optimizer_as_it_was_made() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = AdamW([param])
    made = optimizer.param_groups
    switch = MomentumSwitch(optimizer, lambda _: True)

    def stop() -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(stop)
    assert optimizer.param_groups is made
    param.grad = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match="sparse gradients"):
        optimizer.step()
    assert optimizer.param_groups is not made
    switch.restore()
    assert optimizer.param_groups is made
    with pytest.raises(RuntimeError, match="sparse gradients"):
        optimizer.step()
    param.grad = torch.ones(3)

    def closure() -> float:
        assert optimizer.param_groups is made  # not the groups that the error has left
        return 1.0

    assert optimizer.step(closure) == 1.0
    assert optimizer.param_groups is made


def test_what_a_hook_of_the_user_writes_stays() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = AdamW([param], lr=1.0)

    def decay(*_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    optimizer.register_step_post_hook(decay)
    MomentumSwitch(optimizer, lambda _: True)
    for _ in range(3):
        param.grad = torch.ones(3)
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.125


# A tensor that changes sides: every gradient counts as much as it does with or without the momentum, and no more.


@pytest.mark.parametrize("before", [1, 2, 5, 20])
@pytest.mark.parametrize("make", [AdamW, lambda p: AdamW(p, foreach=False)])
def test_a_momentum_that_comes_back_begins_from_nothing(make: Make, before: int) -> None:
    param = nn.Parameter(torch.zeros(1))
    optimizer = make([param])
    lr, carried = optimizer.param_groups[0]["lr"], True
    switch = MomentumSwitch(optimizer, lambda _: carried)
    moved = []
    for number in range(before + 12):
        carried = number < before
        param.grad = torch.ones(1)
        was = float(param)
        optimizer.step()
        moved.append((was - float(param)) / lr)
    assert moved[:before] == pytest.approx([1.0] * before, rel=1e-3)
    assert max(moved) < 1.01  # the last one is not made again
    assert moved[before] < moved[-1]
    carried = True
    optimizer.step()
    switch.settle()  # as for a checkpoint, from which any optimizer may go on
    assert optimizer.state[param]["exp_avg"] == 0


@pytest.mark.parametrize("fused", [False, True])
def test_sgd_goes_on_with_any_part_of_its_parameters(fused: bool) -> None:
    params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    optimizer = SGD(params, 0.1, momentum=0.9, fused=fused)
    carried: set[int] = set()
    switch = MomentumSwitch(optimizer, lambda param: [p is param for p in params].index(True) in carried)
    for sides in ({0, 1, 2}, {0}, {1}, set(), {0, 1, 2}, {2}):
        carried = sides
        for param in params:
            param.grad = torch.ones(2)
        optimizer.step()
    switch.close()
    plain = SGD(params, 0.1, momentum=0.9, fused=fused)
    plain.load_state_dict(optimizer.state_dict())
    plain.step()
    carried = {0}
    again = [nn.Parameter(torch.zeros(2))]
    optimizer = SGD(again, 0.1, momentum=0.9, fused=fused)
    switch = MomentumSwitch(optimizer, lambda _: bool(carried))
    for sides in ({0}, {0}, set()):
        carried = sides
        again[0].grad = torch.ones(2)
        optimizer.step()
    assert torch.allclose(again[0], torch.full((2,), -0.1 * (10 + 10 + 1)))


def _steps(make: Make, change: dict[str, Any], steps: int) -> tuple[list[float], list[str]]:
    """How far a parameter moves in each step, whose gradient is 1 and whose momentum is carried; and the warnings."""
    param = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = make([param])
    switch = MomentumSwitch(optimizer, lambda _: True)
    optimizer.param_groups[0].update(change)
    moved = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            before = float(param.detach())
            param.grad = torch.ones_like(param)
            optimizer.step()
            moved.append(before - float(param.detach()))
    switch.close()
    return moved, [str(each.message) for each in caught]


@pytest.mark.parametrize(
    ("momentum", "expected"),
    [(0.9, [10.0, 10.0, 10.0]), (0.5, [2.0, 2.0, 2.0]), (0.0, [1.0, 1.0, 1.0]), (0.99, [11.0, 12.0, 13.0])]
    + [(1.0, [11.0, 12.0, 13.0])],
)
def test_steps_of_sgd_follow_a_momentum_that_changes_no_faster_than_its_buffer(
    momentum: float, expected: list[float]
) -> None:
    moved, warned = _steps(lambda p: SGD(p, 1.0, momentum=0.9), {"momentum": momentum}, 3)
    assert moved == pytest.approx(expected)
    assert len(warned) == (momentum != 0.9)
    assert all(f"is {momentum:.4g} now, and was 0.9 when training began" in each for each in warned)


@pytest.mark.parametrize("beta", [0.5, 0.0, 0.99])
def test_what_adam_leaves_to_the_residual_stays_there_when_its_betas_change(beta: float) -> None:
    unchanged, silent = _steps(lambda p: Adam(p, 0.1), {}, 3)
    moved, warned = _steps(lambda p: Adam(p, 0.1), {"betas": (beta, 0.999)}, 3)
    assert moved == unchanged
    assert silent == []
    assert len(warned) == 1
    assert "betas[0] (group 0) is" in warned[0]


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
    assert Pace(lambda: density, lambda: True).kept == pytest.approx(max(0.95, kept))  # in the first steps


WAYS: list[dict[str, Any]] = [{}, {"fused": True}, {"foreach": True}, {"amsgrad": True}]


@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize("options", WAYS)
def test_some_momentum_stays(kind: Any, options: dict[str, Any]) -> None:
    def make(beta: float) -> Make:
        return lambda params: kind(params, lr=0.1, betas=(beta, 0.99), **options)

    torch.testing.assert_close(steps(make(0.8), 5, everything, pace=keeping(0.5)), steps(make(0.4), 5, None))
    own = zip(steps(make(0.8), 5, everything, pace=keeping(1.0)), steps(make(0.8), 5, None), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in own)  # at density one, where all of it stays


def test_the_momentum_that_stays_is_in_a_checkpoint() -> None:
    param = nn.Parameter(torch.ones(6))
    optimizer = AdamW([param])
    switch = MomentumSwitch(optimizer, lambda _: True, keeping(0.5))
    param.grad = torch.randn(6)
    optimizer.step()
    state = optimizer.state[param]["exp_avg"].clone()
    switch.close()
    assert state.any()
    assert torch.equal(optimizer.state[param]["exp_avg"], state)


@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize("options", WAYS)
def test_a_paced_step_is_larger_and_decays_weights_as_before(kind: Any, options: dict[str, Any]) -> None:
    def step(pace: float, decay: float, lr: float) -> Tensor:
        def make(params: Any) -> Optimizer:
            return kind(params, lr=lr, weight_decay=decay, **options)

        return steps(make, 1, everything, pace=pacing(pace))[0]

    torch.testing.assert_close(step(2.0, 0.0, 0.01), step(1.0, 0.0, 0.02))
    if kind is AdamW:  # whose decay is lr x weight_decay
        torch.testing.assert_close(
            step(2.0, 0.1, 0.01) - step(2.0, 0.0, 0.01), step(1.0, 0.1, 0.01) - step(1.0, 0.0, 0.01)
        )


def test_a_schedule_of_the_momentum_is_followed() -> None:
    def steps(switched: bool) -> tuple[Tensor, list[float]]:
        torch.manual_seed(0)
        param = nn.Parameter(torch.ones(6))
        optimizer = AdamW([param], 0.1, betas=(0.9 if switched else 0.45, 0.99))
        bounds = (0.85, 0.95) if switched else (0.425, 0.475)
        options = {"base_momentum": bounds[0], "max_momentum": bounds[1], "cycle_momentum": True}
        schedule = OneCycleLR(optimizer, 0.1, total_steps=12, **options)
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
