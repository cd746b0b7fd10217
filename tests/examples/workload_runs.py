"""Runs the workloads, and reads what they leave."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser

from examples.workloads.cli import CONFIGS, WorkloadCLI

ROOT = Path(__file__).parents[2]
#: Those of full runs; the others are laid over one of them.
WORKLOADS = sorted(
    path.stem for path in CONFIGS.glob("*.yaml") if path.stem not in ("defaults", "dense") and "_tiny" not in path.stem
)


@dataclass(frozen=True)
class Run:
    rows: list[dict[str, float]]  # of metrics.csv, without empty entries
    checkpoint: Path  # last.ckpt

    def column(self, key: str) -> list[float]:
        return [row[key] for row in self.rows if key in row]


def configs(*names: str) -> list[str]:
    return [argument for name in names for argument in ("--config", str(CONFIGS / f"{name}.yaml"))]


def fit(folder: Path, workload: str, *arguments: str, dense: bool = False) -> Run:
    """Trains a tiny workload, or its dense baseline, in an empty folder, on two workers.

    They are forked from this process: importing everything anew takes longer.
    """
    names = (workload, f"{workload}_tiny", "dense") if dense else (workload, f"{workload}_tiny")
    forked = "--trainer.strategy=ddp_fork" if dense else "--trainer.strategy.init_args.start_method=fork"
    logger = ["--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={folder}"]
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    root = f"--trainer.default_root_dir={folder}"
    WorkloadCLI(["fit", *configs(*names), forked, *logger, *quiet, root, *arguments])
    logs = folder / "lightning_logs" / "version_0"
    with (logs / "metrics.csv").open() as file:
        rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    return Run(rows, logs / "checkpoints" / "last.ckpt")


def model_on_meta(workload: str, **init_args: object) -> LightningModule:
    """The model of a configuration, of which ``init_args`` replace some, without memory for its parameters."""
    parser = LightningArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_subclass_arguments(LightningModule, "model", required=True)
    for section in ("data", "trainer"):
        parser.add_argument(f"--{section}", type=dict)
    replaced = yaml.safe_dump({"model": {"init_args": init_args}})
    with torch.device("meta"):
        return parser.instantiate(parser.parse_args([*configs(workload), "--config", replaced])).model


def shared(data: Any, rank: int, workers: int) -> Any:
    """A data module as that of one of several workers."""
    data.trainer = Trainer(accelerator="cpu", devices=workers, strategy="ddp", logger=False)
    data.trainer.strategy.cluster_environment.set_global_rank(rank)
    data.trainer.strategy._local_rank = rank
    assert data.rank == data.trainer.global_rank == rank
    return data
