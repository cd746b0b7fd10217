"""The strategy in real trainers: registration, refusals, parity with DDP, reports, one worker, mismatched workers."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lion_pytorch import Lion
from torch.nn.parallel import DistributedDataParallel

from lightning_safusion import SAFusionStrategy
from lightning_safusion.integration.options import REFUSED_OPTIONS
from lightning_safusion.sparsify import GaussianK
from tests.cluster import specs
from tests.models import Lines, TinyClassifier, equal, fit, fit_both, trainer
from tests.process_group import run_launched


def test_density_1_is_ddp_bit_for_bit() -> None:
    plain = fit_both("ddp", max_steps=5)
    aside = fit_both(SAFusionStrategy(density=1.0), max_steps=5)
    forced = fit_both(SAFusionStrategy(density=1.0, collective="allgather"), max_steps=5)
    assert aside[0].figures["plain_ddp"] == "everything is sent (density 1)"
    assert forced[0].figures["plain_ddp"] is None
    for rank in range(2):
        assert equal(plain[rank].weights, aside[rank].weights)
        assert equal(plain[rank].weights, forced[rank].weights)


def test_a_seeded_deterministic_run_repeats_bit_for_bit() -> None:
    first, second = (fit_both(SAFusionStrategy(density=0.05), max_steps=5, deterministic=True)[0] for _ in range(2))
    assert equal(first.weights, second.weights)


def test_one_worker_trains_like_plain_lightning() -> None:
    # Lightning gives every distributed strategy a sampler of its own
    ours = fit(SAFusionStrategy(density=0.01), devices=1, use_distributed_sampler=False)
    assert equal(ours.weights, fit("auto", devices=1).weights)
    assert ours.figures["plain_ddp"] == "there is one worker, and nothing to exchange"


def test_accumulation_exchanges_once_per_optimizer_step() -> None:
    strategy = SAFusionStrategy(density=0.1, collective="allgather")
    first, second = fit_both(strategy, accumulate_grad_batches=4, max_steps=2)
    assert first.figures["windows"] == 2
    assert equal(first.weights, second.weights)


def test_strategy_names_are_registered_on_import() -> None:
    names = StrategyRegistry.available_strategies()
    for name in ("safusion", "safusion_spawn", "safusion_fork", "safusion_notebook"):
        assert {name, f"{name}_find_unused_parameters_true", f"{name}_find_unused_parameters_false"} <= set(names)
    strategy = trainer("safusion_fork_find_unused_parameters_true").strategy
    assert isinstance(strategy, SAFusionStrategy)
    assert strategy._start_method == "fork"
    assert strategy._ddp_kwargs["find_unused_parameters"] is True
    assert SAFusionStrategy(process_group_backend="gloo").process_group_backend == "gloo"
    SAFusionStrategy.register_strategies(StrategyRegistry)  # a second import path must not fail


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compressor": "gausiank"}, "gaussiank"),
        ({"compressor": 3}, "3"),
        ({"system": "safusoin"}, "unknown system 'safusoin'. Did you mean 'safusion'? Choose one of 'safusion',"),
        ({"system": "saf-pooled "}, "Did you mean 'saf-pooled'"),
        ({"density": 1.5}, "1.5"),
        ({"fusion": "timer"}, "unknown fusion policy 'timer'. Choose one of 'adaptive', 'aligned', 'behind',"),
        ({"fusion": "MG-WFBP"}, "Did you mean 'mgwfbp'"),
        ({"memory": "residul"}, "unknown memory 'residul'. Did you mean 'residual'? Choose one of 'auto', 'residual',"),
        ({"scope": "model"}, "'tensor', 'group'"),
        ({"quota": "pool"}, "Did you mean 'pooled'"),
        ({"collective": "all-gather"}, "Did you mean 'allgather'"),
        ({"wire": "bitmap-bf61"}, "Did you mean 'bitmap-bf16'"),
        ({"dense_below": -1}, "-1"),
        ({"dense_below_ndim": -1}, "dense_below_ndim"),
        ({"transport": "Horovod"}, "Did you mean 'horovod'"),
        ({"select_by": "updates"}, "unknown select_by 'updates'. Did you mean 'update'"),
        ({"system": "safusion", "offload": "yes"}, "offload must be True or False, got 'yes'"),
        ({"quota": "pooled", "scope": "group"}, "scope='tensor'"),
        ({"fusion": "naive", "scope": "group"}, "scope='tensor'"),
        ({"compressor": "none", "density": 0.5, "scope": "everywhere"}, "everywhere"),
        ({"dense": ["*.bias", 3]}, "texts such as '*.bias', got 3"),
        ({"dense": "*.bias"}, "write ['*.bias']"),
        ({"dense_below": "1k"}, "dense_below is a number of elements, an integer, got '1k'"),
        ({"dense_below_ndim": 1.5}, "dense_below_ndim is a number of dimensions, an integer, got 1.5"),
        ({"memory": "decoupled", "collective": "allreduce"}, "it needs a collective other than 'allreduce'"),
        ({"densty": 0.1}, "Did you mean 'density'"),
        ({"compressor": CPUAccelerator()}, "by name, accelerator=CPUAccelerator()"),  # as DDPStrategy(accelerator)
    ],
)
def test_wrong_arguments_are_refused_by_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        SAFusionStrategy(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", REFUSED_OPTIONS)
def test_options_that_contradict_the_strategy_are_refused(name: str) -> None:
    with pytest.raises(MisconfigurationException, match=name):
        SAFusionStrategy(**{name: object()})
    SAFusionStrategy(**{name: None})  # LightningCLI passes every option with its default


@pytest.mark.parametrize("given", [{}, {"bucket_cap_mb": 0}])
def test_ddp_is_not_given_a_bucket_size_of_zero(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class LikeTorch211(DistributedDataParallel):
        def __init__(self, *args: Any, bucket_cap_mb: float = 25, **options: Any) -> None:
            assert bucket_cap_mb, "bucket_cap_mb should be set by now"
            super().__init__(*args, bucket_cap_mb=bucket_cap_mb, **options)

    monkeypatch.setattr("lightning_safusion.integration.fit.DistributedDataParallel", LikeTorch211)
    assert [ended.figures["windows"] for ended in fit_both(SAFusionStrategy(**given), max_steps=1)] == [1, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dense": ["encoder.*"]}, "matches no trainable parameter"),
        ({"memory": "dgc"}, "memory='dgc' .*applies momentum before selection"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_at_set_up(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, MisconfigurationException), match=message):
        fit(SAFusionStrategy(**options), devices=1)


@pytest.mark.parametrize(("dtype", "aside"), [(torch.float32, True), (torch.float64, False)])
def test_sparse_is_refused_where_dense_all_reduce_carries_less(dtype: torch.dtype, aside: bool) -> None:
    # two workers: sparse all-gather receives 4 B and a bitmap for each element, dense all-reduce what the gradient has
    settings = SAFusionStrategy(density=0.999, wire="fp32").settings
    reason = settings.dense_reason(specs([(1000,)], dtype), world_size=2)
    assert ("by sparse all-gather" in str(reason)) == aside == (reason is not None)


def test_that_is_said_once_before_training() -> None:
    def run(rank: int) -> list[str]:
        said = Lines()
        fit(SAFusionStrategy(density=0.05), TinyClassifier(make=partial(Lion, lr=0.01)), max_steps=2)
        return [text for text in said.lines if "may end with a higher loss" in text]

    assert [len(said) for said in run_launched(2, run)] == [1, 0]


def test_different_settings_are_found_at_set_up_on_all_ranks() -> None:
    def run(rank: int) -> None:
        with pytest.raises(RuntimeError, match=r"(?s)different settings.*0\.05.*0\.02"):
            fit(SAFusionStrategy(density=0.02 if rank else 0.05))

    run_launched(2, run)


def test_the_strategy_can_be_pickled_for_spawn() -> None:
    strategy = SAFusionStrategy(compressor=GaussianK(), density=0.1, fusion="adaptive", memory="dgc")
    copy = pickle.loads(pickle.dumps(strategy))  # noqa: S301  our own bytes
    assert copy.settings.describe() == strategy.settings.describe()


def test_python_reducer_is_refused() -> None:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"), pytest.raises(Exception, match="python_reducer"):
        fit_both(SAFusionStrategy())


def test_names_of_before_say_what_they_are_now() -> None:
    strategy = SAFusionStrategy()
    with pytest.warns(DeprecationWarning, match="SAFusionStrategy.engine"):
        assert strategy.controller is strategy.engine
    with pytest.warns(DeprecationWarning, match=r"SAFusionStrategy.figures\(\)"):
        assert strategy.report() == strategy.figures()
