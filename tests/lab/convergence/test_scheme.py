"""From a scheme to the engine's settings and the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lab.convergence.plan import PRESETS
from lab.convergence.scheme import Scheme, parse_scheme
from lab.convergence.training import make_optimizers
from lab.processes import key_of
from lab.tasks import TASKS
from lightning_safusion.fusion.plans.policy import Single


@pytest.mark.parametrize(
    ("method", "scope", "quota"),
    [("behind", "group", "proportional"), ("ahead", "tensor", "proportional"), ("pooled", "tensor", "pooled")],
)
def test_methods_are_scopes_and_quotas(method: Any, scope: str, quota: str) -> None:
    settings = Scheme(method, density=0.05, wire="bf16", compressor="gaussiank", memory="none").settings(100)
    assert (settings.scope, settings.quota, settings.collective, settings.wire) == (scope, quota, "allgather", "bf16")
    assert (settings.compressor.name, settings.memory.name, settings.density(0, 0)) == ("gaussiank", "none", 0.05)


def test_the_degree_is_the_tensors_in_a_buffer() -> None:
    assert Scheme("behind", degree=16).settings(1).fusion.tensors_per_buffer == 16
    assert isinstance(Scheme("behind", degree=0).settings(1).fusion, Single)


def test_parts_take_options() -> None:
    memory = Scheme("ahead", memory="residual[decay=0.9]").settings(1).memory
    assert (memory.name, memory.decay) == ("residual", 0.9)
    with pytest.raises(ValueError, match="unknown option 'deca'.*Did you mean 'decay'"):
        Scheme("ahead", memory="residual[deca=0.9]")


def test_schedules_are_shares_of_the_steps() -> None:
    schedule = Scheme("ahead", density=0.01, dense_start=0.1, ramp=0.3).schedule(100)
    assert [schedule(step, 0) for step in (0, 9, 30, 99)] == [1.0, 1.0, 0.01, 0.01]
    assert 0.01 < schedule(10, 0) < 0.25
    assert Scheme("ahead", density=0.01, ramp=0.3).schedule(100)(0, 0) == 0.25


def test_what_the_engine_refuses_is_refused_before_anything_is_trained() -> None:
    with pytest.raises(ValueError, match="unknown memory"):
        Scheme("ahead", memory="magic")
    with pytest.raises(ValueError, match="unknown method"):
        Scheme("sideways")  # type: ignore[arg-type]  # what is tested
    with pytest.raises(ValueError, match=r"share of the steps.*got 30"):
        Scheme("ahead", ramp=30)
    with pytest.raises(ValueError, match="are for 3 workers, not for 2"):
        Scheme("dense", parts="1|3|4")


def test_options_make_the_scheme_again() -> None:
    scheme = Scheme("pooled", density=0.002, dense_below=512, beta2=0.95)
    assert scheme.options() == {"method": "pooled", "density": 0.002, "dense_below": 512, "beta2": 0.95}
    assert Scheme(**scheme.options()) == scheme
    assert scheme.name == "pooled[density=0.002,dense_below=512,beta2=0.95]"
    assert parse_scheme(scheme.name) == scheme


def test_a_scheme_may_change_the_optimizer() -> None:
    params = [torch.nn.Parameter(torch.zeros(2))]
    (adamw,) = make_optimizers(TASKS["bytes-transformer"], Scheme("pooled", beta2=0.95, lr_scale=2.0), params)
    assert adamw.defaults["betas"] == (0.9, 0.95)
    assert adamw.defaults["lr"] == 2 * TASKS["bytes-transformer"].lr
    (sgd,) = make_optimizers(TASKS["digits-resnet"], Scheme("ahead", memory="dgc", momentum=0.0), params)
    assert sgd.defaults["momentum"] == 0.0
    (own,) = make_optimizers(TASKS["digits-resnet"], Scheme("ahead"), params)
    assert own.defaults["momentum"] == 0.9


@pytest.mark.parametrize("preset", list(PRESETS))
def test_plans_name_every_run_once(preset: str) -> None:
    runs = PRESETS[preset]([0, 1])
    assert len({key_of(run.settings()) for run in runs}) == len(runs) == len({(run.config, run.seed) for run in runs})
    for run in runs:
        assert run.task.batch % run.scheme.workers == 0
        # momentum is in the memory or in the optimizer, never in both
        assert run.scheme.memory.startswith("dgc") <= (run.scheme.momentum == 0)
