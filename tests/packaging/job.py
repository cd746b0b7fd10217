"""A training, its resumption and its report, with whatever versions this interpreter has; run as a script.

Prints one line of JSON: the versions. Fails where a resumed training differs from an uninterrupted one, or the report
is not that of a sparse exchange.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_safusion import SAFusionStrategy

STEPS, HALF = 30, 25  # of which the first 20 are dense with Adam


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.global_step + self.global_rank)
        inputs = torch.randn(8, 16, generator=generator)  # by step: a resumed loader begins its epoch anew
        return nn.functional.cross_entropy(self.net(inputs), inputs[:, :4].argmax(1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)


class Report(Callback):
    """Writes the report of the last step: training runs in other processes."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.file.write_text(json.dumps(trainer.strategy.figures()))  # type: ignore[attr-defined]  # ours


def train(folder: Path, steps: int, checkpoint: Path | None = None) -> tuple[list[Tensor], dict[str, Any]]:
    """Parameters after training on two workers up to a step, and the report of that step."""
    folder.mkdir()
    model, file = Model(), folder / "report.json"
    loader = DataLoader(torch.zeros(2 * STEPS), batch_size=1)  # type: ignore[arg-type]  # as long as a Dataset
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SAFusionStrategy(start_method="fork", process_group_backend="gloo", collective="allgather"),
        max_steps=steps,
        deterministic=True,
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            Report(file),
            lightning.pytorch.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=HALF),
        ],
    )
    trainer.fit(model, loader, ckpt_path=None if checkpoint is None else str(checkpoint))
    return [param.detach() for param in model.parameters()], json.loads(file.read_text())


def main(folder: Path) -> None:
    whole, report = train(folder / "whole", STEPS)
    assert report["windows"] == STEPS, report
    assert 0 < report["achieved_density"] < 0.5, report
    assert 0 < report["bytes_sent"] < report["dense_bytes"] / 8, report
    assert report["plain_ddp"] is None, report
    train(folder / "half", HALF)
    resumed, _ = train(folder / "rest", STEPS, folder / "half" / f"step={HALF}.ckpt")
    assert all(map(torch.equal, whole, resumed)), "a resumed training differs"
    print(json.dumps({"torch": torch.__version__, "lightning": lightning.__version__}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
