"""Workers, or machines, that are lost under torchrun, which starts the others anew; beside stock DDP."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from lab.attack.restarted import MOMENTS, work
from lab.attack.trial import Verdict
from lab.attack.workers import Job

_LAUNCHERS = ("SLURM_", "SRUN_", "MASTER_", "LOCAL_", "GROUP_", "NODE_RANK", "RANK", "WORLD_SIZE", "TORCH")
_STEPS, SAVES_EVERY = 45, 10
_LIMIT_S, _GONE_S = 90.0, 5.0


@dataclass(frozen=True)
class Launch:
    """How torchrun starts a job.

    Args:
        rendezvous: ``"static"`` or ``"c10d"``.
        machines: Launchers, on this one.
        workers: Of each.
        least: Launchers that are enough.
    """

    rendezvous: str
    machines: int = 1
    workers: int = 2
    least: int | None = None

    def options(self, machine: int, port: int) -> list[str]:
        """Of torchrun on a machine."""
        nodes = str(self.machines) if self.least is None else f"{self.least}:{self.machines}"
        made = ["--nnodes", nodes, "--nproc-per-node", str(self.workers), "--max-restarts", "3"]
        made += ["--rdzv-backend", self.rendezvous]
        if self.rendezvous == "static":
            return [*made, "--node-rank", str(machine), "--master-addr", "127.0.0.1", "--master-port", str(port)]
        options = f"last_call_timeout=5,is_host={str(machine == 0).lower()}"
        return [*made, "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1", "--rdzv-conf", options]


_LAUNCHES = {
    "static": Launch("static"),
    "c10d": Launch("c10d"),
    "static, two machines": Launch("static", 2, 1),
    "c10d, two machines": Launch("c10d", 2, 1),
    "c10d, a machine fewer": Launch("c10d", 3, 1, least=2),
}


@dataclass(frozen=True)
class Ended:
    """How a job has ended.

    Args:
        problem: Why it was no success; None: it was.
        output: Of all its processes.
    """

    problem: str | None
    output: str

    @property
    def digests(self) -> set[str]:
        """Of the weights that its workers ended with."""
        return set(re.findall(r"ends with (\w+)", self.output))

    @property
    def repeated(self) -> int:
        """Steps that were made before and after the loss."""
        (died,) = re.findall(r"dies at step (\d+)", self.output)
        return int(died) - self._continued

    @property
    def _continued(self) -> int:
        return max((int(step) for step in re.findall(r"continues at step (\d+)", self.output)), default=0)


class Restart:
    """A worker is killed; torchrun starts all anew, and the job ends as if nothing had happened.

    Args:
        name: Of the attack.
        what: For the table.
        launches: Names of what is drawn from, in turn.
    """

    def __init__(self, name: str, what: str, launches: Sequence[str]) -> None:
        self.name, self.what, self._launches = name, what, launches

    def draw(self, choice: random.Random, number: int) -> dict[str, Any]:
        """How it is launched, whom it hits, when."""
        launch = self._launches[number % len(self._launches)]
        size = _LAUNCHES[launch]
        return {
            "launch": launch,
            "collective": choice.choice(("allgather", "sharded")),
            "machine": size.machines - 1 if size.least else choice.randrange(size.machines),
            "local_rank": choice.randrange(size.workers),
            "step": choice.randint(1, 4 * SAVES_EVERY - 1),
            "moment": choice.choice(MOMENTS),
        }

    def run(self, drawn: dict[str, Any], folder: Path, patience: float) -> Verdict:
        """Attacks the job of this package, and the same one with stock DDP."""
        launch = _LAUNCHES[drawn["launch"]]
        dies = {name: drawn[name] for name in ("local_rank", "step", "moment")} | {"machine": launch.least is not None}
        collective = ("--collective", drawn["collective"])
        ours, stock = (
            run(launch, collective, stock, folder / name, {drawn["machine"]: dies})
            for name, stock in (("ours", False), ("stock", True))
        )
        same = None if launch.least else uninterrupted(*collective)
        return judged(ours, stock, same)


RESTARTS = (
    Restart("restart", "kill -9 of one of two workers under torchrun, which starts both anew", tuple(_LAUNCHES)[:4]),
    Restart("fewer", "kill -9 of one of three torchruns with its worker; two go on", tuple(_LAUNCHES)[4:]),
)


def judged(ours: Ended, stock: Ended, same: set[str] | None) -> Verdict:
    """Whether a job has gone on after a loss, whenever stock DDP does.

    Args:
        ours: With this package.
        stock: With Lightning's DDPStrategy.
        same: Digest of an uninterrupted run; None: of another number of workers, whose replicas are equal.
    """
    if any("dies at" not in ended.output for ended in (ours, stock)):
        return Verdict(False, "the attack never came")
    theirs = "stock DDP does" if stock.problem is None else f"stock DDP does not: {stock.problem}"
    if ours.problem is not None:
        return Verdict(stock.problem is not None, f"does not go on: {ours.problem}; {theirs}")
    if len(ours.digests) != 1:
        return Verdict(False, "replicas differ")
    if same is not None and ours.digests != same:
        return Verdict(False, "parameters differ from those of an uninterrupted run")
    if not 0 <= ours.repeated <= SAVES_EVERY:
        return Verdict(False, f"not from the newest checkpoint: {ours.repeated} steps are repeated")
    how = "goes on" if same is None else "ends with the same bits"
    return Verdict(True, f"{how}; {theirs}", repeated=ours.repeated)


def run(
    launch: Launch, options: Sequence[str], stock: bool, folder: Path, dies: Mapping[int, Mapping[str, Any]]
) -> Ended:
    """Runs a job to its end, and leaves nothing of it.

    Args:
        launch: How.
        options: Of the example.
        stock: With Lightning's DDPStrategy.
        folder: For its files.
        dies: Who dies, by machine.
    """
    checkpoints = folder / "checkpoints"
    job = ["--accelerator", "cpu", "--deterministic", "--folder", str(checkpoints), *options]
    job += ["--steps", str(_STEPS), "--save-every", str(SAVES_EVERY)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])

    def launches(machine: int, told: dict[str, Any]) -> None:
        for name in [name for name in os.environ if name.startswith(_LAUNCHERS)]:
            del os.environ[name]
        os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
        if stock:  # or it does not come back from c10d either (pytorch#135712)
            os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        config, _, _ = config_from_args(parse_args([*launch.options(machine, port), "train.py"]))
        config.start_method = "fork"  # imports take ten times as long as the job
        elastic_launch(config, work)(job, stock, dies.get(machine, {}))

    ends = Job(launches, launch.machines, folder).run(_LIMIT_S)
    lost = list(dies) if launch.least else []
    problems = [f"not over after {_LIMIT_S:g} s" for end in ends if end.code is None]
    problems += ["torchrun gives up" for end in ends if end.code and end.rank not in lost]
    if (left := _left(checkpoints)) and not problems:
        problems = [f"{len(left)} processes are left"]
    for process in left:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    output = "".join((folder / f"log{end.rank}.txt").read_text(errors="replace") for end in ends)
    return Ended(problems[0] if problems else None, output)


@lru_cache
def uninterrupted(*options: str) -> set[str]:
    """Digests of a run of two workers that nobody attacks."""
    with TemporaryDirectory() as folder:
        ended = run(_LAUNCHES["c10d"], options, False, Path(folder), {})
    if ended.problem is not None or len(ended.digests) != 1:
        raise RuntimeError(f"a job that nobody attacked: {ended.problem}: {ended.output[-2000:]}")
    return ended.digests


def _left(folder: Path) -> list[int]:
    """Workers of a job that have not ended, after some seconds."""
    started = [int(path.stem) for path in folder.glob("*.process")]
    until = time.monotonic() + _GONE_S
    while left := [process for process in started if _runs(process)]:
        if time.monotonic() > until:
            break
        time.sleep(0.1)
    return left


def _runs(process: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
