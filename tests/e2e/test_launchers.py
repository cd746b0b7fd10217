"""Launchers: torchrun over two machines, and with a worker that dies; processes that Lightning itself spawns.

Those that it forks are most of the quick tests.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from lab.bench.links import Namespace, linked_namespaces
from tests.e2e.processes import environment, need, started
from tests.e2e.training import LIMIT, STEPS, assert_same, assert_sparse, command, continued_at

pytestmark = pytest.mark.slow

_TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def _machine(machine: Namespace, node_rank: int, main: Namespace, folder: Path) -> list[str | Path]:
    """What a user types on one of two machines."""
    rendezvous = ["--master-addr", main.address, "--master-port", "29500"]
    torchrun = [*_TORCHRUN, "--nnodes", "2", "--node-rank", str(node_rank), "--nproc-per-node", "1", *rendezvous]
    return ["ip", "netns", "exec", machine.name, *torchrun, *command(folder, "--nodes", "2", "--devices", "1")[1:]]


def test_two_machines_train_as_two_workers_on_one(tmp_path: Path, reference: Path) -> None:
    need("ip", "tc")
    env = environment(GLOO_SOCKET_IFNAME="eth0")
    with (
        linked_namespaces(2) as (main, other),
        started(_machine(main, 0, main, tmp_path), tmp_path / "output0", env) as first,
        started(_machine(other, 1, main, tmp_path), tmp_path / "output1", env) as second,
    ):
        assert_sparse(first.finish(LIMIT))
        second.finish(20)
    assert_same(tmp_path, reference)


def test_after_a_workers_death_all_continue_from_the_last_checkpoint(tmp_path: Path, reference: Path) -> None:
    torchrun = [*_TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    # the restarted workers would read the addresses of the dead from a store that they share with torchrun:
    # https://github.com/pytorch/pytorch/issues/135712
    env = environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    with started([*torchrun, *command(tmp_path, "--devices", "2")[1:]], tmp_path / "output", env) as training:
        training.wait_for(r"step 120\b", LIMIT)
        os.kill(training.descendant(RANK="1"), signal.SIGKILL)
        output = training.finish(LIMIT)
    steps = continued_at(output)
    assert steps["0"] == steps["1"]
    assert len(steps["0"]) == 1
    assert 100 <= steps["0"][0] < STEPS
    assert_same(tmp_path, reference)


def test_spawned_workers_train_as_popen_does(tmp_path: Path, reference: Path) -> None:
    with started(command(tmp_path, "--devices", "2", "--launcher", "spawn"), tmp_path / "output") as training:
        assert_sparse(training.finish(LIMIT))
    assert_same(tmp_path, reference)
