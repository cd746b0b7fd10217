"""One training for every launcher: a workstation, ``torchrun``, Slurm; it continues where it was interrupted.

    python train.py --accelerator cpu --devices 2
    torchrun --nproc-per-node 2 train.py --accelerator cpu --devices 2
    sbatch requeue.sbatch

Every batch is a function of the step and the rank, so that a continued training sees what it would have seen; with
``--deterministic`` it ends with the same parameters, bit for bit.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_safusion import SAFusionStrategy

_REPORT_EVERY = 20  # steps


class Classifier(LightningModule):
    """Learns which of ten random directions a random point lies closest to.

    Args:
        batch: Samples per worker and step.
    """

    def __init__(self, batch: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.batch = batch
        self.net = nn.Sequential(
            nn.Linear(64, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        )
        self.directions = torch.randn(64, 10)

    def samples(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """The points (float32 [batch, 64]) and classes (int64 [batch]) of one step of one worker."""
        x = torch.randn(self.batch, 64, generator=torch.Generator().manual_seed(step * 65536 + rank))
        return x.to(self.device), (x @ self.directions).argmax(dim=1).to(self.device)

    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(range(1000), batch_size=None)  # type: ignore[arg-type]  # counts; the samples are made here

    def training_step(self, index: int, batch_idx: int) -> Tensor:
        x, y = self.samples(self.global_step, self.global_rank)
        return nn.functional.cross_entropy(self.net(x), y)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0 and self.global_step % _REPORT_EVERY == 0:
            # a batch job's output is a file: lines, not a progress bar
            print(f"step {self.global_step}: loss {outputs['loss'].item():.4f}", flush=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        print(f"rank {self.global_rank} saves at step {checkpoint['global_step']}", flush=True)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        print(f"rank {self.global_rank} continues at step {checkpoint['global_step']}", flush=True)

    def on_train_end(self) -> None:
        # here and not after fit(): a spawned worker's objects do not come back
        if self.global_rank != 0:
            return
        torch.save(self.state_dict(), Path(self.trainer.default_root_dir) / "final.pt")
        strategy = self.trainer.strategy
        report = strategy.figures() if isinstance(strategy, SAFusionStrategy) else {}
        if report.get("plain_ddp") is not None:
            print(f"gradients are left to plain DDP: {report['plain_ddp']}", flush=True)
        elif "bytes_sent" in report:
            print(f"sent {report['bytes_sent']} bytes per step, DDP sends {report['dense_bytes']}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def newest_checkpoint(folder: Path) -> Path | None:
    """What an interrupted run has left: Lightning's requeue writes ``hpc_ckpt_*.ckpt``, ModelCheckpoint the others."""
    return max(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime, default=None)


def parse(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=1, help="workers per machine")
    parser.add_argument("--nodes", type=int, default=1, help="machines")
    parser.add_argument("--launcher", default="popen", help="popen, spawn or fork; unused where workers are started")
    parser.add_argument("--density", type=float, default=0.05)
    parser.add_argument("--collective", default="auto", help="allgather sends every buffer sparse")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--save-every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="of this training alone; all machines see it")
    parser.add_argument("--deterministic", action="store_true")
    return parser.parse_args(args)


def main() -> None:
    """Trains, or continues a training that was interrupted."""
    args = parse()
    args.folder.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.nodes,
        strategy=SAFusionStrategy(density=args.density, collective=args.collective, start_method=args.launcher),
        max_steps=args.steps,
        deterministic=args.deterministic,
        default_root_dir=args.folder,
        callbacks=[ModelCheckpoint(args.folder, filename="{step}", every_n_train_steps=args.save_every)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), ckpt_path=newest_checkpoint(args.folder))


if __name__ == "__main__":
    main()
