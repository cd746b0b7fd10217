"""Precision in real trainers: scaled losses, overflow on one rank, 16-bit parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy

from lightning_safusion import SAFusionStrategy
from tests.models import TakeTurns, TinyClassifier
from tests.quick import quick_of
from tests.test_strategy import FORK, equal, fit

SPARSE: dict[str, Any] = {"density": 0.1, "collective": "allgather", **FORK}
DENSE: dict[str, Any] = {"density": 1.0, "collective": "allgather", **FORK}


def scaled(**options: Any) -> MixedPrecision:
    """16-bit training with a loss scaler on the CPU (Lightning turns the string into bfloat16 there)."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **options))


PRECISIONS = ("bf16-mixed", "bf16-true", "16-true", "64-true")


@pytest.mark.parametrize("precision", quick_of(PRECISIONS, ("bf16-mixed", "16-true")))
def test_precision_at_density_1_is_ddp(tmp_path: Path, precision: Any) -> None:
    plain = fit(tmp_path / "ddp", DDPStrategy(**FORK), TinyClassifier(lr=0.02), precision=precision)
    ours = fit(tmp_path / "ours", SAFusionStrategy(**DENSE), TinyClassifier(lr=0.02), precision=precision)
    # 64-true: gradients cross in float32. 16-bit: DDP rounds every mean and forgets what it rounded, we send it later
    tolerance = {"64-true": 1e-5, "bf16-true": 3e-2, "16-true": 3e-3}.get(precision, 0.0)
    for a, b in zip(ours[0]["parameters"], plain[0]["parameters"], strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("precision", quick_of(PRECISIONS, ("bf16-true", "64-true")))
def test_sparse_training_in_any_precision(tmp_path: Path, precision: Any) -> None:
    first, second = fit(tmp_path, SAFusionStrategy(**SPARSE), TinyClassifier(lr=0.02), precision=precision)
    assert equal(first["parameters"], second["parameters"])
    assert first["losses"][-1] < first["losses"][0]


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_manual_optimization_in_any_precision(tmp_path: Path, precision: Any) -> None:
    # the plugins of "true" precisions set the default dtype around a step
    strategy = SAFusionStrategy(**SPARSE, find_unused_parameters=True)
    first, second = fit(tmp_path, strategy, TakeTurns(lr=0.02), precision=precision, max_steps=10)
    assert equal(first["parameters"], second["parameters"])


def test_a_scaled_loss_at_density_1_is_ddp(tmp_path: Path) -> None:
    # no overflow: DDP drops the gradients of a step that is skipped, we keep them
    factor = {"init_scale": 256.0, "growth_interval": 3}
    plain = fit(tmp_path / "ddp", DDPStrategy(**FORK), plugins=[scaled(**factor)])
    ours = fit(tmp_path / "ours", SAFusionStrategy(**DENSE), plugins=[scaled(**factor)])
    for a, b in zip(ours[0]["parameters"], plain[0]["parameters"], strict=True):
        assert torch.equal(a, b)  # powers of two change no bit


class Watch(Callback):
    """Keeps the residual and the parameters of every step."""

    def __init__(self) -> None:
        self.residuals: list[torch.Tensor] = []
        self.weights: list[torch.Tensor] = []
        self.scales: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        assert isinstance(trainer.strategy, SAFusionStrategy)
        engine = trainer.strategy.engine
        assert engine is not None
        memory = engine.space.memory
        self.residuals.append(memory.accumulated(0, engine.space.layout.numel).clone())
        self.weights.append(torch.cat([p.detach().flatten() for p in pl_module.parameters()]))
        self.scales.append(trainer.precision_plugin.scaler.get_scale())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.watched = (self.residuals, self.weights, self.scales)


class Overflowing(TinyClassifier):
    """Its gradient overflows on rank 1 in step 7, as a 16-bit one would."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 7 and self.global_rank == 1:
            loss = loss * float("inf")
        return loss

    def on_train_end(self) -> None:
        torch.save(self.watched, Path(self.folder) / f"watched{self.global_rank}.pt")


def test_an_overflow_on_one_rank_is_skipped_by_all_and_loses_nothing(tmp_path: Path) -> None:
    model = Overflowing(lr=0.02)
    model.folder = str(tmp_path)
    first, second = fit(
        tmp_path, SAFusionStrategy(**SPARSE), model, plugins=[scaled(growth_interval=5)], extra=[Watch], max_steps=20
    )
    assert equal(first["parameters"], second["parameters"])
    for rank in range(2):
        residuals, weights, scales = torch.load(tmp_path / f"watched{rank}.pt")
        assert torch.equal(weights[7], weights[6]), "the step was not skipped"
        assert not torch.equal(weights[8], weights[7])
        assert all(torch.isfinite(r).all() for r in residuals)
        assert scales[7] == scales[6] / 2
        assert len(set(scales)) > 2, "the factor changed only once"
        # unscaled: of the size of gradients, not of 2^16 times them
        assert residuals[-1].abs().max() < 50
    assert torch.load(tmp_path / "watched0.pt")[2] == torch.load(tmp_path / "watched1.pt")[2]
