"""A loop of Lightning Fabric; its strategy is the one line of SAFusion. It resumes from its checkpoint.

python fabric.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_safusion import SAFusionFabricStrategy

EPOCHS, CHECKPOINT = 5, Path("fabric.ckpt")


def points(count: int) -> TensorDataset:
    """Pairs of points (float32 [4]), and whether they lie in the same quadrant (0.0 or 1.0)."""
    pairs = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(pairs, ((pairs[:, :2] > 0) == (pairs[:, 2:] > 0)).all(dim=1).float())


def main() -> None:
    """Trains on all GPUs of this machine, or on two CPU workers."""
    strategy = SAFusionFabricStrategy(collective="allgather")  # "auto", the default, may choose DDP
    fabric = Fabric(accelerator="auto", devices=torch.cuda.device_count() or 2, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    net = nn.Sequential(
        nn.Linear(4, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
    )
    # both in one call: set up apart, the first step is one of DDP
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=2e-3))
    loader = fabric.setup_dataloaders(DataLoader(points(8192), batch_size=64, shuffle=True))

    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "epoch": -1}
    if CHECKPOINT.exists():
        fabric.load(CHECKPOINT, state)  # with the residuals, also on more or fewer workers
        fabric.print(f"goes on after epoch {state['epoch']}")
    for epoch in range(state["epoch"] + 1, EPOCHS):
        hits, count = 0.0, 0
        for x, y in loader:
            logits = model(x).squeeze(1)
            optimizer.zero_grad()
            fabric.backward(nn.functional.binary_cross_entropy_with_logits(logits, y))
            optimizer.step()
            hits += float(((logits > 0) == (y > 0.5)).float().sum())
            count += len(y)
        state["epoch"] = epoch
        fabric.save(CHECKPOINT, state)  # on all workers: the residuals of all go into it
        figures = strategy.attached[0].figures()
        fabric.print(f"epoch {epoch}: accuracy {hits / count:.3f},", end=" ")
        fabric.print(f"{figures['bytes_sent']} bytes in the last step, DDP sends {figures['dense_bytes']}", flush=True)


if __name__ == "__main__":
    main()
