"""One run: all systems on the same machines, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from lightning_safusion.bench.grammar import read
from lightning_safusion.bench.links import linked_namespaces, why_no_links
from lightning_safusion.bench.recorders import EngineRecord, EngineRecorder, FloorRecord, FloorRecorder
from lightning_safusion.bench.team import Place, Team, started
from lightning_safusion.bench.workers import FLOOR, REFERENCE_STRATEGIES, Block, Task, train
from lightning_safusion.systems import resolve_system

#: Rows of every run: the floor, and what a user has without this package.
REFERENCES = (FLOOR, "ddp")
#: The teams that record what costs are fitted to, beside the systems: the job without any exchange, and the engine with
#: selection before fusion and after it.
RECORDS = ("floor-record", "ahead-record", "behind-record")
# Systems whose engine is recorded: sparse, with buffers that all ranks cut alike.
_RECORDED = {"ahead-record": "saf-inter", "behind-record": "behind"}
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
        if system in RECORDS:
            return 2 * self.block
        fixed = system in REFERENCE_STRATEGIES or resolve_system(read(system)[0]).ddp_hook is not None
        return min(self.warmup, _FIXED_WARMUP) if fixed else self.warmup


@contextmanager
def machines(workers: int, rate: str | None) -> Iterator[Place]:
    """Workers with a link of that rate each, or on the loopback.

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
    """Of each system the blocks of each round, by rank; and, if that was asked for, by rank, steps with no exchange,
    with selection before fusion (and the collectives of the group), and with selection after it."""

    blocks: dict[str, list[list[Block]]]
    floor: list[FloorRecord]
    ahead: list[EngineRecord]
    behind: list[EngineRecord]


def measure(
    task: Task,
    systems: Sequence[str],
    place: Place,
    rhythm: Rhythm,
    logs: Path,
    tell: Callable[[str, int], None] = lambda system, steps: None,
    record: bool = False,
) -> Run:
    """Trains all systems in turns.

    Args:
        task: What they train.
        systems: Rows, see :mod:`~lightning_safusion.bench.rows`.
        place: Where.
        rhythm: In which turns.
        logs: Folder for what the workers print.
        tell: Called with a system and the number of steps that it has just done.
        record: Also record what costs are fitted to, by teams of their own that take turns with the others.

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
        for number, system in enumerate([*systems, *(RECORDS if record else ())]):
            work = _work(task, system, place.workers, rhythm)
            team = stack.enter_context(started(system, place, logs / f"{system}.log", place.port(number), work))
            team.collect()  # ready: the next one is set up when this one is, for it times its collectives then
            team.train(rhythm.warmup_of(system))
            tell(system, rhythm.warmup_of(system))
            teams.append(team)
        for turn in range(rhythm.rounds):
            first = turn % len(teams)
            for team in teams[first:] + teams[:first]:
                done = team.train(rhythm.block)
                if team.system not in RECORDS:
                    blocks[team.system].append(done)
                tell(team.system, rhythm.block)
        if not record:
            return Run(blocks, [], [], [])
        floor, ahead, behind = teams[-len(RECORDS) :]
        # the collectives are timed now that nobody trains
        return Run(blocks, floor.collect(), ahead.finish(), behind.finish())


def _work(task: Task, system: str, workers: int, rhythm: Rhythm) -> Callable[[int, Connection], None]:
    """What each worker of a team does."""
    steps = rhythm.warmup_of(system) + rhythm.rounds * rhythm.block

    def work(rank: int, pipe: Connection) -> None:
        if system == RECORDS[0]:
            train(task, FLOOR, workers, steps, [FloorRecorder(pipe)], pipe)
        elif system in _RECORDED:
            recorder = EngineRecorder(pipe, rhythm.block, collectives=system == RECORDS[1])
            train(task, _RECORDED[system], workers, steps, [recorder], pipe)
        else:
            train(task, system, workers, steps, [], pipe)

    return work
