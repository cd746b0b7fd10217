"""Precision in real trainers: scaled losses, overflow on one rank, 16-bit parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from lightning_safusion import SAFusionStrategy
from tests.models import TakeTurns, TinyClassifier, equal, fit, fit_both, weights
from tests.process_group import run_launched
from tests.quick import quick_of

SPARSE: dict[str, Any] = {"density": 0.1, "collective": "allgather"}
DENSE: dict[str, Any] = {"density": 1.0, "collective": "allgather"}


def scaled(**options: Any) -> MixedPrecision:
    """16-bit training with a loss scaler on the CPU (Lightning turns the string into bfloat16 there)."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **options))


PRECISIONS = ("bf16-mixed", "bf16-true", "16-true", "64-true")


@pytest.mark.parametrize("precision", quick_of(PRECISIONS, ("bf16-mixed", "16-true")))
def test_precision_at_density_1_is_ddp(precision: Any) -> None:
    (plain, _), (ours, _) = (
        fit_both(strategy, TinyClassifier(lr=0.02), precision=precision, max_steps=5)
        for strategy in ("ddp", SAFusionStrategy(**DENSE))
    )
    # 64-true: gradients cross in float32. 16-bit: DDP rounds every mean and forgets what it rounded, we send it later
    tolerance = {"64-true": 1e-5, "bf16-true": 3e-2, "16-true": 3e-3}.get(precision, 0.0)
    torch.testing.assert_close(ours.weights, plain.weights, rtol=0, atol=tolerance)


@pytest.mark.parametrize("precision", quick_of(PRECISIONS, ("bf16-true", "64-true")))
def test_sparse_training_in_any_precision(precision: Any) -> None:
    first, second = fit_both(SAFusionStrategy(**SPARSE), TinyClassifier(lr=0.02), precision=precision, max_steps=5)
    assert equal(first.weights, second.weights)
    assert first.losses[-1] < first.losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_manual_optimization_in_any_precision(precision: Any) -> None:
    # the plugins of "true" precisions set the default dtype around a step
    strategy = SAFusionStrategy(**SPARSE, find_unused_parameters=True)
    first, second = fit_both(strategy, TakeTurns(lr=0.02), precision=precision, max_steps=10)
    assert equal(first.weights, second.weights)


def test_a_scaled_loss_at_density_1_is_ddp() -> None:
    # no overflow: DDP drops the gradients of a step that is skipped, we keep them
    (plain, _), (ours, _) = (
        fit_both(strategy, max_steps=5, plugins=[scaled(init_scale=256.0, growth_interval=3)])
        for strategy in ("ddp", SAFusionStrategy(**DENSE))
    )
    assert equal(ours.weights, plain.weights)  # powers of two change no bit


class Watch(Callback):
    def __init__(self) -> None:
        self.steps: list[tuple[Tensor, Tensor, float]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        space = trainer.strategy.engine.space
        residual = space.memory.accumulated(0, space.layout.numel).clone()
        parameters = torch.cat([param.flatten() for param in weights(pl_module)])
        self.steps.append((residual, parameters, trainer.precision_plugin.scaler.get_scale()))


class Overflowing(TinyClassifier):
    """Its gradient overflows on rank 1 in step 7, as a 16-bit one would."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 7 and self.global_rank == 1 else loss


def test_an_overflow_on_one_rank_is_skipped_by_all_and_loses_nothing() -> None:
    def run(rank: int) -> tuple[list[Tensor], list[tuple[Tensor, Tensor, float]]]:
        watch, plugins = Watch(), [scaled(growth_interval=5)]
        options: dict[str, Any] = {"plugins": plugins, "callbacks": [watch], "max_steps": 20}
        return fit(SAFusionStrategy(**SPARSE), Overflowing(lr=0.02), **options).weights, watch.steps

    ended = run_launched(2, run)
    assert equal(ended[0][0], ended[1][0])
    for _, steps in ended:
        residuals, parameters, scales = zip(*steps, strict=True)
        assert torch.equal(parameters[7], parameters[6]), "the step was not skipped"
        assert not torch.equal(parameters[8], parameters[7])
        assert all(torch.isfinite(r).all() for r in residuals)
        assert scales[7] == scales[6] / 2
        assert len(set(scales)) > 2, "the factor changed only once"
        # unscaled: of the size of gradients, not of 2^16 times them
        assert residuals[-1].abs().max() < 50
        assert scales == tuple(scale for *_, scale in ended[0][1])
