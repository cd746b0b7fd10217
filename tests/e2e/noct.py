"""A training over a link whose exchange is switched off and on again every few steps: one worker of torchrun.

Switched off, a worker decodes its own message in place of everybody's: selection, packing, decoding and all that they
touch stay as they are, and only the exchange is left out. The model is paced: its layers sleep through most of their
time, so that what two workers on one machine take from each other's processors is no part of the comparison.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_safusion import Aligned, SAFusionStrategy
from lightning_safusion.callbacks import OverlapProfiler
from lightning_safusion.comm.transport.interface import FinishedWork, Transport, Work
from lightning_safusion.comm.transport.torch_backend import TorchTransport
from tests.models import trainer

BLOCK = 10  # steps with the exchange, then as many without
BLOCKS = 10
WIDTH, BATCH = 256, 4
FORWARD, BACKWARD = 0.005, 0.002  # seconds that a layer sleeps


class SwitchedTransport(TorchTransport):
    """Its all-gathers can be switched off."""

    on = True

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        if self.on:
            return super().all_gather(output, tensor)
        output.view(self.world_size, -1).copy_(tensor.expand(self.world_size, -1))
        return FinishedWork()


class SwitchedStrategy(SAFusionStrategy):
    def _make_transport(self, model: nn.Module) -> Transport:
        self.switched = SwitchedTransport()
        return self.switched


class Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        time.sleep(BACKWARD)
        return grads[0]


class Layer(nn.Linear):
    """Its gradients are ready after its sleep."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Pause.apply(super().forward(x))
        return y


class Model(LightningModule):
    """Wide layers; switches the exchange at the boundaries of blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(Layer(WIDTH, WIDTH) for _ in range(6)))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % BLOCK == 0:
            self.trainer.strategy.switched.on = is_on(batch_idx)
            self.trainer.strategy.barrier()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-4)


def is_on(step: int) -> bool:
    return step // BLOCK % 2 == 0


def main() -> None:
    """Trains, and leaves the profiler's files."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--density", type=float, default=0.25)
    args = parser.parse_args()
    torch.set_flush_denormal(True)
    steps = BLOCK * BLOCKS
    data = TensorDataset(torch.randn(2 * BATCH * steps, WIDTH, generator=torch.Generator().manual_seed(1)))
    torch.set_num_threads(1)
    job = trainer(
        SwitchedStrategy(collective="allgather", density=args.density, fusion=Aligned(4), wire="auto"),
        devices=1,
        num_nodes=2,
        callbacks=[OverlapProfiler(BLOCK, BLOCK, args.folder)],
        max_steps=steps,
    )
    job.fit(Model(), DataLoader(data, batch_size=BATCH))


if __name__ == "__main__":
    main()
