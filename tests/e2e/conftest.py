"""Trainings and clusters that several tests of the launchers share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import need, started
from tests.e2e.slurm import SlurmCluster, slurm_cluster
from tests.e2e.training import LIMIT, assert_sparse, command


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an uninterrupted training on two workers that Lightning itself has started (popen)."""
    folder = tmp_path_factory.mktemp("popen")
    with started(command(folder, "--devices", "2"), folder / "output") as training:
        assert_sparse(training.finish(LIMIT))
    return folder


@pytest.fixture(scope="session")
def cluster() -> Iterator[SlurmCluster]:
    """A Slurm cluster of two machines with two (make-believe) GPUs each."""
    need("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "sinfo", "squeue")
    with slurm_cluster() as running:
        yield running
