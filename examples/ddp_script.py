"""A data-parallel training as many have it, with Lightning's "ddp"; the README shows what changes for SAFusion."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(LightningModule):
    """Tells from two points of the plane whether they lie in the same quadrant."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def _loss_and_hits(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        points, same = batch
        logits = self.net(points).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, same), ((logits > 0) == (same > 0.5)).float()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss, _ = self._loss_and_hits(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        _, hits = self._loss_and_hits(batch)
        self.log("accuracy", hits.mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)}


def points(count: int, seed: int) -> TensorDataset:
    """Pairs of points (float32 [4]), and whether they lie in the same quadrant (0.0 or 1.0)."""
    pairs = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(pairs, ((pairs[:, :2] > 0) == (pairs[:, 2:] > 0)).all(dim=1).float())


def main() -> None:
    """Trains on two workers of this machine."""
    seed_everything(0)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=5,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        callbacks=[ModelCheckpoint(monitor="accuracy", mode="max"), LearningRateMonitor()],
    )
    trainer.fit(
        Classifier(),
        DataLoader(points(8192, seed=1), batch_size=64, shuffle=True),
        DataLoader(points(1024, seed=2), batch_size=256),
    )
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
