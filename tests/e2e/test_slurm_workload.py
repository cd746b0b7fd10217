"""Slurm: the batch script of the papers' workloads, as it is, on CPU; it goes on where it was interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples.workloads.make_tiny_data import make_cifar100
from tests.e2e.processes import ROOT, wait_until
from tests.e2e.slurm import SlurmCluster
from tests.e2e.training import LIMIT

pytestmark = pytest.mark.slow

STEPS = 2 * 1280 // 16  # two epochs, two workers with eight images each
# Smaller machines than the script asks for; metrics are written at every step, to see where the training is.
_SMALL = ("--nodes=2", "--cpus-per-task=1", "--time=30")
_TINY = (
    "--config=examples/workloads/configs/vgg19_cifar100_tiny.yaml",
    *("--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs", "--trainer.logger.flush_logs_every_n_steps=1"),
    *("--trainer.log_every_n_steps=1", "--trainer.enable_progress_bar=false"),
)


def test_a_requeued_workload_goes_on(cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")  # the script is submitted from the repository's root
    make_cifar100(tmp_path / "data" / "tiny" / "cifar-100-python", count=1280)
    script = str(ROOT / "examples" / "slurm" / "workload.sbatch")
    options = ("--parsable", "--output=%j.out", *_SMALL, script, "vgg19_cifar100", *_TINY)
    number = cluster.run("sbatch", *options, cwd=tmp_path).strip()
    log, folder = tmp_path / f"{number}.out", tmp_path / "runs" / f"vgg19_cifar100-{number}"

    metrics = tmp_path / "logs" / "lightning_logs" / "version_0" / "metrics.csv"
    wait_until(metrics.exists, LIMIT, lambda: log.read_text() if log.exists() else str(cluster.job(number)))
    cluster.run("scancel", "--signal=SIGUSR1", number)  # what --signal does shortly before the limit
    output = cluster.finish(number, log, LIMIT)

    assert cluster.job(number)["Restarts"] == "1"
    # where the signal reaches the workers a step apart, there are two
    saved = max(folder.glob("hpc_ckpt_*.ckpt"), key=lambda path: path.stat().st_mtime)
    assert f"Restored all states from the checkpoint at {saved.relative_to(tmp_path)}" in output
    # in the first epoch, of which ModelCheckpoint has saved nothing
    assert 0 < torch.load(saved, weights_only=True)["global_step"] < STEPS // 2
    ended = max(tmp_path.rglob("last.ckpt"), key=lambda path: path.stat().st_mtime)
    assert torch.load(ended, weights_only=True)["global_step"] == STEPS
