"""Trainer with a model that FSDP2 shards inside of a machine, and a strategy that exchanges it sparse. It resumes.

python model_parallel.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_safusion import SAFusionModelParallelStrategy

EPOCHS, CHECKPOINTS = 5, Path("model_parallel")


class Quadrants(LightningModule):
    """Learns whether two points lie in the same quadrant."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            fully_shard(self.net[3], mesh=self.device_mesh["shard"])  # the largest parts first
            fully_shard(self.net, mesh=self.device_mesh["shard"])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x).squeeze(1)
        hits = ((logits > 0) == (y > 0.5)).float().mean()
        self.log("accuracy", hits, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True)
        return nn.functional.binary_cross_entropy_with_logits(logits, y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def points(count: int) -> TensorDataset:
    """Pairs of points (float32 [4]), and whether they lie in the same quadrant (0.0 or 1.0)."""
    pairs = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(pairs, ((pairs[:, :2] > 0) == (pairs[:, 2:] > 0)).all(dim=1).float())


def main() -> None:
    """Trains on all GPUs of this machine, or on four CPU workers."""
    seed_everything(0)
    # a replica is a machine, by default; here it is half of one
    strategy = SAFusionModelParallelStrategy(replicate_size=2, collective="allgather")  # "auto" may choose DDP
    trainer = Trainer(
        accelerator="auto",
        devices=torch.cuda.device_count() or 4,
        strategy=strategy,
        max_epochs=EPOCHS,
        callbacks=[ModelCheckpoint(CHECKPOINTS)],  # folders, in which each worker writes its own shards and residuals
        logger=False,
    )
    # those that are complete have this file; they are resumed also with other sizes
    finished = sorted(CHECKPOINTS.glob("*/meta.pt"), key=lambda path: path.stat().st_mtime)
    latest = finished[-1].parent if finished else None
    trainer.fit(Quadrants(), DataLoader(points(8192), batch_size=64, shuffle=True), ckpt_path=latest)
    if trainer.is_global_zero and trainer.callback_metrics:  # something was left to train
        figures = strategy.figures()
        print(f"accuracy {trainer.callback_metrics['accuracy']:.3f}")
        print(f"{figures['bytes_sent']} bytes in the last step, FSDP2 sends {figures['dense_bytes']}")


if __name__ == "__main__":
    main()
