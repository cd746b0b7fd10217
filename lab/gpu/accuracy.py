"""The sets `accuracy` and `accuracy-rest`: what 8 virtual workers learn, against dense training at equal steps.

Finished trainings are lines of a file in the folder of the figures. A stage trains what is not there, the most
important first, and begins no training for which time is short: a second call with the same folder goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from lab.gpu.device import Device
from lab.gpu.figures import Figure, note
from lab.gpu.stages import STAGES, Setting
from lab.gpu.trials import SIZES, Outcome, Recipe, Trial, step_seconds, trained
from lab.processes import Ledger
from lab.tasks.sources import source_text

#: Systems without which nothing is shown, and those that others propose.
MAIN, RIVALS = ("dense", "2 %", "1 %"), ("PowerSGD rank 4", "DeMo")
#: Systems of every size.
COMPARED: Mapping[str, tuple[str, ...]] = {"25M": MAIN + RIVALS, "110M": MAIN[:2]}
#: Of weights and batches; the largest size has the first alone.
SEEDS = (0, 1)
#: Most per cent that the held-out loss may be above dense training's, mean over seeds.
GOALS = {("25M", "2 %"): 0.5, ("25M", "1 %"): 1.0}
#: DeMo steps by signs: factors on dense training's rate that it is tried with.
DEMO_FACTORS = (0.3, 1.0)
#: Most steps; and those that are not given up so that rivals fit as well.
MOST_STEPS, _LEAST_STEPS = 2000, 1500
# Seconds for the trainings of a size: of what must be shown, and of the rivals.
_MAIN_SECONDS, _RIVAL_SECONDS = {"25M": 150.0, "110M": 60.0}, 155.0
# Steps of a look at a learning rate, one in so many; steps come in tens. Evaluations, and other steps than were timed.
_LOOKS, _ROUNDED, _MORE = 6, 10, 1.15
# Seconds of a stage for imports, the text, and its end; steps before those that are timed, and these.
_AROUND, _PROBED, _REHEARSED = 25.0, (16, 10), (1, 1)
_REHEARSED_STEPS = 3


@dataclass(frozen=True)
class Plan:
    """Steps of all systems of a size.

    Args:
        steps: So many.
        seconds: Of a step, by system; of none that failed.
    """

    steps: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class Look:
    """Short trainings by which a learning rate was chosen.

    Args:
        best: The rate, or the factor on dense training's.
        losses: Held-out loss by rate or factor; None where it diverged.
        steps: Of each.
    """

    best: float
    losses: dict[str, float | None]
    steps: int


def chosen_steps(size: str, seconds: Mapping[str, float]) -> int:
    """Steps of all systems of a size, by what a step of each takes.

    As many as fit into the time, at most 2,000. Those that must be shown are not cut below 1,500 for the rivals' sake.

    Args:
        size: Of :data:`COMPARED`.
        seconds: Of a step, by system.
    """
    main, rival = (_MORE * sum(_with_looks(system, seconds) for system in systems) for systems in (MAIN, RIVALS))
    steps = min(MOST_STEPS, _MAIN_SECONDS[size] / main) if main else MOST_STEPS
    if rival:
        steps = min(steps, max(_LEAST_STEPS, _RIVAL_SECONDS / rival))
    return max(_ROUNDED, int(steps) // _ROUNDED * _ROUNDED)


def _with_looks(system: str, seconds: Mapping[str, float]) -> float:
    """Seconds of a step, with its share of the looks at DeMo's factors; 0 if they are not known."""
    looks = len(DEMO_FACTORS) / _LOOKS if system == "DeMo" else 0.0
    return (1 + looks) * seconds.get(system, 0.0)


class Work:
    """A stage's trainings, and what earlier ones have left in its folder.

    Args:
        setting: Where the stage runs.
        seconds: After which it is ended.
    """

    def __init__(self, setting: Setting, seconds: float) -> None:
        self.place, self._end = Device(setting.rehearse), time.perf_counter() + seconds - _AROUND
        folder = setting.folder
        self._curves = folder / "accuracy-curves.csv"
        self.done = Ledger(folder / "accuracy-trainings.jsonl", Outcome, "a training")
        self._plans = Ledger(folder / "accuracy-plans.jsonl", Plan, "a number of steps")
        self._looks = Ledger(folder / "accuracy-rates.jsonl", Look, "a choice of rates")

    def _settings(self, **of: object) -> dict[str, object]:
        return {**of, "on a device": self.place.cuda}

    def outcome(self, trial: Trial) -> Outcome | None:
        """What became of a trial; None if it was not trained yet."""
        return self.done.get(self._settings(**trial._asdict()))

    def plan(self, size: str) -> Plan:
        """Steps of a size; measured if they are not known."""
        settings = self._settings(size=size)
        if (plan := self._plans.get(settings)) is None:
            seconds = {}
            for system in COMPARED[size]:
                try:
                    seconds[system] = step_seconds(
                        self.place, Trial(size, system, 0), *(_PROBED if self.place.cuda else _REHEARSED)
                    )
                except Exception as error:
                    print(f"{size}, {system}: {error!r}")  # its training will say so on the page
            plan = Plan(chosen_steps(size, seconds) if self.place.cuda else _REHEARSED_STEPS, seconds)
            self._plans.add(settings, plan)
        return plan

    def look(self, size: str, system: str) -> Look:
        """The best learning rate of dense training, or DeMo's best factor on it; tried if it is not known."""
        settings = self._settings(size=size, system=system)
        if (look := self._looks.get(settings)) is None:
            steps = max(2, self.plan(size).steps // _LOOKS)
            if system == MAIN[0]:
                recipes = {rate: Recipe(steps, rate) for rate in SIZES[size].rates}
            else:
                rate = self.look(size, MAIN[0]).best
                recipes = {factor: Recipe(steps, rate, factor) for factor in DEMO_FACTORS}
            losses = {
                value: trained(self.place, Trial(size, system, 0), recipe, points=1).loss
                for value, recipe in recipes.items()
            }
            finite = {value: loss for value, loss in losses.items() if loss is not None}
            best = min(finite or recipes, key=lambda value: finite.get(value, 0.0))
            look = Look(best, {f"{value:g}": loss for value, loss in losses.items()}, steps)
            self._looks.add(settings, look)
        return look

    def fits(self, trial: Trial) -> bool:
        """Whether the time that is left is enough; always in a rehearsal."""
        plan = self.plan(trial.size)
        expected = _MORE * plan.steps * _with_looks(trial.system, plan.seconds)
        return not self.place.cuda or time.perf_counter() + expected < self._end

    def train(self, trial: Trial) -> None:
        """Trains, and writes the outcome."""
        recipe = Recipe(self.plan(trial.size).steps, self.look(trial.size, MAIN[0]).best)
        if trial.system == "DeMo":
            recipe = Recipe(recipe.steps, recipe.lr, self.look(trial.size, "DeMo").best)
        self.done.add(self._settings(**trial._asdict()), trained(self.place, trial, recipe, self._curves))


def _planned(work: Work, size: str) -> Iterator[Figure]:
    """What all systems of a size have in common, and how it was chosen."""
    plan = work.plan(size)
    times = ", ".join(f"{system} {1e3 * seconds:.3g} ms" for system, seconds in plan.seconds.items())
    about = f"by steps of {times}, at most {MOST_STEPS:,}; equal for all systems of the size"
    yield note(f"{size}: steps", plan.steps, about=about)
    yield _looked(f"{size}: largest learning rate", work.look(size, MAIN[0]), "dense training", "all take it")


def _looked(name: str, look: Look, who: str, then: str) -> Figure:
    losses = {value: "diverged" if loss is None else f"{loss:.4f}" for value, loss in look.losses.items()}
    tried, values = ", ".join(f"{value}: {loss}" for value, loss in losses.items()), list(map(float, losses))
    edge = "; the best is at the end of what was tried" if look.best in (min(values), max(values)) else ""
    about = f"the best of {who}, held-out loss after {look.steps} steps: {tried}{edge}; {then}"
    return note(name, look.best, about=about)


def trainings(setting: Setting, stage: str, trials: Sequence[Trial]) -> Iterator[Figure]:
    """Trains what was not trained yet, as far as time goes, and shows all of it.

    Args:
        setting: Where the stage runs.
        stage: Its name.
        trials: Most important first.

    Raises:
        FileNotFoundError: If the machine has little text.
        RuntimeError: At the end, if a training has failed.
    """
    work = Work(setting, STAGES[stage].seconds)
    if work.place.cuda:
        training, held_out = (len(text) >> 10 for text in source_text())
        yield note("text", f"{training:,} KiB to train on, {held_out:,} held out", about="split by file")
    planned, failed = set[str](), []
    for trial in trials:
        try:
            if trial.size not in planned:
                planned.add(trial.size)
                yield from _planned(work, trial.size)
            yield from _trained(work, trial)
        except Exception as error:  # the others go on
            failed.append(str(trial))
            yield note(f"{trial}: failed", f"{type(error).__name__}: {error}"[:200])
    for size in dict.fromkeys(trial.size for trial in trials):
        yield from comparison(size, work.outcome)
    if failed:
        raise RuntimeError(f"trainings that failed: {'; '.join(failed)}")


def _trained(work: Work, trial: Trial) -> Iterator[Figure]:
    """Trains if that was not done, and shows what became of it."""
    if work.outcome(trial) is None:
        if not work.fits(trial):
            yield note(f"{trial}: not trained", "time was short", about="accuracy-rest goes on, with the same folder")
            return
        work.train(trial)
    outcome = work.outcome(trial)
    if trial.system == "DeMo" and trial.seed == SEEDS[0]:
        yield _looked(
            f"{trial.size}, DeMo: factor on the rate", work.look(trial.size, "DeMo"), "DeMo", "all seeds take it"
        )
    if outcome is None or outcome.loss is None:
        yield note(f"{trial}: held-out loss", "diverged")
        return
    steps, lr, factor = outcome.recipe
    curve = ", ".join(f"{held_out:.4f}" for _, _, held_out in outcome.curve)
    sent = f"{outcome.nbytes / 1e6:.3g} MB of a worker in a step"
    about = f"{steps:,} steps, rate {lr * factor:g}; {sent}; curve: {curve}"
    yield Figure(f"{trial}: held-out loss", outcome.loss, "nats per byte", note=about)
    yield Figure(f"{trial}: step", outcome.milliseconds, "ms", note="of all workers together")


def comparison(size: str, outcome: Callable[[Trial], Outcome | None]) -> Iterator[Figure]:
    """Every system's held-out loss against dense training's of the same seeds and as many steps.

    Args:
        size: Of the model.
        outcome: What became of a trial.
    """
    for system in COMPARED[size][1:]:
        above: dict[int, float] = {}
        for seed in SEEDS:
            pair = outcome(Trial(size, MAIN[0], seed)), outcome(Trial(size, system, seed))
            dense, own = (None if each is None else each.loss for each in pair)
            if dense is not None and own is not None:
                above[seed] = 100 * (own / dense - 1)
        if above:
            about = ", ".join(f"seed {seed}: {value:+.2f}" for seed, value in above.items())
            name, most = f"{size}, {system}: held-out loss above dense training's", GOALS.get((size, system))
            yield Figure(name, fmean(above.values()), "%", most=most, note=about)


def _trials(size: str, systems: Sequence[str], seed: int = 0) -> list[Trial]:
    return [Trial(size, system, seed) for system in systems]


def accuracy(setting: Setting) -> Iterator[Figure]:
    """See ``docs/gpu.md``."""
    yield from trainings(setting, "accuracy", _trials("25M", MAIN))


def rivals(setting: Setting) -> Iterator[Figure]:
    """See ``docs/gpu.md``."""
    yield from trainings(setting, "accuracy-rivals", _trials("25M", RIVALS))


def rest(setting: Setting) -> Iterator[Figure]:
    """See ``docs/gpu.md``."""
    both = [trial for seed in SEEDS for trial in _trials("25M", COMPARED["25M"], seed)]
    yield from trainings(setting, "accuracy-rest", [*both, *_trials("110M", COMPARED["110M"])])
