from __future__ import annotations

import math
from typing import Any

import pytest

from lightning_safusion.sparsify import (
    ConstantDensity,
    DenseStart,
    DensitySchedule,
    DGCWarmup,
    ExponentialRamp,
    LinearRamp,
    resolve_density,
)
from lightning_safusion.sparsify.schedule import BY_GRADIENT, BY_UPDATE, Opening


@pytest.mark.parametrize(
    ("warmup", "expected"),
    [
        (DGCWarmup(0.001), [0.25, 0.0625, 0.015625, 0.00390625, 0.001, 0.001]),  # of the paper
        (DGCWarmup(0.05), [0.25, 0.0625, 0.05, 0.05, 0.05]),  # never below its end
        (DGCWarmup(0.001, epochs=5, coefficient=None), [0.3162, 0.1, 0.0316, 0.01, 0.00316, 0.001]),
        (DGCWarmup(0.001, epochs=4, coefficient=None), [0.2512, 0.0631, 0.0158, 0.00398, 0.001]),
        (DGCWarmup(0.01, values=[1.0, 1.0, 0.5]), [1.0, 1.0, 0.5, 0.01]),
    ],
)
def test_dgc_warmup(warmup: DGCWarmup, expected: list[float]) -> None:
    assert [warmup(999, epoch) for epoch in range(len(expected))] == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("ramp", [LinearRamp, ExponentialRamp])
def test_ramps_are_monotone_and_meet_their_ends(ramp: type[LinearRamp] | type[ExponentialRamp]) -> None:
    for start, end in ((1.0, 0.01), (0.01, 1.0)):
        values = [ramp(start, end, 100)(step, 0) for step in range(150)]
        assert values[0] == start
        assert values[100:] == [end] * 50
        steps = [b - a for a, b in zip(values[:100], values[1:101], strict=True)]
        assert all(math.copysign(1, s) == math.copysign(1, end - start) for s in steps)
        assert all(0 < value <= 1 for value in values)
    assert LinearRamp(0.2, 0.4, 10)(5, 0) == pytest.approx(0.3)
    assert ExponentialRamp(0.01, 1.0, 10)(5, 0) == pytest.approx(0.1)


def test_dense_start() -> None:
    schedule = DenseStart(LinearRamp(0.5, 0.1, 10), 3)
    assert [schedule(step, 0) for step in (0, 2, 3, 10)] == [1.0, 1.0, pytest.approx(0.38), 0.1]
    assert DenseStart(0.05, 2)(2, 0) == 0.05


@pytest.mark.parametrize(
    ("schedule", "lasting"),
    [
        (ConstantDensity(0.1), 0.1),
        (DGCWarmup(0.02), 0.02),
        (LinearRamp(0.5, 0.1, 7), 0.1),
        (ExponentialRamp(0.5, 0.1, 7), 0.1),
        (DenseStart(LinearRamp(0.5, 0.1, 7), 9), 0.1),
    ],
)
def test_what_lasts(schedule: DensitySchedule, lasting: float) -> None:
    assert schedule.lasting() == schedule(10**6, 10**6) == lasting


def test_resolve_density() -> None:
    schedule = ConstantDensity(0.5)
    assert resolve_density(schedule) is schedule
    assert resolve_density(1)(0, 0) == 1.0


@pytest.mark.parametrize("density", [0, 0.0, -0.1, 1.5, math.nan, math.inf])
def test_impossible_densities_are_refused_by_value(density: float) -> None:
    for make in (
        resolve_density,
        ConstantDensity,
        DGCWarmup,
        lambda d: LinearRamp(0.5, d, 3),
        lambda d: DenseStart(d, 1),
    ):
        with pytest.raises(ValueError, match=f"got {density}"):
            make(density)


@pytest.mark.parametrize("density", [True, "0.05", None])
def test_what_is_not_a_number_is_refused(density: Any) -> None:
    with pytest.raises(TypeError, match=f"got {density!r}"):
        resolve_density(density)


def test_other_arguments_are_checked() -> None:
    for schedule in (LinearRamp, ExponentialRamp):
        with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
            schedule(1.0, 0.1, 0)
    with pytest.raises(ValueError, match="epochs must not be negative, got -1"):
        DGCWarmup(0.1, epochs=-1)
    with pytest.raises(ValueError, match="coefficient must be in"):
        DGCWarmup(0.1, coefficient=1.5)
    with pytest.raises(ValueError, match="got 2"):
        DGCWarmup(0.1, values=[2.0])


@pytest.mark.parametrize("opening", [BY_UPDATE, BY_GRADIENT])
def test_the_density_of_the_first_steps_halves_again_and_again(opening: Opening) -> None:
    densities = [opening(step) for step in range(1000)]
    assert densities[: opening.steps] == [opening.density] * opening.steps
    assert densities == sorted(densities, reverse=True)
    for step, density in enumerate(densities[opening.steps :]):
        assert density == pytest.approx(opening.density * 0.5 ** (step / opening.half), rel=0.2)
    assert len(set(densities[: opening.steps + opening.half])) == 3  # each is a plan
    assert opening.lasts(opening.density) == 0
    lasting = opening.density / 5
    assert densities[opening.lasts(lasting)] <= lasting < densities[opening.lasts(lasting) - 1]
