"""Trainings and clusters that several tests of the launchers share."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from tests.e2e.processes import need, started
from tests.e2e.slurm import SlurmCluster, slurm_cluster
from tests.e2e.training import LIMIT, assert_sparse, command


@pytest.fixture(scope="module", autouse=True)
def cleaned_up_when_terminated() -> Iterator[None]:
    """Lets fixtures end their daemons and namespaces when the whole run is stopped, as ``timeout`` does.

    Not for the session: later tests look at the handlers of signals.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        pytest.exit(f"stopped by signal {number}")

    before = signal.signal(signal.SIGTERM, leave)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an uninterrupted training on two workers that Lightning itself has started (popen)."""
    folder = tmp_path_factory.mktemp("popen")
    with started(command(folder, "--devices", "2"), folder / "output") as training:
        assert_sparse(training.finish(LIMIT))
    return folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    """A Slurm cluster of two machines with two (make-believe) GPUs each."""
    need("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "sinfo", "squeue")
    with slurm_cluster() as running:
        yield running
