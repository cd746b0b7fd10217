"""``safusion bench``: the processes of a launch train all rows of a user's job in turns, and say which to take."""

from __future__ import annotations

import copy
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median_high
from types import FrameType
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console

from lightning_safusion.comm.transport.torch_backend import end_groups_at_exit
from lightning_safusion.integration.model_parallel import SAFusionModelParallelStrategy
from lightning_safusion.integration.parameters import trainable
from lightning_safusion.literal import literal
from lightning_safusion.strategy import SAFusionStrategy
from lightning_safusion.systems import DEFAULT, sharded_names
from lightning_safusion.tools.bench.forecast import Recorded, record
from lightning_safusion.tools.bench.job import Job, JobOptions, parse_job
from lightning_safusion.tools.bench.launch import counted, interrupts, processes, quiet
from lightning_safusion.tools.bench.meeting import Meeting
from lightning_safusion.tools.bench.outcome import JobConditions, write
from lightning_safusion.tools.bench.results import Turned
from lightning_safusion.tools.bench.rows import (
    FLOOR,
    IN_STEP,
    REFERENCE_STRATEGIES,
    SHARDED_REFERENCES,
    YOURS,
    parse_row,
    row_of,
)
from lightning_safusion.tools.bench.turns import Bench, TurnProgress
from lightning_safusion.tools.team import die_with_parent

#: Rows of every run: what a step takes without any exchange, with waiting only, and what a user has.
ALWAYS = (FLOOR, IN_STEP, "ddp")
#: Rows that are compared where none are named.
ROWS = ("ddp-bf16", "powersgd", DEFAULT, f"{DEFAULT}[density=0.02]", f"{DEFAULT}[density=0.1]")
# Steps before those that count, in every turn: DDP makes its buckets anew after the first, sparse systems predict their
# thresholds after some, PowerSGD sends ten dense; in the first turn of a row memory, caches and loaders settle as well.
_SETTLING, _POWERSGD, _FIRST = 4, 12, 12
_ONCE = 2.0  # seconds: torchrun passes on what the terminal has sent to this process as well
_TIMEOUT = timedelta(minutes=30)  # Lightning's own


def run_bench(
    systems: Sequence[str] = (),
    config: Sequence[str] = (),
    model: str | None = None,
    data: str | None = None,
    cli: str | None = None,
    density: Sequence[float] = (),
    workers: int | None = None,
    rounds: int = JobOptions.rounds,
    block: int = JobOptions.block,
    warmup: int = JobOptions.warmup,
    minutes: float = JobOptions.minutes,
    keep_callbacks: Sequence[str] = (),
    seed: int = JobOptions.seed,
    calibrate: bool = JobOptions.calibrate,
    output: Path = Path(JobOptions.output),
) -> None:
    """Measures systems side by side in a job of yours, and says which to take.

    "safusion bench --config config.yaml" (a file of LightningCLI) or "safusion bench --model package.module:Class
    --data package.module:Class", plain, under torchrun or under srun, on GPUs or CPUs. All rows train a few steps in
    turn on the same processes, from the same weights. It ends with a verdict, and with settings in best.yaml. Nothing
    is written to your loggers and checkpoints.

    The floor (no exchange at all), the floor with workers that wait for each other in every step, and DDP are always
    among the rows.

    Args:
        systems: Names, separated by commas; "safusion systems" lists them. With options: "saf-pooled[wire=bf16]". Where
            SAFusionModelParallelStrategy shards the model inside of replicas "hsdp" and "hsdp-bf16" are all-reduces
            between these, and "saf-hsdp" is the default system.
        config: File of LightningCLI: the job to measure. Several are separated by commas; later ones win.
        model: A LightningModule, package.module:Class.
        data: A LightningDataModule, package.module:Class.
        cli: A LightningCLI of yours that links or adds arguments, package.module:Class.
        density: Densities of the default system that are compared, separated by commas; 0.02 and 0.1 by default.
        workers: Processes that train together on this machine; by default as the trainer or the launcher says.
        rounds: Turns of each system.
        block: Steps of a turn; the first does not count.
        warmup: Steps before the first turn of a system that learns.
        minutes: No round begins after so many minutes, but for the first.
        keep_callbacks: Classes of the job's callbacks that train with it. All others are left out, but for those of
            Lightning that change a training step and write nothing.
        seed: Of weights and batches, where the file has none.
        calibrate: Also record the trace of the job and the costs of its collectives, selection and decoding: files for
            "safusion plan --calibration FILE --trace FILE".
        output: Folder for the results: table, picture, settings, logs.

    Raises:
        ValueError: If a name or number makes no sense.
        RuntimeError: If DDP itself cannot train the job, or a process fails; names its log.
    """
    run_own(JobOptions(**locals()))


def run_own(options: JobOptions) -> None:
    """The same, by its options."""
    rows = checked_rows(options)
    logs = Path(options.output, "logs")
    logs.mkdir(parents=True, exist_ok=True)
    local = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
    with quiet(logs / f"lightning-{socket.gethostname()}-{local}.log"):
        job = parse_job(options)
        with processes(counted(job.trainer, options.workers), options):
            _Run(options, job, rows).run()


def checked_rows(options: JobOptions) -> list[str]:
    """All rows, those that are always compared first.

    Raises:
        ValueError: If there is no such row, or a number makes no sense.
    """
    if options.rounds < 1 or options.block < 2 or options.warmup < 1 or options.minutes <= 0:
        raise ValueError(
            "a benchmark needs 1 round, blocks of 2 steps, 1 step of warm-up and some minutes, got rounds="
            f"{options.rounds}, block={options.block}, warmup={options.warmup}, minutes={options.minutes:g}"
        )
    for share in options.density:
        if not 0 < share <= 1:
            raise ValueError(f"density is a share in (0, 1], got {share:g}")
    named = [row_of(row) for row in options.systems]
    systems = named or [row for row in ROWS if not options.density or "[density" not in row]
    of_density = [f"{DEFAULT}[density={share:g}]" for share in options.density]
    rows = list(dict.fromkeys([*ALWAYS, *systems, *of_density]))
    for row in rows:
        if row not in ALWAYS:
            parse_row(row)
    return rows


class _Run:
    """A benchmark, on all processes alike."""

    def __init__(self, options: JobOptions, job: Job, rows: list[str]) -> None:
        self.options, self.job, self.rows = options, job, rows
        self.interrupted, self.heard = False, 0.0
        self.trained: set[str] = set()  # rows that have had a turn
        self.turns: dict[str, list[list[Turned]]] = {row: [] for row in rows}  # on the first process
        self.failures: dict[str, str] = {}  # why rows are left out
        self.began = time.monotonic()

    def run(self) -> None:
        options = self.options
        arguments = counted(self.job.trainer, options.workers)
        # a row that fails on one process is left out on all: NCCL's watchdog would end theirs
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        strategy = DDPStrategy(**self.job.group)
        trainer = Trainer(**arguments, strategy=strategy, logger=False, enable_checkpointing=False)
        strategy.setup_environment()  # the process group, which stays
        end_groups_at_exit()
        self.meeting = Meeting(strategy.root_device, strategy._timeout or _TIMEOUT)
        self.place = trainer.num_nodes, strategy.num_processes
        self.console = Console(width=None if sys.stdout.isatty() else 120, quiet=self.meeting.rank > 0)
        with interrupts(self._interrupt):
            self.bench = Bench(self.job, self.meeting, options, lambda: self.interrupted)
            self.job.trainer |= {name: arguments[name] for name in ("devices", "num_nodes") if name in arguments}
            user = self.job.strategy
            if type(user) is not DDPStrategy or user._ddp_comm_hook is not None:
                self.rows.insert(len(ALWAYS), YOURS)
                self.turns[YOURS] = []
            if self.job.sharded:
                self._leave_out_hooks()
            if self.job.left_out:
                self.console.print(literal(f"Left out of the benchmark: {', '.join(self.job.left_out)}."))
            try:
                recorded = self._measure()
            finally:
                self.bench.close()
        if self.meeting.rank == 0:
            self._write(recorded)
        self.meeting.close()

    def _write(self, recorded: Recorded | str) -> None:
        # what has failed after some rounds is not to be recommended
        turns = {row: each for row, each in self.turns.items() if each and (row not in self.failures or row == "ddp")}
        failures = {row: self.failures[row] for row in self.turns if row in self.failures}
        module, meeting = self.bench.module, self.meeting
        count = sum(param.numel() for _, param in trainable(module))
        sizes = self.job.ddp_options.get("replicate_size") if self.job.sharded else None
        nodes, _ = self.place
        replicas = nodes if sizes == "auto" else sizes
        conditions = JobConditions(type(module).__name__, meeting.workers, nodes, meeting.device.type, count, replicas)
        write(conditions, turns, failures, recorded, self.job, Path(self.options.output), self.console)

    def _leave_out_hooks(self) -> None:
        """Sharded models have no such rows; nothing else may fail where groups are made once."""
        for row in list(self.rows):
            try:
                if row not in (*REFERENCE_STRATEGIES, YOURS):
                    self._strategy(row)
            except MisconfigurationException as error:
                if self.options.systems:
                    self.failures[row] = str(error)
                else:  # nobody has asked for it
                    self.rows.remove(row)
                    del self.turns[row]

    def _name(self, row: str) -> str:
        return sharded_names(row) if self.job.sharded else row

    def _measure(self) -> Recorded | str:
        """What was recorded after the first round, on the first process, or why nothing was."""
        rounds = self.options.rounds
        recorded: Recorded | str = "stopped"
        with TurnProgress(self.console, len(self.rows) * rounds + 1) as progress:
            for number in range(rounds):
                first = number % len(self.rows)
                for row in self.rows[first:] + self.rows[:first]:
                    progress.begin(f"round {number + 1} of {rounds}: {self._name(row)}")
                    if not self._take_turn(row, progress):
                        return recorded
                if number == 0:
                    self._leave_out_equals()
                    recorded, stopped = self._record(progress)
                    if stopped:
                        break
                if not self._goes_on():
                    break
        return recorded

    def _take_turn(self, row: str, progress: TurnProgress) -> bool:
        """Whether to go on."""
        if row in self.failures:
            return True
        warmup = self._warmup(row)
        timed, reason = self.meeting.attempt(
            lambda: self.bench.turn(row, self._strategy(row), warmup, self.options.block, progress.step)
        )
        mine: dict[str, Any] = {"reason": reason}
        if timed is not None:
            mine |= {"turned": asdict(timed.turned), "stopped": timed.stopped}
        told = self.meeting.hold(mine, partial(self._keep, row))
        self.trained.add(row)
        if told["reason"] is not None:
            self.failures[row] = told["reason"]
            if told["hopeless"]:
                raise RuntimeError(f"{self._name('DDP')} itself cannot train this job: {told['reason']}")
            if self.job.sharded:
                return False  # the groups of its mesh would end with the default one
            self.meeting.regroup()
        progress.end(told["seconds"])
        return not told["stopped"]

    def _keep(self, row: str, everyone: list[dict[str, Any]]) -> dict[str, Any]:
        told: dict[str, Any] = {"reason": _cause(everyone), "seconds": None, "stopped": False, "hopeless": False}
        if told["reason"] is None:
            turned = [Turned(**each["turned"]) for each in everyone]
            told["stopped"] = everyone[0]["stopped"]
            if min(len(each.steps) for each in turned) >= 2:
                self.turns[row].append(turned)
                return told | {"seconds": median_high(turned[0].steps[1:])}
            if not told["stopped"]:
                told["reason"] = "its data ended before the turn did"
        if told["reason"] is not None and row == "ddp":  # nothing can be compared with it any more
            told |= {"stopped": True, "hopeless": not self.turns[row]}
        return told

    def _warmup(self, row: str) -> int:
        if row.startswith("powersgd"):
            return _POWERSGD
        if row in self.trained:
            return _SETTLING
        return _FIRST if row in REFERENCE_STRATEGIES or row.startswith("ddp") else self.options.warmup

    def _strategy(self, row: str) -> Any:
        options, sharded = self.job.ddp_options, self.job.sharded
        if row == YOURS:
            return copy.deepcopy(self.job.strategy)
        if row == "ddp" and not sharded:
            return DDPStrategy(**options)
        if row in REFERENCE_STRATEGIES:
            return (SHARDED_REFERENCES if sharded else REFERENCE_STRATEGIES)[row](**options)
        kind = SAFusionModelParallelStrategy if sharded else SAFusionStrategy
        try:
            return parse_row(row).made(kind, None, **{"process_group_backend": None} | options)
        except ValueError as error:
            raise MisconfigurationException(str(error)) from error

    def _leave_out_equals(self) -> None:
        """Those of the default whose density is the one that it takes by itself. Collective."""

        def equal(_: list[Any]) -> list[str]:
            own = self.turns.get(DEFAULT)
            density = own[0][0].density if own else None
            return [row for row in self.rows if density is not None and row == f"{DEFAULT}[density={density:g}]"]

        for row in self.meeting.hold({}, equal):
            if row not in self.failures:
                self.failures[row] = f"the same as {DEFAULT}, whose density it is"
                self.turns[row].clear()

    def _goes_on(self) -> bool:
        """Collective."""
        spent = time.monotonic() - self.began
        return bool(self.meeting.hold({}, lambda _: spent < 60 * self.options.minutes))

    def _record(self, progress: TurnProgress) -> tuple[Recorded | str, bool]:
        """What was recorded, on the first process, or why nothing was; and whether to stop. Collective."""
        if not self.options.calibrate:
            return "calibrate is false", False
        if self.job.sharded:
            return "traces are of models that are not sharded; see safusion plan --sharded", False
        progress.begin("trace and costs of the job")
        accumulated = self.job.trainer.get("accumulate_grad_batches") or 1
        recorded, reason = self.meeting.attempt(
            lambda: record(self.bench, self._strategy, self.place, accumulated, progress.step)
        )
        failed, stopped = self.meeting.hold(
            {"reason": reason, "stopped": self.interrupted},
            lambda everyone: [_cause(everyone), any(each["stopped"] for each in everyone)],
        )
        progress.end(None)
        if failed is not None:
            self.meeting.regroup()
        if stopped:
            return "stopped", True
        if failed is not None:
            return f"the job could not be recorded: {failed}", False
        return recorded or "the trace has no steps", False

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self.interrupted:
            self.interrupted, self.heard = True, time.monotonic()
            self.console.print("Stopping after this step; what there is follows. Ctrl-C again ends it at once.")
        elif time.monotonic() - self.heard > _ONCE:
            raise KeyboardInterrupt


def _cause(everyone: Sequence[dict[str, Any]]) -> str | None:
    return next((each["reason"] for each in everyone if each["reason"] is not None), None)


if __name__ == "__main__":  # started by another process, which hears Ctrl-C
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run_own(JobOptions(**json.load(sys.stdin)))
