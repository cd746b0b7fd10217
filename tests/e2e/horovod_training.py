"""Trains small models one after the other, over Horovod or torch.distributed, and saves what they end with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_safusion import SAFusionStrategy
from tests.models import trainer

#: What each training gives the strategy.
CASES: dict[str, dict[str, Any]] = {
    "sparse": {"density": 0.05, "collective": "allgather"},
    "auto": {"density": 0.01},
    "naive": {"density": 0.05, "fusion": "naive", "collective": "allgather"},
    "sharded": {"density": 0.05, "collective": "sharded"},
    "dense": {"density": 1.0},
}


class Classifier(LightningModule):
    """Linear layers, a batch norm (buffers), and a sparse embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 32, sparse=True)
        self.net = nn.Sequential(nn.Linear(32, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        x, words, y = batch
        return nn.functional.cross_entropy(self.net(x + self.table(words)), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    x, words = torch.randn(640, 32, generator=generator), torch.randint(50, (640,), generator=generator)
    y = torch.randint(10, (640,), generator=generator)
    return DataLoader(TensorDataset(x, words, y), batch_size=16)


def train(folder: Path, transport: str) -> None:
    """Writes ``<case><rank>.pt`` for every case: final state and the last step's figures."""
    for name, options in CASES.items():
        model = Classifier()
        fit = trainer(SAFusionStrategy(transport=transport, **options), deterministic=True)
        fit.fit(model, data())
        figures = {"carrier": torch.distributed.get_backend(), **fit.strategy.figures()}
        torch.save({"state": model.state_dict(), "figures": figures}, folder / f"{name}{fit.global_rank}.pt")


def refusals(folder: Path) -> None:
    """Writes what is said to settings that do not go with Horovod."""
    heard = []
    for options in ({"devices": 3}, {"sync_batchnorm": True}):
        fit = trainer(SAFusionStrategy(transport="horovod"), **options)
        try:
            fit.fit(Classifier(), data())
        except (ValueError, MisconfigurationException) as error:
            heard.append(str(error))
    (folder / f"refusals{fit.global_rank}").write_text("\n".join(heard))


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), sys.argv[2])
    if sys.argv[2] == "horovod":
        refusals(Path(sys.argv[1]))
