"""Launchers: torchrun over two machines, and with a worker that dies; processes that Lightning itself spawns.

Those that it forks are most of the quick tests.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from lab.bench.links import linked_namespaces
from tests.e2e.processes import environment, need, on_two_machines, started
from tests.e2e.training import LIMIT, STEPS, assert_same, assert_sparse, command, steps_of

pytestmark = pytest.mark.slow


def test_two_machines_train_as_two_workers_on_one(tmp_path: Path, reference: Path) -> None:
    need("ip", "tc")
    with linked_namespaces(2) as machines:
        training = command(tmp_path, "--nodes", "2", "--devices", "1")
        assert_sparse(on_two_machines(machines, tmp_path, LIMIT, *training[1:]))
    assert_same(tmp_path, reference)


def test_after_a_workers_death_all_continue_from_the_last_checkpoint(tmp_path: Path, reference: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    torchrun += ["--max-restarts", "1", *command(tmp_path, "--devices", "2")[1:]]
    # the restarted workers would read the addresses of the dead from a store that they share with torchrun:
    # https://github.com/pytorch/pytorch/issues/135712
    env = environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    with started(torchrun, tmp_path / "output", env) as training:
        training.wait_for(r"step 120\b", LIMIT)
        os.kill(training.descendant(RANK="1"), signal.SIGKILL)
        output = training.finish(LIMIT)
    steps = steps_of(output, "continues")
    assert steps["0"] == steps["1"]
    assert len(steps["0"]) == 1
    assert 100 <= steps["0"][0] < STEPS
    assert_same(tmp_path, reference)


def test_spawned_workers_train_as_popen_does(tmp_path: Path, reference: Path) -> None:
    with started(command(tmp_path, "--devices", "2", "--launcher", "spawn"), tmp_path / "output") as training:
        assert_sparse(training.finish(LIMIT))
    assert_same(tmp_path, reference)
