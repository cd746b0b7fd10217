"""Launchers: torchrun over two machines, and with a worker that dies; processes that Lightning itself spawns.

Those that it forks are most of the quick tests.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from lab.bench.links import linked_namespaces
from tests.e2e.processes import need, on_two_machines, started, wait_until
from tests.e2e.training import LIMIT, STEPS, assert_same, assert_sparse, command, steps_of

pytestmark = pytest.mark.slow


def test_two_machines_train_as_two_workers_on_one(tmp_path: Path, reference: Path) -> None:
    need("ip", "tc")
    with linked_namespaces(2) as machines:
        training = command(tmp_path, "--nodes", "2", "--devices", "1")
        assert_sparse(on_two_machines(machines, tmp_path, LIMIT, *training[1:]))
    assert_same(tmp_path, reference)


def test_after_a_workers_death_all_continue_from_the_last_checkpoint(tmp_path: Path, reference: Path) -> None:
    """With a static rendezvous all workers, the dead as well, have written to the same store."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "static", "--nproc-per-node", "2"]
    torchrun += ["--master-addr", "127.0.0.1", "--master-port", str(_free_port())]
    torchrun += ["--max-restarts", "1", *command(tmp_path, "--devices", "2")[1:]]
    with started(torchrun, tmp_path / "output") as training:
        training.wait_for(r"step 120\b", LIMIT)
        os.kill(training.descendant(RANK="1"), signal.SIGKILL)
        output = training.finish(LIMIT)
    steps = steps_of(output, "continues")
    assert steps["0"] == steps["1"]
    assert len(steps["0"]) == 1
    assert 100 <= steps["0"][0] < STEPS
    assert_same(tmp_path, reference)


def test_after_the_loss_of_a_machine_the_others_continue_without_it(tmp_path: Path) -> None:
    """Three launchers on one machine stand for three machines."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2:3", "--nproc-per-node", "1"]
    torchrun += ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{_free_port()}"]
    torchrun += ["--local-addr", "127.0.0.1", "--rdzv-conf", "last_call_timeout=5,is_host={}", "--no-python"]
    training = shlex.join(map(str, command(tmp_path, "--devices", "1")))
    torchrun += ["bash", "-c", f"exec {training} --nodes $((WORLD_SIZE / LOCAL_WORLD_SIZE))"]
    with ExitStack() as stack:
        first, second, third = (
            stack.enter_context(started([part.format(host) for part in torchrun], tmp_path / f"output{number}"))
            for number, host in enumerate(("true", "false", "false"))
        )
        wait_until(lambda: (tmp_path / "step=100.ckpt").exists(), LIMIT, lambda: first.output[-3000:])
        worker = third.descendant(LOCAL_RANK="0")
        os.kill(third.pid, signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
        output = first.finish(LIMIT) + second.finish(LIMIT)
    steps = steps_of(output, "continues")
    assert steps["0"] == steps["1"]
    assert 100 <= steps["0"][0] < STEPS
    assert "was saved by 3 workers and is resumed by 2" in output
    assert f"(process {worker} on {socket.gethostname()}) has ended" in output


def test_spawned_workers_train_as_popen_does(tmp_path: Path, reference: Path) -> None:
    with started(command(tmp_path, "--devices", "2", "--launcher", "spawn"), tmp_path / "output") as training:
        assert_sparse(training.finish(LIMIT))
    assert_same(tmp_path, reference)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
