"""Slurm: real daemons, the example's batch scripts as they are, on CPU."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

from tests.e2e.processes import ROOT, find, started, wait_until
from tests.e2e.slurm import SlurmCluster
from tests.e2e.training import LIMIT, OPTIONS, STEPS, assert_same, assert_sparse, steps_of

pytestmark = pytest.mark.slow

_BATCH = ROOT / "examples" / "slurm"
# Smaller machines than the scripts ask for; the time must stay longer than what --signal subtracts from it.
_SMALL = ("--cpus-per-task=1", "--time=30")


def _submit(cluster: SlurmCluster, folder: Path, script: str, *sizes: str) -> tuple[str, Path, Path]:
    """Submits a batch script of the examples; returns the job's number, its output and the training's folder."""
    for copied in ("train.py", script):  # all that a job needs
        shutil.copy(_BATCH / copied, folder)
    options = ("--parsable", "--output=%j.out", *_SMALL, *sizes)
    number = cluster.run("sbatch", *options, script, *OPTIONS, cwd=folder).strip()
    return number, folder / f"{number}.out", folder / "runs" / number


def test_a_job_is_measured_where_srun_starts_it(cluster: SlurmCluster, tmp_path: Path) -> None:
    command = ["srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    command += [sys.executable, "-m", "safusion_command", "bench", "--output", str(tmp_path / "out")]
    command += ["--model", "tests.tools.bench.own_job:Net", "--data", "tests.tools.bench.own_job:Data"]
    command += ["--systems", "ddp-bf16", "--rounds", "1", "--block", "2", "--calibrate", "false"]
    with started(command, tmp_path / "output", cluster.env) as bench:
        assert "2 workers on 2 machines" in bench.finish(LIMIT)
    assert "strategy" in (tmp_path / "out" / "best.yaml").read_text()


ON_ONE = ("--ntasks-per-node=2", "--gpus-per-node=2")
ON_TWO = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1")


@pytest.mark.parametrize(("script", "sizes"), [("single_node", ON_ONE), ("multi_node", ON_TWO)])
def test_batch_scripts_train_as_popen_does(
    cluster: SlurmCluster, tmp_path: Path, reference: Path, script: str, sizes: tuple[str, ...]
) -> None:
    number, log, folder = _submit(cluster, tmp_path, f"{script}.sbatch", *sizes)
    assert_sparse(cluster.finish(number, log, LIMIT))
    assert_same(folder, reference)


def test_a_requeued_job_ends_as_if_nothing_had_happened(cluster: SlurmCluster, tmp_path: Path, reference: Path) -> None:
    number, log, folder = _submit(cluster, tmp_path, "requeue.sbatch", "--nodes=2", "--gpus-per-node=1")
    begun = re.compile(r"step 40\b")
    wait_until(lambda: log.exists() and begun.search(log.read_text()), LIMIT, lambda: str(cluster.job(number)))
    cluster.run("scancel", "--signal=SIGUSR1", number)  # what --signal does shortly before the limit

    output = cluster.finish(number, log, LIMIT)

    assert cluster.job(number)["Restarts"] == "1"
    # The signal reaches the ranks at different points of their steps; both have saved after the same one. It may come
    # twice, from Slurm and from srun, which passes it on; Lightning saves anew then.
    newest = max(folder.glob("hpc_ckpt_*.ckpt"), key=lambda path: int(path.stem.rpartition("_")[2]))
    saved = torch.load(newest, weights_only=True)["global_step"]
    assert 40 <= saved < STEPS
    parts = sorted(path.name.partition("-")[0] for path in Path(f"{newest}.safusion").iterdir())
    assert parts == ["rank_00000", "rank_00001"]
    for rank in ("0", "1"):
        assert saved in steps_of(output, "saves")[rank]
        assert steps_of(output, "continues")[rank] == [saved]
    assert_sparse(output)
    assert_same(folder, reference)


def test_a_job_that_has_lost_a_worker_continues_on_the_machines_that_are_left(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    sizes = ("--nodes=1-2", "--gpus-per-node=2", "--cpus-per-task=2")
    number, log, folder = _submit(cluster, tmp_path, "requeue.sbatch", *sizes)
    begun = re.compile(r"step 120\b")
    wait_until(lambda: log.exists() and begun.search(log.read_text()), LIMIT, lambda: str(cluster.job(number)))
    cluster.run("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    try:
        (worker,) = find(SLURM_JOB_ID=number, SLURM_PROCID="3")
        os.kill(worker, signal.SIGKILL)
        output = cluster.finish(number, log, LIMIT)
    finally:
        cluster.run("scontrol", "update", "nodename=n2", "state=resume")

    assert (folder / "failed").read_text().startswith("run 0\n")
    (lost,) = set(re.findall(rf"failed in step (\d+).* rank 3 \(process {worker} on", output))
    steps = steps_of(output, "continues")
    assert steps.keys() == {"0", "1"}
    assert steps["0"] == steps["1"]
    assert 0 < int(lost) - steps["0"][0] <= 100  # are repeated
    assert "was saved by 4 workers and is resumed by 2" in output
    assert steps_of(output, "saves")["0"][-1] == STEPS
