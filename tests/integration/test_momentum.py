"""The optimizer's momentum, carried by the memory: when, and what a step does then."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lion_pytorch import Lion
from schedulefree import AdamWScheduleFree
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

from lightning_safusion.integration.optimizer import MomentumSwitch, carried_momentum
from lightning_safusion.integration.parameters import caution, refuse_double_momentum
from lightning_safusion.sparsify import AutoMemory, DecoupledMomentum, DGCMemory, EF21Memory, Memory, ResidualMemory
from lightning_safusion.sparsify.schedule import ConstantDensity, DenseStart, DensitySchedule, LinearRamp

Make = Callable[[Any], Optimizer]


class Derived(Adam):
    """Of a class that may do anything in its step."""


class Unknown(DensitySchedule):
    """Nobody knows what comes."""

    def __call__(self, step: int, epoch: int) -> float:
        return 0.05


def of(make: Make) -> Optimizer:
    return make([nn.Parameter(torch.ones(3))])


def groups(*betas: float) -> Make:
    return lambda params: Adam([{"params": [nn.Parameter(torch.ones(2))], "betas": (b, 0.99)} for b in betas])


@pytest.mark.parametrize(
    ("memory", "density", "makes", "factor"),
    [
        (AutoMemory(), 0.1, [AdamW], 0.95),  # twice as long as an element waits
        (AutoMemory(), 0.05, [Adam], 0.975),
        (AutoMemory(), 0.25, [Adam], 0.9),  # its own is longer
        (AutoMemory(), 0.001, [AdamW], 0.99),  # and no longer than has been tried
        (AutoMemory(), 0.25, [lambda p: AdamW(p, betas=(0.5, 0.999))], 0.875),
        (AutoMemory(), 0.1, [lambda p: AdamW(p, betas=(0.95, 0.999)), Adam], 0.95),
        (AutoMemory(), 0.1, [groups(0.9, 0.97)], 0.97),
        (AutoMemory(), 0.01, [lambda p: SGD(p, 0.1, momentum=0.9, nesterov=True)], 0.99),
        (AutoMemory(), 0.01, [AdamW, lambda p: SGD(p, 0.1, momentum=0.9)], 0.99),
        # where it stays with the optimizer
        (AutoMemory(), 0.3, [AdamW], None),
        (AutoMemory(), 0.05, [lambda p: SGD(p, 0.1, momentum=0.9)], None),
        (AutoMemory(), 0.05, [AdamW, lambda p: SGD(p, 0.1, momentum=0.9)], None),
        (AutoMemory(), 0.01, [lambda p: SGD(p, 0.1)], None),
        (AutoMemory(), 0.01, [lambda p: SGD(p, 0.1, momentum=0.9, dampening=0.5)], None),
        (AutoMemory(), 0.1, [lambda p: AdamW(p, betas=(0.0, 0.999))], None),
        (AutoMemory(), 0.1, [groups(0.9, 0.0)], None),
        (AutoMemory(), 0.1, [NAdam], None),
        (AutoMemory(), 0.01, [lambda p: SGD(p, 0.1, momentum=1.0)], None),  # it never ends
        (AutoMemory(), 0.1, [Derived], None),
        (AutoMemory(), 0.1, [AdamW, NAdam], None),
        (AutoMemory(), 0.1, [RAdam], 0.95),
        (AutoMemory(), 0.1, [], None),
        (AutoMemory(), Unknown(), [AdamW], None),
        (AutoMemory(), LinearRamp(0.05, 0.3, 7), [AdamW], None),
        # the density that lasts decides
        (AutoMemory(), LinearRamp(0.3, 0.05, 7), [AdamW], 0.975),
        (AutoMemory(), DenseStart(0.05, 7), [AdamW], 0.975),
        (ResidualMemory(), 0.1, [AdamW], None),
        (DGCMemory(), 0.1, [lambda p: SGD(p, 0.1)], None),
        # asked for by name
        (DecoupledMomentum(0.8), 0.5, [AdamW], 0.8),
        (DecoupledMomentum(0.8), LinearRamp(0.3, 0.05, 7), [lambda p: SGD(p, 0.1, momentum=0.9)], 0.8),
        (DecoupledMomentum(0.8), 0.1, [lambda p: SGD(p, 0.1)], None),  # there is nothing to switch off
        (EF21Memory(0.8), 0.5, [AdamW], 0.8),
        (EF21Memory(0.0), 0.5, [AdamW], None),
        (EF21Memory(0.8), 0.5, [NAdam], None),
    ],
)
def test_whose_momentum_it_is(
    memory: Memory, density: float | DensitySchedule, makes: list[Make], factor: float | None
) -> None:
    schedule = ConstantDensity(density) if isinstance(density, float) else density
    assert carried_momentum(memory, schedule, [of(make) for make in makes]) == factor


@pytest.mark.parametrize(
    ("density", "makes", "factor"),
    [
        (0.1, [AdamW], 0.975),
        (0.05, [NAdam], 0.9875),  # its own momentum stays
        (0.05, [lambda p: RMSprop(p, momentum=0.5)], 0.9875),
        (0.01, [Adagrad, Adafactor], 0.99),
        (0.1, [AdamWScheduleFree], 0.975),
        (0.1, [lambda p: AdamW(p, betas=(0.0, 0.999))], 0.975),
        (0.1, [AdamW, NAdam], 0.975),
        (0.3, [NAdam], None),
        (0.1, [NAdam, lambda p: SGD(p, 0.1, momentum=0.9)], None),
        (0.1, [lambda p: Lion(p, 1e-4)], None),
        (0.1, [Derived], None),
        (0.01, [lambda p: SGD(p, 0.1)], None),
    ],
)
def test_residuals_fade_where_gradients_are_divided_and_compared_so(
    density: float, makes: list[Make], factor: float | None
) -> None:
    optimizers = [of(make) for make in makes]
    assert carried_momentum(AutoMemory(), ConstantDensity(density), optimizers, by_update=True) == factor


def test_a_capturable_momentum_stays_with_its_optimizer() -> None:
    optimizer = of(lambda p: Adam(p, betas=(torch.tensor(0.9), torch.tensor(0.99)), capturable=True, foreach=False))
    assert carried_momentum(AutoMemory(), ConstantDensity(0.1), [optimizer]) is None


def test_decoupled_momentum_takes_the_place_of_what_it_knows_only() -> None:
    for make in (Adam, AdamW, lambda p: SGD(p, 0.1, momentum=0.9)):
        refuse_double_momentum(DecoupledMomentum(), of(make))
    with pytest.raises(MisconfigurationException, match=r"NAdam would apply it again.*betas=\(0.0, ...\)"):
        refuse_double_momentum(DecoupledMomentum(), of(NAdam))
    with pytest.raises(MisconfigurationException, match="SGD would apply it again"):
        refuse_double_momentum(DecoupledMomentum(), of(lambda p: SGD(p, 0.1, momentum=0.9, dampening=0.5)))


def test_who_is_cautioned_says_what_helps() -> None:
    assert caution(AutoMemory(), 0.1, of(AdamW), carried=True) is None
    unknown = caution(AutoMemory(), 0.1, of(NAdam))
    assert unknown is not None
    assert "memory='decoupled' with betas=(0.0, ...) for NAdam" in unknown
    known = caution(ResidualMemory(), 0.1, of(AdamW))
    assert known is not None
    assert "memory='decoupled', or a density of 0.25" in known


# --- steps ----------------------------------------------------------------------------------------------------------


def steps(make: Make, count: int, carried: Callable[[int], bool] | None, closures: bool = False) -> list[Tensor]:
    """Three parameters after some steps with gradients that depend on nothing."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.linspace(-1, 1, 8)) for _ in range(3)]
    optimizer = make(params)
    if carried is not None:
        MomentumSwitch(optimizer, lambda param: carried([p is param for p in params].index(True)))
    for number in range(count):
        for param in params:
            param.grad = torch.randn(8, generator=generator)
        if not closures:
            optimizer.step()
        elif number % 2:
            optimizer.step(lambda: 0.0)
        else:
            optimizer.step(closure=lambda: 0.0)
    return [param.detach() for param in params]


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


def test_a_schedule_of_the_momentum_goes_on() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = AdamW([param])
    MomentumSwitch(optimizer, lambda _: True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
    found = []
    for _ in range(5):
        param.grad = torch.ones(3)
        optimizer.step()
        schedule.step()
        found.append(optimizer.param_groups[0]["betas"][0])
    assert min(found) < 0.9 < max(found)
    assert torch.equal(optimizer.state[param]["exp_avg"], torch.ones(3))  # the latest gradient, and no other


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
