"""SAFusion in one changed line: ``python quickstart.py`` trains on two CPU workers.

The scheme of the SAFusion paper is ``SAFusionStrategy(system="safusion-paper", compressor="gaussiank", density=0.05)``.
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_safusion import SAFusionStrategy


class Regression(LightningModule):
    """A small network that learns a known function."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, prog_bar=True, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero and isinstance(self.trainer.strategy, SAFusionStrategy):
            report = self.trainer.strategy.figures()
            if report["plain_ddp"]:  # no network to speak of between two processes of one machine
                print(f"plain DDP took over: {report['plain_ddp']} (collective='allgather' keeps every buffer sparse)")
                return
            sparse, buffers = report["collectives"].count("allgather"), len(report["collectives"])
            print(f"{sparse} of {buffers} buffers were cheaper sent sparse here; collective='allgather' forces it")
            print(f"sent {report['bytes_sent']:,} bytes per step where DDP sends {report['dense_bytes']:,}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        x = torch.randn(2048, 16, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, x[:, :4].sum(dim=1, keepdim=True).tanh()), batch_size=32, shuffle=True)


def main() -> None:
    """Trains on two workers of this machine."""
    strategy = SAFusionStrategy()  # the only line that differs from plain DDP
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=10, logger=False)
    trainer.fit(Regression())
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss']:.4f}")


if __name__ == "__main__":
    main()
