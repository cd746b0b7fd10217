"""Programs that a test starts: bounded in time, and ended with everything that they have started themselves."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pytest

from lab.bench.links import Namespace

_T = TypeVar("_T")

ROOT = Path(__file__).parents[2]

_MARK = "SAFUSION_E2E"  # in the environment of our processes and of all that descend from them
_LAUNCHERS = ("SLURM_", "SRUN_", "SBATCH_", "MASTER_", "LOCAL_", "GROUP_", "NODE_RANK", "RANK", "WORLD_SIZE", "TORCHEL")


def need(*programs: str, root: bool = True) -> None:
    """Skips the test where these programs, or the rights of root that they need, are missing."""
    if root and os.geteuid() != 0:
        pytest.skip("needs root")
    missing = [name for name in programs if which(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")


def which(program: str) -> str | None:
    """The program's path, also where ``/usr/sbin`` is not on the path."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def environment(**more: str) -> dict[str, str]:
    """This process's environment without what an outer launcher has left there, for a training on one thread."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(_LAUNCHERS)}
    env["PATH"] = f"{Path(sys.executable).parent}:{env.get('PATH', '')}:/usr/sbin:/sbin"
    env["PYTHONPATH"] = f"{ROOT}:{env.get('PYTHONPATH', '')}".rstrip(":")
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return env | own | more


class Program:
    """A started program that writes to a log; ``mark`` recognises it and its descendants."""

    def __init__(self, command: Sequence[str | Path], log: Path, env: Mapping[str, str], mark: str) -> None:
        self.log, self.mark = log, mark
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**env, _MARK: mark},
                cwd=log.parent,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, pattern: str, timeout: float) -> re.Match[str]:
        """Waits until the output holds the pattern; fails if the program ends before, or takes longer."""

        def found() -> re.Match[str] | None:
            ended = self._process.poll() is not None
            match = re.search(pattern, self.output)
            if ended and match is None:
                pytest.fail(f"ended with {self._process.returncode} before {pattern!r}:\n{self.output[-6000:]}")
            return match

        return wait_until(found, timeout, lambda: f"no {pattern!r} in:\n{self.output[-6000:]}")

    def finish(self, timeout: float) -> str:
        """Waits for the end; fails unless it is a success in time. Returns the output."""
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"did not end within {timeout} s:\n{self.output[-6000:]}")
        if code != 0:
            pytest.fail(f"ended with {code}:\n{self.output[-6000:]}")
        return self.output

    def descendant(self, **variables: str) -> int:
        """The one process that descends from it and has these variables in its environment."""
        (pid,) = find(**{_MARK: self.mark}, **variables)
        return pid

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
        kill(**{_MARK: self.mark})
        self._process.wait(5)


@contextmanager
def started(command: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None) -> Iterator[Program]:
    """Starts a program in its log's folder, and ends it with all its descendants."""
    program = Program(command, log, environment() if env is None else env, uuid.uuid4().hex)
    try:
        yield program
    finally:
        program.end()


def wait_until(condition: Callable[[], _T | None], timeout: float, explain: Callable[[], str]) -> _T:
    """Asks until the answer is true, and returns it; fails with the explanation when time is over."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"nothing within {timeout} s: {explain()}")
        time.sleep(0.1)
    return value


def find(**variables: str) -> list[int]:
    wanted = {f"{key}={value}".encode() for key, value in variables.items()}
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                    found.append(int(entry.name))
    return found


def kill(**variables: str) -> None:
    """Ends the processes that have these variables in their environment, which must be ours alone."""
    for pid in find(**variables):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def on_two_machines(machines: Sequence[Namespace], folder: Path, timeout: float, *command: str | Path) -> str:
    """Runs a Python script, or module, under torchrun on both machines; what the first has printed."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--master-addr", machines[0].address, "--master-port", "29500", "--node-rank"]
    env = environment(GLOO_SOCKET_IFNAME="eth0", NUMEXPR_MAX_THREADS="1")
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(started([*enter, *torchrun, str(rank), *command], folder / f"output{rank}", env))
            for rank, enter in enumerate(("ip", "netns", "exec", machine.name) for machine in machines)
        )
        output = first.finish(timeout)
        second.finish(20)
    return output
