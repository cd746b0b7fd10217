"""One run: all systems train on the same machines, in turns of a few steps.

Every worker of every system is a process that runs Lightning's trainer from the beginning of the run to its end, so
that systems keep what they have measured of their costs between their turns.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch.utils.data import DataLoader
from typing_extensions import override

from lab.bench.links import sent_bytes
from lab.bench.recorders import EngineRecord, EngineRecorder, FloorRecord, FloorRecorder
from lab.bench.workload import Classifier, Paced, Workload
from lab.processes import ask, collect
from lightning_safusion.notation import read
from lightning_safusion.profiling.trace import Trace
from lightning_safusion.strategy import SAFusionStrategy
from lightning_safusion.systems import resolve_system
from lightning_safusion.tools.bench.results import Turned
from lightning_safusion.tools.bench.rows import FLOOR, REFERENCE_STRATEGIES, parse_row
from lightning_safusion.tools.team import Place, Team, make_trainer, started

#: Rows of every run: the floor, and what a user has without this package.
REFERENCES = (FLOOR, "ddp")
# The teams that record what costs are fitted to, beside the systems: the job without any exchange, and the engine of a
# sparse system with buffers that all ranks cut alike, with selection before fusion and after it.
_RECORDED: Mapping[str, tuple[str, Callable[[Connection, int], Callback]]] = MappingProxyType(
    {
        "floor-record": (FLOOR, lambda pipe, _: FloorRecorder(pipe)),
        "ahead-record": ("saf-inter", EngineRecorder),
        "behind-record": ("behind", EngineRecorder),
    }
)
# Systems without an engine have nothing to learn; PowerSGD begins after ten dense steps.
_FIXED_WARMUP = 12


@dataclass(frozen=True)
class Task:
    """What the workers train, the same for all systems.

    Args:
        model: Kind of network, see :class:`Classifier`.
        size: Its size.
        batch_size: Samples of one worker.
        density: Of sparse systems whose row has none of its own.
        trace: Workers sleep through it in place of training a network.
        seed: Of weights and batches.
        optimizer: Of a network, see :class:`Classifier`.
    """

    model: str = "conv"
    size: str = "base"
    batch_size: int = 16
    density: float = 0.01
    trace: Trace | None = None
    seed: int = 0
    optimizer: str = "sgd"

    def module(self, system: str = "ddp") -> Workload:
        """The module that every worker trains for a row."""
        torch.manual_seed(self.seed)
        if self.trace is not None:
            return Paced(self.trace)
        return Classifier(self.model, self.size, self.batch_size, self.optimizer)

    def strategy(self, system: str) -> DDPStrategy:
        """The strategy of a row.

        Raises:
            ValueError: If there is no such row.
        """
        if system in REFERENCE_STRATEGIES:
            return REFERENCE_STRATEGIES[system](process_group_backend="gloo")
        strategy = parse_row(system).strategy(self.density)
        strategy.settings.density.opens = False  # steps are timed as they will last
        return strategy


@dataclass(frozen=True)
class Rhythm:
    """How systems take turns.

    Args:
        rounds: Turns of each system; each round begins with another one.
        block: Steps of a turn; the first one does not count.
        warmup: Steps of each system before the first round, in which buffer sizes settle.

    Raises:
        ValueError: If there is no round, or no step that counts.
    """

    rounds: int = 6
    block: int = 6
    warmup: int = 30

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.block < 2 or self.warmup < 1:
            raise ValueError(
                "a benchmark needs 1 round, blocks of 2 steps and 1 step of warm-up or more, got "
                f"rounds={self.rounds}, block={self.block}, warmup={self.warmup}"
            )

    def warmup_of(self, system: str) -> int:
        """Steps before the first round."""
        if system in _RECORDED:
            return 2 * self.block
        fixed = system in REFERENCE_STRATEGIES or resolve_system(read(system)[0]).ddp_hook is not None
        return min(self.warmup, _FIXED_WARMUP) if fixed else self.warmup

    def steps_of(self, system: str) -> int:
        """All steps of a run."""
        return self.warmup_of(system) + self.rounds * self.block


@dataclass(frozen=True)
class Run:
    """What was measured.

    Args:
        blocks: Of each system the blocks of each round, by rank.
        floor: By rank, recorded steps without any exchange; empty if nothing was recorded.
        ahead: By rank, recorded steps with selection before fusion, and the collectives of the group.
        behind: By rank, recorded steps with selection after fusion.
    """

    blocks: dict[str, list[list[Turned]]]
    floor: list[FloorRecord]
    ahead: list[EngineRecord]
    behind: list[EngineRecord]


def measure(
    task: Task,
    systems: Sequence[str],
    place: Place,
    rhythm: Rhythm,
    logs: Path,
    console: Console,
    record: bool = False,
) -> Run:
    """Trains all systems in turns.

    Args:
        task: What they train.
        systems: Rows, see :mod:`~lightning_safusion.tools.bench.rows`.
        place: Where.
        rhythm: In which turns.
        logs: Folder for what the workers print.
        console: Shows the progress.
        record: Also record what costs are fitted to, by teams of their own that take turns with the others.

    Raises:
        ValueError: If there is no such system.
        RuntimeError: If a worker fails; names the log.
    """
    logs.mkdir(parents=True, exist_ok=True)
    for system in systems:
        task.strategy(system)  # raises here, if there is no such system
    names = [*systems, *(_RECORDED if record else ())]
    blocks: dict[str, list[list[Turned]]] = {name: [] for name in names}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    # refreshed by hand: a thread of its own would be forked with the workers
    progress = Progress(*columns, console=console, auto_refresh=False, transient=True)
    bars = {name: progress.add_task(escape(name), total=rhythm.steps_of(name)) for name in names}

    def train(team: Team, steps: int) -> list[Turned]:
        done: list[Turned] = ask(team, steps)
        progress.update(bars[team.name], advance=steps, refresh=True)
        return done

    with ExitStack() as stack:
        stack.enter_context(progress)
        teams: list[Team] = []
        for name in names:
            work = partial(_work, task, name, place.workers, rhythm)
            team = stack.enter_context(started(name, place, logs / f"{name}.log", work))
            collect(team)  # ready: the next one is set up when this one is, for it times its collectives then
            train(team, rhythm.warmup_of(name))
            teams.append(team)
        for turn in range(rhythm.rounds):
            first = turn % len(teams)
            for team in teams[first:] + teams[:first]:
                blocks[team.name].append(train(team, rhythm.block))
        trained = {system: blocks[system] for system in systems}
        if not record:
            return Run(trained, [], [], [])
        floor, ahead, behind = teams[-len(_RECORDED) :]
        # the collectives are timed when no team trains
        return Run(trained, collect(floor), ask(ahead, True), ask(behind, False))


def _work(task: Task, system: str, workers: int, rhythm: Rhythm, rank: int, pipe: Connection) -> None:
    """Trains one row in turns, as one of the workers."""
    row, recorder = _RECORDED.get(system, (system, None))
    steps = rhythm.steps_of(system)
    module = task.module(row)
    torch.manual_seed(task.seed + 1 + rank)
    callbacks = [Turns(pipe), *([recorder(pipe, rhythm.block)] if recorder else [])]
    trainer = make_trainer(workers, task.strategy(row), callbacks, max_steps=steps, max_epochs=1)
    batches: Any = [module.batch()] * steps
    trainer.fit(module, DataLoader(batches, batch_size=None))


class Turns(Callback):
    """Trains as many steps as a message says, then waits for the next one.

    Args:
        pipe: Takes None when the worker is ready, and a :class:`Turned` for each number of steps that it brings.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._left = 0
        self._steps: list[float] = []
        self._sent: int | None = None
        self._begin = 0.0

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pipe.send(None)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._left == 0:
            self._left, self._steps = int(self._pipe.recv()), []
            trainer.strategy.barrier()
            self._sent = sent_bytes()
        self._begin = perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._steps.append(perf_counter() - self._begin)
        self._left -= 1
        if self._left > 0:
            return
        sent = sent_bytes()
        per_step = (sent - self._sent) / len(self._steps) if sent is not None and self._sent is not None else None
        figures, plan = {}, None
        if isinstance(trainer.strategy, SAFusionStrategy):
            figures, plan = trainer.strategy.figures(), trainer.strategy.plan
        groups = plan.to_list() if plan is not None else None
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux
        self._pipe.send(Turned(self._steps, peak_bytes=peak, figures=figures, plan=groups, wire_bytes=per_step))
