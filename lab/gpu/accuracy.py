"""The set `accuracy`: what 8 virtual workers learn, against dense training after as many steps.

Each training is a job of a few processes that share the device, whose host is the slower part. Finished trainings are
lines of a file in the folder of the figures: a second call with the same folder goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import fmean

from lab.gpu.device import Device
from lab.gpu.figures import Figure, note
from lab.gpu.interpreter import quicken
from lab.gpu.stages import REHEARSAL_FACTOR, STAGES, Setting
from lab.gpu.trials import SIZES, Outcome, Trial, trained
from lab.processes import Ledger
from lab.tasks.sources import source_text

#: Systems of every size, the most important first.
COMPARED: Mapping[str, tuple[str, ...]] = {
    "25M": ("dense", "2 %", "1 %", "PowerSGD rank 4", "DeMo"),
    "110M": ("dense", "2 %"),
}
#: Of weights and batches. The second is trained at the rate that served the first best.
SEEDS = (0, 1)
#: Most per cent that the held-out loss may be above dense training's, mean over seeds.
GOALS = {("25M", "2 %"): 0.5, ("25M", "1 %"): 1.0}
#: Trainings that share the device.
PROCESSES = 6
# Seconds of a stage for imports and its end; steps of a rehearsal.
_AROUND, _REHEARSED_STEPS = 25.0, 3

#: What became of a training; the words of an error if it has failed.
Result = Outcome | str


class Trials:
    """The trainings of a set, and what is known of them.

    Args:
        folder: Of the figures.
        cuda: On a device, not in a rehearsal.
    """

    def __init__(self, folder: Path, cuda: bool) -> None:
        self.cuda, self.curves = cuda, folder / "accuracy-curves.csv"
        self._done = Ledger(folder / "accuracy-trainings.jsonl", Outcome, "a training")

    def steps(self, size: str) -> int:
        """Of each training of a size."""
        return SIZES[size].steps if self.cuda else _REHEARSED_STEPS

    def _settings(self, trial: Trial) -> dict[str, object]:
        return {**trial._asdict(), "steps": self.steps(trial.size), "on a device": self.cuda}

    def outcome(self, trial: Trial) -> Outcome | None:
        """What became of a trial; None if it was not trained yet."""
        return self._done.get(self._settings(trial))

    def add(self, trial: Trial, outcome: Outcome) -> None:
        """Writes what became of a trial."""
        self._done.add(self._settings(trial), outcome)

    def best(self, size: str, system: str, seed: int = SEEDS[0]) -> Trial | None:
        """The trial with the least loss over learning rates; None if there is none yet."""
        trials = [Trial(size, system, seed, lr) for lr in SIZES[size].rates]
        losses = {trial: result.loss for trial in trials if (result := self.outcome(trial)) and result.loss is not None}
        return min(losses, key=lambda trial: losses[trial]) if losses else None

    def missing(self) -> Iterator[Trial]:
        """What is to be trained, the most important first; what is known by then decides what follows."""
        return (trial for trial in self._wanted() if self.outcome(trial) is None)

    def _wanted(self) -> Iterator[Trial]:
        (first, second), (small, large) = SEEDS, COMPARED
        main, rivals, signs = COMPARED[small][:3], COMPARED[small][3:4], COMPARED[small][4:]
        for systems in (main, rivals):
            yield from (Trial(small, system, first, lr) for lr in SIZES[small].rates for system in systems)
        again = (self.best(small, system) for system in main + rivals)
        yield from (trial._replace(seed=second) for trial in again if trial is not None)
        yield from (Trial(large, system, first, lr) for lr in SIZES[large].rates for system in COMPARED[large])
        yield from (Trial(small, system, first, lr) for lr in SIZES[small].rates for system in signs)


def _train(trial: Trial, cuda: bool, steps: Mapping[str, int], curves: Path) -> Result:
    """One training, in a process of its own."""
    try:
        return trained(Device(rehearse=not cuda), trial, steps[trial.size], curves)
    except Exception as error:  # the others go on
        return f"{type(error).__name__}: {error}"[:200]


def finished(
    trials: Iterable[Trial], work: Callable[[Trial], Result], processes: int, until: float, rehearse: bool
) -> Iterator[tuple[Trial, Result]]:
    """Trains several at a time, in processes that end with this; results as they come.

    Args:
        trials: Each is taken when it can begin.
        work: Trains one.
        processes: How many at a time.
        until: Moment of ``time.perf_counter`` at which those that still run are given up.
        rehearse: Kernels are interpreted.
    """
    todo, results, running = iter(trials), SimpleQueue[tuple[Trial, Result]](), set[Trial]()
    with get_context("spawn").Pool(processes, quicken if rehearse else None) as pool:

        def start(trial: Trial) -> None:
            running.add(trial)
            pool.apply_async(
                work,
                (trial,),
                callback=lambda result: results.put((trial, result)),
                error_callback=lambda error: results.put((trial, repr(error))),
            )

        for trial in islice(todo, processes):
            start(trial)
        while running:
            try:
                trial, result = results.get(timeout=max(0.0, until - time.perf_counter()))
            except Empty:
                yield from ((trial, "time was short: a second call with the same folder goes on") for trial in running)
                return
            running.remove(trial)
            yield trial, result
            for following in islice(todo, 1):
                start(following)


def accuracy(setting: Setting) -> Iterator[Figure]:
    """See ``docs/gpu.md``."""
    cuda, seconds = not setting.rehearse, STAGES["accuracy"].seconds - _AROUND
    until = time.perf_counter() + seconds * (1.0 if cuda else REHEARSAL_FACTOR)
    known, failed = Trials(setting.folder, cuda), []
    if cuda:
        training, held_out = (len(text) >> 10 for text in source_text())
        yield note("text", f"{training:,} KiB to train on, {held_out:,} held out", about="split by file")
    work = partial(_train, cuda=cuda, steps={size: known.steps(size) for size in SIZES}, curves=known.curves)
    for trial, result in finished(known.missing(), work, PROCESSES if cuda else 2, until, setting.rehearse):
        if isinstance(result, str):
            failed.append(str(trial))
            yield note(f"{trial}: not trained", result)
        else:
            known.add(trial, result)
            yield _trained(trial, result, known.steps(trial.size))
    for size in COMPARED:
        yield from comparison(size, known)
    if failed:
        raise RuntimeError(f"not trained: {'; '.join(failed)}")


def _trained(trial: Trial, outcome: Outcome, steps: int) -> Figure:
    curve = ", ".join(f"{held_out:.4f}" for _, _, held_out in outcome.curve)
    sent, mean = (nbytes / 1e6 for nbytes in outcome.nbytes)
    about = f"{steps:,} steps in {outcome.seconds:.0f} s; sent in the last {sent:.3g} MB of a worker, mean {mean:.3g}; "
    name = f"{trial}: held-out loss"
    return note(name, "diverged" if outcome.loss is None else round(outcome.loss, 4), about=f"{about}curve: {curve}")


def comparison(size: str, known: Trials) -> Iterator[Figure]:
    """Every system's held-out loss against dense training's of the same seed and as many steps, each at its best rate.

    Args:
        size: Of the model.
        known: What was trained.
    """
    for system in COMPARED[size][1:]:
        above, shown = list[float](), list[str]()
        for seed in SEEDS:
            trials = known.best(size, COMPARED[size][0], seed), known.best(size, system, seed)
            losses = [outcome.loss for trial in trials if trial and (outcome := known.outcome(trial)) and outcome.loss]
            if len(losses) == len(trials):
                above.append(100 * (losses[1] / losses[0] - 1))
                rates = " and ".join(f"{trial.lr:g}" for trial in trials if trial)
                shown.append(f"seed {seed}: {above[-1]:+.2f} (rates {rates})")
        if above:
            name, most = f"{size}, {system}: held-out loss above dense training's", GOALS.get((size, system))
            yield Figure(name, fmean(above), "%", most=most, note=", ".join(shown))
