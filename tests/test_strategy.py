"""The strategy in real trainers: registration, refusals, parity with DDP, reports, one worker, mismatched workers."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lion_pytorch import Lion
from torch.nn.parallel import DistributedDataParallel

from lightning_safusion import SAFusionStrategy
from lightning_safusion.integration.parameters import caution, refuse_double_momentum
from lightning_safusion.sparsify import DecoupledMomentum, DGCMemory, EF21Memory, GaussianK, NoMemory, ResidualMemory
from tests.cluster import specs
from tests.models import TinyClassifier, classification, trainer
from tests.process_group import run_launched

FORK = {"start_method": "fork", "process_group_backend": "gloo"}


class Outcome(Callback):
    """Writes what each rank ended with: under fork only files come back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        torch.save(
            {
                "parameters": [p.detach().clone() for p in pl_module.parameters()],
                "losses": getattr(pl_module, "losses", []),
                "report": strategy.figures() if isinstance(strategy, SAFusionStrategy) else {},
            },
            self.folder / f"rank{trainer.global_rank}.pt",
        )


def fit(
    folder: Path, strategy: Any, model: LightningModule | None = None, extra: Any = (), **options: Any
) -> list[dict[str, Any]]:
    """Trains on two workers, with the ``extra`` callbacks (classes); returns what every rank ended with."""
    folder.mkdir(exist_ok=True)
    callbacks = [*(callback() for callback in extra), Outcome(folder)]
    run = trainer(strategy, callbacks=callbacks, **({"max_steps": 5} | options))
    run.fit(TinyClassifier() if model is None else model, classification())
    return [torch.load(path) for path in sorted(folder.glob("rank*.pt"))]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_density_1_is_ddp_bit_for_bit(tmp_path: Path) -> None:
    plain = fit(tmp_path / "ddp", DDPStrategy(**FORK))
    aside = fit(tmp_path / "aside", SAFusionStrategy(density=1.0, **FORK))
    forced = fit(tmp_path / "forced", SAFusionStrategy(density=1.0, collective="allgather", **FORK))
    assert aside[0]["report"]["plain_ddp"] == "everything is sent (density 1)"
    assert forced[0]["report"]["plain_ddp"] is None
    for rank in range(2):
        assert equal(plain[rank]["parameters"], aside[rank]["parameters"])
        assert equal(plain[rank]["parameters"], forced[rank]["parameters"])


def test_a_seeded_deterministic_run_repeats_bit_for_bit(tmp_path: Path) -> None:
    # in processes of their own: the trainer switches determinism on for the whole process
    from tests.process_group import run_alone

    runs = [run_alone(_deterministic_fit, tmp_path / str(i)) for i in range(2)]
    assert runs[0] == runs[1]


def _deterministic_fit(folder: Path) -> list[bytes]:
    outcome = fit(folder, SAFusionStrategy(density=0.05, **FORK), deterministic=True)
    return [p.numpy().tobytes() for p in outcome[0]["parameters"]]


def test_one_worker_trains_like_plain_lightning() -> None:
    ours, plain = TinyClassifier(), TinyClassifier()
    strategy = SAFusionStrategy(density=0.01)
    # Lightning gives every distributed strategy a sampler of its own
    trainer(strategy, devices=1, use_distributed_sampler=False).fit(ours, classification())
    trainer("auto", devices=1).fit(plain, classification())
    assert equal(list(ours.parameters()), list(plain.parameters()))
    assert strategy.figures()["plain_ddp"] == "there is one worker, and nothing to exchange"


def test_accumulation_exchanges_once_per_optimizer_step(tmp_path: Path) -> None:
    strategy = SAFusionStrategy(density=0.1, collective="allgather", **FORK)
    outcome = fit(tmp_path, strategy, accumulate_grad_batches=4, max_steps=2)
    assert outcome[0]["report"]["windows"] == 2
    assert equal(outcome[0]["parameters"], outcome[1]["parameters"])


def test_sparse_is_refused_where_dense_all_reduce_carries_less(tmp_path: Path) -> None:
    # two workers: sparse all-gather receives 0.9 * 4 B and a bitmap per element, dense all-reduce 4 B
    report = fit(tmp_path, SAFusionStrategy(density=0.98, wire="fp32", **FORK))[0]["report"]
    assert "by sparse all-gather" in report["plain_ddp"]


def test_strategy_names_are_registered_on_import() -> None:
    names = StrategyRegistry.available_strategies()
    for name in ("safusion", "safusion_spawn", "safusion_fork", "safusion_notebook"):
        assert {name, f"{name}_find_unused_parameters_true", f"{name}_find_unused_parameters_false"} <= set(names)
    strategy = trainer("safusion_fork_find_unused_parameters_true").strategy
    assert isinstance(strategy, SAFusionStrategy)
    assert strategy._start_method == "fork"
    assert strategy._ddp_kwargs["find_unused_parameters"] is True
    SAFusionStrategy.register_strategies(StrategyRegistry)  # a second import path must not fail


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compressor": "gausiank"}, "gaussiank"),
        ({"compressor": 3}, "3"),
        ({"system": "safusoin"}, "'safusion'"),
        ({"density": 0.0}, "0.0"),
        ({"density": 1.5}, "1.5"),
        ({"density": -0.1}, "-0.1"),
        ({"density": float("nan")}, "nan"),
        ({"fusion": "timer"}, "adaptive"),
        ({"memory": "momentum"}, "residual"),
        ({"scope": "model"}, "'tensor', 'group'"),
        ({"quota": "equal"}, "'pooled'"),
        ({"collective": "ring"}, "'allgather'"),
        ({"wire": "int4"}, "bf16"),
        ({"dense_below": -1}, "-1"),
        ({"dense_below_ndim": -1}, "dense_below_ndim"),
        ({"transport": "mpi"}, "'torch'"),
        ({"system": "safusion", "offload": "yes"}, "offload must be True or False, got 'yes'"),
        ({"quota": "pooled", "scope": "group"}, "scope='tensor'"),
        ({"fusion": "naive", "scope": "group"}, "scope='tensor'"),
        ({"compressor": "none", "density": 0.5, "scope": "everywhere"}, "everywhere"),
    ],
)
def test_wrong_arguments_are_refused_by_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        SAFusionStrategy(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"ddp_comm_hook": lambda state, bucket: None},
        {"ddp_comm_wrapper": lambda hook: hook},
        {"model_averaging_period": 4},
        {"skip_all_reduce_unused_params": True},
        {"bucket_cap_mb_list": [0]},
        {"delay_all_reduce_named_params": [("a", torch.zeros(1))]},
        {"mixed_precision": object()},
    ],
)
def test_options_that_contradict_the_strategy_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(MisconfigurationException, match=next(iter(options))):
        SAFusionStrategy(**options)
    # LightningCLI passes every option with its default
    SAFusionStrategy(**dict.fromkeys(options))


@pytest.mark.parametrize("given", [{}, {"bucket_cap_mb": 0}])
def test_ddp_is_not_given_a_bucket_size_of_zero(
    tmp_path: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class LikeTorch211(DistributedDataParallel):
        def __init__(self, *args: Any, bucket_cap_mb: float = 25, **options: Any) -> None:
            assert bucket_cap_mb, "bucket_cap_mb should be set by now"
            super().__init__(*args, bucket_cap_mb=bucket_cap_mb, **options)

    monkeypatch.setattr("lightning_safusion.integration.fit.DistributedDataParallel", LikeTorch211)
    ended = fit(tmp_path, SAFusionStrategy(**FORK, **given), max_steps=1)
    assert [rank["report"]["windows"] for rank in ended] == [1, 1]


def test_a_dense_pattern_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="matches no trainable parameter"):
        fit(tmp_path, SAFusionStrategy(dense=["encoder.*"], **FORK))


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params)


def nadam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.NAdam(params)


def heavy_ball(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1, momentum=0.9)


def test_a_memory_with_momentum_refuses_an_optimizer_with_momentum(tmp_path: Path) -> None:
    model = TinyClassifier()
    model.configure_optimizers = lambda: adam(model.parameters())  # type: ignore[method-assign]  # another optimizer for this model
    with pytest.raises(Exception, match="memory='dgc' .*applies momentum before selection"):
        fit(tmp_path, SAFusionStrategy(memory="dgc", **FORK), model)


def test_which_momentum_comes_twice() -> None:
    weights = [torch.nn.Parameter(torch.ones(2))]
    without = [torch.optim.SGD(weights, 0.1), torch.optim.AdamW(weights, betas=(0.0, 0.99))]
    for memory, optimizer in [
        (DGCMemory(), adam(weights)),
        (DGCMemory(), heavy_ball(weights)),
        (DGCMemory(), without[1]),  # its steps are not those of SGD
        (DecoupledMomentum(), nadam(weights)),
        (EF21Memory(), nadam(weights)),
    ]:
        with pytest.raises(MisconfigurationException, match=r"betas=\(0.0, ...\)|momentum=0"):
            refuse_double_momentum(memory, optimizer)
    for optimizer in (*without, adam(weights), heavy_ball(weights)):
        refuse_double_momentum(EF21Memory(momentum=0.0), optimizer)
        refuse_double_momentum(ResidualMemory(), optimizer)
    for optimizer in (*without, adam(weights), heavy_ball(weights)):  # theirs is switched off
        refuse_double_momentum(EF21Memory(), optimizer)
        refuse_double_momentum(DecoupledMomentum(), optimizer)


def test_error_feedback_below_adam_is_cautioned_against() -> None:
    weights = [torch.nn.Parameter(torch.ones(2))]
    if hasattr(torch.optim, "Muon"):
        matrices = [torch.nn.Parameter(torch.ones(2, 2))]
        assert "Muon may end with a higher loss at a density of 0.1" in str(
            caution(ResidualMemory(), 0.1, torch.optim.Muon(matrices))
        )
    said = caution(ResidualMemory(), 0.01, nadam(weights))
    assert said is not None
    assert "density of 0.01" in said
    assert "memory='decoupled' with betas=(0.0, ...) for NAdam" in said
    for memory, density, optimizer in [
        (ResidualMemory(), 0.01, heavy_ball(weights)),
        (ResidualMemory(), 0.25, adam(weights)),
        (ResidualMemory(), 0.01, torch.optim.AdamW(weights, betas=(0.0, 0.99))),
        (DecoupledMomentum(), 0.01, torch.optim.AdamW(weights, betas=(0.0, 0.99))),
        (NoMemory(), 0.01, adam(weights)),
    ]:
        assert caution(memory, density, optimizer) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dense": ["*.bias", 3]}, r"texts such as '\*.bias', got 3"),
        ({"dense_below": "1k"}, "dense_below is a number of elements, an integer, got '1k'"),
        ({"dense_below_ndim": 1.5}, "dense_below_ndim is a number of dimensions, an integer, got 1.5"),
    ],
)
def test_rules_on_dense_tensors_are_checked_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        SAFusionStrategy(**options)


def test_a_residual_that_is_the_momentum_needs_sparsity() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], betas=(0.0, 0.99))
    said = caution(DecoupledMomentum(), 1.0, optimizer)
    assert said is not None
    assert "at density 1 training has none" in said
    with pytest.raises(ValueError, match="it needs a collective other than 'allreduce'"):
        SAFusionStrategy(memory="decoupled", collective="allreduce")


def test_what_plain_ddp_would_send_of_wide_gradients_is_counted() -> None:
    for dtype, aside in ((torch.float32, True), (torch.float64, False)):
        sent = SAFusionStrategy(density=0.999, wire="fp32").settings
        reason = sent.dense_reason(specs([(1000,)], dtype), world_size=2)
        assert (reason is not None) == aside


def test_that_is_said_once_before_training() -> None:
    class Model(TinyClassifier):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return Lion(self.parameters(), lr=0.01)

    def run(rank: int) -> list[str]:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]  # a listener
        logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(handler)
        trainer(SAFusionStrategy(density=0.05), max_steps=2).fit(Model(), classification())
        return [text for text in said if "may end with a higher loss" in text]

    assert [len(said) for said in run_launched(2, run)] == [1, 0]


class Different(SAFusionStrategy):
    """A worker that was started with another density."""

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.global_rank == 1:
            from dataclasses import replace

            from lightning_safusion.sparsify import ConstantDensity

            self.settings = replace(self.settings, density=ConstantDensity(0.02))


def test_different_settings_are_found_at_set_up_on_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="different settings") as caught:
        fit(tmp_path, Different(density=0.05, **FORK))
    assert "0.05" in str(caught.value)
    assert "0.02" in str(caught.value)


def test_the_strategy_can_be_pickled_for_spawn() -> None:
    strategy = SAFusionStrategy(compressor=GaussianK(), density=0.1, fusion="adaptive", memory="dgc")
    copy = pickle.loads(pickle.dumps(strategy))  # noqa: S301  our own bytes
    assert copy.settings.describe() == strategy.settings.describe()


def test_python_reducer_is_refused(tmp_path: Path) -> None:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"), pytest.raises(Exception, match="python_reducer"):
        fit(tmp_path, SAFusionStrategy(**FORK))


def test_validation_without_training_needs_no_engine() -> None:
    model = TinyClassifier()
    model.validation_step = lambda batch, batch_idx: None  # type: ignore[method-assign]  # validates nothing
    strategy = SAFusionStrategy()
    trainer(strategy, devices=1).validate(model, classification(), verbose=False)
    assert strategy.figures()["windows"] == 0


def test_names_of_before_say_what_they_are_now() -> None:
    strategy = SAFusionStrategy()
    with pytest.warns(DeprecationWarning, match="SAFusionStrategy.engine"):
        assert strategy.controller is strategy.engine
    with pytest.warns(DeprecationWarning, match=r"SAFusionStrategy.figures\(\)"):
        assert strategy.report() == strategy.figures()
