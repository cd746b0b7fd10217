"""Runs the workloads as a user does, and reads what they leave."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import torch
import yaml
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningArgumentParser

from examples.workloads.cli import CONFIGS

ROOT = Path(__file__).parents[2]
#: Those of full runs; the others are laid over one of them.
WORKLOADS = sorted(
    path.stem for path in CONFIGS.glob("*.yaml") if path.stem not in ("defaults", "dense") and "_tiny" not in path.stem
)


def configs(*names: str) -> list[str]:
    """The arguments that name these configurations."""
    return [argument for name in names for argument in ("--config", str(CONFIGS / f"{name}.yaml"))]


def fit(folder: Path, workload: str, *arguments: str) -> list[dict[str, float]]:
    """Trains a tiny workload on two workers, in processes of its own.

    Args:
        folder: Gets logs and checkpoints, in ``version_0`` and ``checkpoints``.
        workload: A name in :data:`WORKLOADS`.
        arguments: Further ones.

    Returns:
        The rows of ``metrics.csv``, without empty entries.
    """
    logger = ["--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={folder}", "--trainer.logger.name=csv"]
    command = [sys.executable, "-m", "examples.workloads", "fit", *configs(workload, f"{workload}_tiny"), *arguments]
    quiet = ["--trainer.enable_progress_bar=false", f"--trainer.default_root_dir={folder}"]
    ended = subprocess.run(
        [*command, *logger, *quiet],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    newest = max(folder.glob("csv/version_*/metrics.csv"), key=lambda path: int(path.parent.name.split("_")[1]))
    with newest.open() as rows:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(rows)]


def column(rows: list[dict[str, float]], key: str) -> list[float]:
    """The values of one metric in the order in which they were logged."""
    return [row[key] for row in rows if key in row]


def newest_checkpoint(folder: Path) -> Path:
    """``last.ckpt`` of the latest run."""
    return max(folder.rglob("last.ckpt"), key=lambda path: path.stat().st_mtime)


def model_on_meta(workload: str, **init_args: object) -> LightningModule:
    """The model of a configuration, without memory for its parameters.

    Args:
        workload: A name in :data:`WORKLOADS`.
        init_args: What replaces the configuration's.
    """
    parser = LightningArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_subclass_arguments(LightningModule, "model", required=True)
    for section in ("data", "trainer"):
        parser.add_argument(f"--{section}", type=dict)
    replaced = yaml.safe_dump({"model": {"init_args": init_args}})
    with torch.device("meta"):
        return parser.instantiate(parser.parse_args([*configs(workload), "--config", replaced])).model
