"""One run: all systems on the same machines, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from lightning_safusion.bench.calibrate import CALIBRATED, LocalCosts
from lightning_safusion.bench.links import linked_namespaces, why_no_links
from lightning_safusion.bench.rows import parse_row
from lightning_safusion.bench.team import Place, Team, started
from lightning_safusion.bench.workers import FLOOR, Block, Task, train
from lightning_safusion.callbacks.trace_recorder import TraceRecorder
from lightning_safusion.simulate.calibration import Calibration

#: Rows of every table: the floor, and what a user has without this package.
REFERENCES = (FLOOR, "ddp")
#: The team that fits costs, beside the systems.
CALIBRATION = "calibration"
# Systems without an engine have nothing to learn; PowerSGD begins after ten dense steps.
_FIXED_WARMUP = 12


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
        fixed = system == FLOOR or (system != CALIBRATION and parse_row(system).published.ddp_hook is not None)
        return min(self.warmup, _FIXED_WARMUP) if fixed else self.warmup


@contextmanager
def machines(workers: int, rate: str | None) -> Iterator[Place]:
    """Workers with a link of their own each, or on the loopback.

    Args:
        workers: How many.
        rate: Of each link; None for the loopback.

    Raises:
        RuntimeError: If links cannot be made here; says why.
    """
    if rate is None:
        yield Place(workers)
        return
    reason = why_no_links()
    if reason is not None:
        raise RuntimeError(f"links of {rate} cannot be made: {reason}. Leave out --bandwidth to measure the loopback.")
    with linked_namespaces(workers, rate) as made:
        yield Place(workers, tuple(made))


@dataclass(frozen=True)
class Run:
    """What came of a run.

    Args:
        blocks: Of each system, the blocks of each round, by rank.
        costs: What was fitted in it, if that was asked for.
    """

    blocks: dict[str, list[list[Block]]]
    costs: Calibration | None


def measure(
    task: Task,
    systems: Sequence[str],
    place: Place,
    rhythm: Rhythm,
    logs: Path,
    tell: Callable[[str, int], None] = lambda system, steps: None,
    trace: Path | None = None,
) -> Run:
    """Trains all systems in turns.

    Args:
        task: What they train.
        systems: Their names, with options (see :mod:`~lightning_safusion.bench.rows`).
        place: Where.
        rhythm: In which turns.
        logs: Folder for what the workers print.
        tell: Called with a system and the number of steps that it has just done.
        trace: Also fit costs, and write the job's trace to this file. A team of its own does so and takes turns with
            the others, so that costs and steps are of the same minutes.

    Raises:
        ValueError: If there is no such system.
        RuntimeError: If a worker fails; names the log.
    """
    logs.mkdir(parents=True, exist_ok=True)
    for system in systems:
        task.strategy(system)  # raises here, if there is no such system
    blocks: dict[str, list[list[Block]]] = {system: [] for system in systems}
    with ExitStack() as stack:
        teams: list[Team] = []
        for number, system in enumerate([*systems, *([] if trace is None else [CALIBRATION])]):
            work = _work(task, system, place.workers, rhythm, trace)
            team = stack.enter_context(started(system, place, logs / f"{system}.log", place.port(number), work))
            team.collect()  # ready: the next one is set up when this one is, for it times its collectives then
            team.train(rhythm.warmup_of(system))
            tell(system, rhythm.warmup_of(system))
            teams.append(team)
        for turn in range(rhythm.rounds):
            first = turn % len(teams)
            for team in teams[first:] + teams[:first]:
                done = team.train(rhythm.block)
                if team.system != CALIBRATION:
                    blocks[team.system].append(done)
                tell(team.system, rhythm.block)
        return Run(blocks, teams[-1].collect()[0] if trace is not None else None)


def _work(
    task: Task, system: str, workers: int, rhythm: Rhythm, trace: Path | None
) -> Callable[[int, Connection], None]:
    """What each worker of a team does."""
    warmup, counted = rhythm.warmup_of(system), rhythm.rounds * rhythm.block

    def work(rank: int, pipe: Connection) -> None:
        if system == CALIBRATION and trace is not None:
            callbacks = [TraceRecorder(trace, counted, warmup), LocalCosts(pipe, warmup)]
            train(task, CALIBRATED, workers, warmup + counted, callbacks, pipe)
        else:
            train(task, system, workers, warmup + counted, [], pipe)

    return work
