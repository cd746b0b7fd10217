"""A real Slurm cluster of two machines, for the length of a test: munged, slurmctld and two slurmd of our own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.e2e.processes import environment, kill, started, wait_until

_CONFIGURATION = """\
ClusterName=safusion
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# cred_expire: a requeued job waits until the credentials of its earlier run are no longer valid, two minutes by default
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
KillWait=10
GresTypes=gpu
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=8 RealMemory=1000 Gres=gpu:2
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=60 OverSubscribe=NO
"""


class SlurmCluster:
    """A running cluster, made by :func:`slurm_cluster`; a folder has its configuration, sockets and logs."""

    def __init__(self, folder: Path, host: str) -> None:
        self.folder = folder
        # n1 and n2 are names of this machine that only Slurm knows: Lightning would look the first one up
        self.env = environment(SLURM_CONF=str(folder / "slurm.conf"), MASTER_ADDR="127.0.0.1")
        (folder / "slurm.conf").write_text(_CONFIGURATION.format(host=host, folder=folder, ports=_free_ports()))
        # two files that are on every machine stand for the GPUs: Slurm counts them and opens none
        (folder / "gres.conf").write_text("AutoDetect=off\nName=gpu File=/dev/null\nName=gpu File=/dev/zero\n")

    def run(self, program: str, *arguments: str, timeout: float = 20.0, cwd: Path | None = None) -> str:
        done = subprocess.run(
            [program, *arguments],
            env=self.env,
            cwd=cwd or self.folder,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if done.returncode != 0:
            pytest.fail(f"{program} {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job, for example ``JobState`` and ``Restarts``."""
        text = self.run("scontrol", "show", "job", number, "--oneliner")
        return dict(pair.split("=", 1) for pair in text.split() if "=" in pair)

    def finish(self, number: str, log: Path, timeout: float) -> str:
        """Waits for a batch job to complete; fails if it ends in another way. Returns its output."""

        def over() -> str | None:
            state = self.job(number)["JobState"]
            return state if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED") else None

        def output() -> str:
            return log.read_text(errors="replace") if log.exists() else ""

        state = wait_until(over, timeout, lambda: f"{self.job(number)}\n{output()[-6000:]}")
        if state != "COMPLETED":
            pytest.fail(f"job {number} ended as {state}:\n{output()[-6000:]}")
        return output()

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def start(self, stack: ExitStack) -> None:
        """Starts the daemons in the foreground, as children of this process."""
        folder = self.folder

        def daemon(*command: str) -> None:
            stack.enter_context(started(command, folder / f"{command[0]}-{Path(command[-1]).name}.log", self.env))

        for name in ("state", "spool-n1", "spool-n2"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = [f"--{name}-file={folder / name}" for name in ("pid", "seed", "log")]
        munged = ["munged", "--foreground", f"--key-file={key}", f"--socket={folder / 'munge.socket'}", *files]
        daemon(*munged)
        wait_until((folder / "munge.socket").exists, 20, self.logs)
        daemon("slurmctld", "-D")
        for name in ("n1", "n2"):
            daemon("slurmd", "-D", "-N", name)
        stack.callback(self._cancel_all)
        wait_until(self._ready, 30, self.logs)

    def _ready(self) -> bool:
        with suppress(pytest.fail.Exception):
            return self.run("sinfo", "--noheader", "--Node", "--format=%T").split() == ["idle", "idle"]
        return False

    def _cancel_all(self) -> None:
        """Ends all jobs while there are still daemons that can do it."""
        with suppress(pytest.fail.Exception, subprocess.TimeoutExpired):
            self.run("scancel", "--signal=KILL", "--full", "--user=root")
            self.run("scancel", "--user=root")
            wait_until(lambda: not self.run("squeue", "--noheader").strip(), 15, self.logs)


@contextmanager
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Starts a cluster and stops it; its jobs, daemons and files are gone afterwards."""
    # munged wants everybody to be able to reach its socket, and sockets have short names: not a folder of pytest's
    folder = Path(tempfile.mkdtemp(prefix="safusion-slurm-"))
    folder.chmod(0o755)
    try:
        with ExitStack() as stack:
            cluster = SlurmCluster(folder, socket.gethostname().split(".")[0])
            cluster.start(stack)
            yield cluster
    finally:
        kill(SLURM_CONF=str(folder / "slurm.conf"))  # steps outlive the daemon that has started them
        shutil.rmtree(folder, ignore_errors=True)


def _free_ports() -> list[int]:
    """Three ports in a row that nobody listens on."""
    for first in range(17000, 30000, 3):
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + 3):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return list(range(first, first + 3))
    raise RuntimeError("no three free ports in a row between 17000 and 30000")
