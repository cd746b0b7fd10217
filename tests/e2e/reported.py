"""A training on two workers with every callback that leaves something for the report.

Usage: ``python reported.py FOLDER SYSTEM DENSITY``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_safusion import SAFusionStrategy
from lightning_safusion.callbacks import BufferSizeTuner, OverlapProfiler, TensorMissingRateMonitor
from tests.models import trainer

STEPS = 60


class Deep(LightningModule):
    """Many layers, one of them with a name that a careless page would take for a tag."""

    def __init__(self, width: int = 384, depth: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)
        self.register_parameter("<b>scale & shift</b>", nn.Parameter(torch.ones(1)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + norm(torch.relu(layer(x)))
        return nn.functional.cross_entropy(self.head(x) * self.get_parameter("<b>scale & shift</b>"), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)


def _batches() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2 * STEPS * 64, 384, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(0, 10, (len(x),), generator=generator)), batch_size=64)


def main(folder: Path, system: str, density: float) -> None:
    """Trains, and leaves the files in ``folder/safusion``."""
    torch.set_num_threads(1)
    job = trainer(
        SAFusionStrategy(system=system, density=density, collective="allgather"),
        max_steps=STEPS,
        default_root_dir=folder,
        callbacks=[
            OverlapProfiler(every_n_steps=20, record_steps=10, table=False),
            BufferSizeTuner(),
            TensorMissingRateMonitor(every_n_steps=2),
        ],
    )
    job.fit(Deep(), _batches())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
