"""What suits an optimizer: whose momentum it is, the density, the units of the default; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lion_pytorch import Lion
from schedulefree import AdamWScheduleFree
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

from lightning_safusion import SAFusionStrategy
from lightning_safusion.integration.optimizer import (
    carried_momentum,
    caution,
    refuse_double_momentum,
    refuse_lost_epsilon,
    suit_density,
    suited,
)
from lightning_safusion.integration.units import compares_updates, is_schedule_free
from lightning_safusion.sparsify import (
    AutoMemory,
    DecoupledMomentum,
    DGCMemory,
    EF21Memory,
    Memory,
    NoMemory,
    ResidualMemory,
)
from lightning_safusion.sparsify.schedule import ConstantDensity, DenseStart, DensitySchedule, LinearRamp, SuitedDensity
from lightning_safusion.tools.accuracy import default_density

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


def test_which_momentum_comes_twice() -> None:
    weights = [nn.Parameter(torch.ones(2))]
    without = [SGD(weights, 0.1), AdamW(weights, betas=(0.0, 0.99))]
    carried = [Adam(weights), SGD(weights, 0.1, momentum=0.9)]
    for memory, optimizer in [
        *((DGCMemory(), optimizer) for optimizer in carried),
        (DGCMemory(), without[1]),  # its steps are not those of SGD
        (DecoupledMomentum(), NAdam(weights)),
        (EF21Memory(), NAdam(weights)),
        (DecoupledMomentum(), SGD(weights, 0.1, momentum=0.9, dampening=0.5)),
    ]:
        with pytest.raises(MisconfigurationException, match=r"apply it again.*(betas=\(0.0, ...\)|momentum=0)"):
            refuse_double_momentum(memory, optimizer)
    for optimizer in (*without, *carried):  # that of the last two memories is switched off
        for memory in (EF21Memory(momentum=0.0), ResidualMemory(), EF21Memory(), DecoupledMomentum()):
            refuse_double_momentum(memory, optimizer)


def test_an_epsilon_that_half_precision_makes_zero_is_refused() -> None:
    half, whole = nn.Parameter(torch.ones(2, dtype=torch.float16)), nn.Parameter(torch.ones(2))
    groups = [{"params": [whole]}, {"params": [half]}]
    with pytest.raises(MisconfigurationException, match="AdamW has eps=1e-08, which is 0 in float16"):
        refuse_lost_epsilon(AdamW(groups))
    for fine in (AdamW([whole]), AdamW([half], eps=1e-4), AdamW([half], fused=True), SGD([half], 0.1)):
        for param in (group["params"][0] for group in fine.param_groups):
            param.grad = torch.zeros_like(param)
        refuse_lost_epsilon(fine)
        fine.step()
        assert all(param.isfinite().all() for group in fine.param_groups for param in group["params"])


def test_error_feedback_below_adam_is_cautioned_against() -> None:
    weights = [nn.Parameter(torch.ones(2))]
    if hasattr(torch.optim, "Muon"):
        said = caution(ResidualMemory(), 0.1, torch.optim.Muon([nn.Parameter(torch.ones(2, 2))]))
        assert "Muon may end with a higher loss at a density of 0.1" in str(said)
    said = str(caution(ResidualMemory(), 0.01, NAdam(weights)))
    assert "density of 0.01" in said
    assert "memory='decoupled' with betas=(0.0, ...) for NAdam" in said
    assert "memory='decoupled', or a density of 0.25" in str(caution(ResidualMemory(), 0.1, Adam(weights)))
    assert caution(AutoMemory(), 0.1, Adam(weights), carried=True) is None
    said = str(caution(DecoupledMomentum(), 1.0, AdamW(weights, betas=(0.0, 0.99))))
    assert "at density 1 training has none" in said
    for memory, density, optimizer in [
        (ResidualMemory(), 0.01, SGD(weights, 0.1, momentum=0.9)),
        (ResidualMemory(), 0.25, Adam(weights)),
        (ResidualMemory(), 0.01, AdamW(weights, betas=(0.0, 0.99))),
        (DecoupledMomentum(), 0.01, AdamW(weights, betas=(0.0, 0.99))),
        (NoMemory(), 0.01, Adam(weights)),
    ]:
        assert caution(memory, density, optimizer) is None


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


def test_of_several_optimizers_the_one_that_needs_most_decides_and_none_of_an_earlier_fit() -> None:
    settings = SAFusionStrategy().settings
    assert isinstance(settings.density, SuitedDensity)
    for makes, expected in (((AdamW, RAdam, NAdam), 0.05), ((SGD,), 0.1), ((AdamW,), 0.02)):
        optimizers = [make([nn.Parameter(torch.ones(2))]) for make in makes]
        suit_density(settings.density, settings.memory, optimizers, compares_updates(settings, optimizers))
        assert settings.density.density == expected


def test_muon_is_refused_where_no_estimates_are_sent_unless_a_density_is_named() -> None:
    muon = torch.optim.Muon([nn.Parameter(torch.ones(4, 4))])
    with pytest.raises(MisconfigurationException, match=r"with Muon .*density=0.5"):
        suit_density(SuitedDensity(), ResidualMemory(), [muon], by_update=False)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this version of torch has no Muon")
def test_what_suits_muon() -> None:
    def memory(collective: str, optimizer: Optimizer) -> Any:
        return suited(SAFusionStrategy(collective=collective).settings, [optimizer]).memory

    params = [nn.Parameter(torch.ones(4, 4))]
    muon = torch.optim.Muon(params)
    assert memory("allgather", muon).momentum == 0.8
    assert memory("allgather", torch.optim.Muon(params, momentum=0.0)).momentum == 0.0
    assert memory("gtopk", muon).name == "auto"  # it drops some of what estimates would add up
    for optimizer, density in ((muon, 0.72), (AdamW(params), 0.1)):
        suit_density(own := SuitedDensity(), EF21Memory(), [optimizer], by_update=False)
        assert own.density == density
    with pytest.raises(MisconfigurationException, match="Muon would apply it again"):
        refuse_double_momentum(DecoupledMomentum(), muon)
    assert "Muon may end with a higher loss" in str(caution(EF21Memory(), 0.1, muon))
    assert caution(EF21Memory(), 0.72, muon) is None


@pytest.mark.parametrize(
    "options", [{"offload": True, "quota": "proportional", "wire": "auto"}, {"collective": "gtopk", "wire": "auto"}]
)
def test_where_updates_cannot_be_compared(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="select_by='update' compares elements before they are sent"):
        SAFusionStrategy(select_by="update", **options)
    SAFusionStrategy(**options)  # the default then compares gradients
