"""BufferSizeTuner over a link of known rate: from bad starts, and when the link becomes slow during the run.

    $ sudo python -m lab tuner --image docs/images/tuner.png

Two workers in network namespaces of their own, joined by links that ``tc`` shapes; gloo, 96 gradient tensors, top-k at
density 0.05, always sparse. The computation of each layer's gradients is a pause of known length, so that two cores
suffice. At the fast rate: a sweep of static numbers of tensors per buffer, and the tuner, whose link becomes slow at
half time. At the slow rate: the sweep, and the tuner from one buffer and from one buffer per tensor. All of that again
``--repeats`` times, in turns, since a machine changes its speed within minutes. A row's step is the median over repeats
of the median of the last 30 windows (first gradient to last mean); "model" is the predicted finish of the plan in use
over that of the best static one, likewise. Saves a picture (of the last repeat).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.figure import Figure
from torch.utils.data import DataLoader
from typing_extensions import override

from lab.bench.links import Machines, machines
from lab.bench.workload import Paced
from lab.markdown import markdown
from lab.processes import run_workers
from lightning_safusion import Adaptive, Aligned, SAFusionStrategy
from lightning_safusion.callbacks import BufferSizeTuner
from lightning_safusion.fusion.events import WindowEvents
from lightning_safusion.fusion.plans.pricing import predict_finish
from lightning_safusion.profiling.trace import Trace, TraceTensor
from lightning_safusion.tools.team import Place, make_trainer

SLOW, FAST = "100mbit", "1gbit"
LAYERS, WIDTH = 24, 256
STATIC_STEPS, TUNED_STEPS, CHANGE_AT, CHANGE_STEPS = 40, 80, 110, 230
LAST = 30  # steps of which the median counts
SWEEP = (1, 2, 4, 8, 16, 32, 4 * LAYERS)


@dataclass
class Run:
    """One training, and its figures on rank 0.

    Args:
        name: In tables and pictures, and the same in every repeat.
        size: Tensors per buffer at the start; 0: ``fusion="adaptive"``.
        steps: Steps to train.
        tuned: With ``BufferSizeTuner``.
        seconds: Window of each step.
        buffers: Of each step.
        lost: Predicted finish of the last plan over that of the best static one.
    """

    name: str
    size: int
    steps: int
    tuned: bool = False
    seconds: list[float] = field(default_factory=list)
    buffers: list[int] = field(default_factory=list)
    lost: float = 1.0

    @property
    def step(self) -> float:
        """Median window at the end."""
        return statistics.median(self.seconds[-LAST:])


def job(pause: float) -> Trace:
    """Layers with four tensors each, and a pause of the backward pass before the gradients of each layer."""
    shapes = ((WIDTH,), (WIDTH,), (WIDTH,), (WIDTH, WIDTH))
    return Trace(
        "layers",
        tuple(
            TraceTensor(f"{layer}.{place}", shape, 0.0 if place else pause, 0.0)
            for layer in range(LAYERS)
            for place, shape in enumerate(shapes)
        ),
    )


class Watch(Callback):
    """Observes the windows of a run, and compares its last plan with the best by the agreed costs.

    Args:
        run: Takes in the figures.
        pipe: Takes the name of the run and the number of its steps, after each; None: sends nothing.
    """

    def __init__(self, run: Run, pipe: Connection | None) -> None:
        self._run, self._pipe = run, pipe

    def observe(self, events: WindowEvents) -> None:
        """Records a window."""
        self._run.seconds.append(events.drained - float(events.ready.min()))
        self._run.buffers.append(len(events.buffers))
        if self._pipe is not None:
            self._pipe.send((self._run.name, len(self._run.seconds)))

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _strategy(trainer).add_observer(self)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        plan, costs = _strategy(trainer).plan, _strategy(trainer).costs
        if plan is not None and costs is not None:
            policies = [Aligned(size) for size in range(1, 4 * LAYERS + 1)] if self._run.size else [Adaptive()]
            best = min(predict_finish(policy.plan(costs), costs) for policy in policies)
            self._run.lost = predict_finish(plan, costs) / best


def _strategy(trainer: Trainer) -> SAFusionStrategy:
    assert isinstance(trainer.strategy, SAFusionStrategy)
    return trainer.strategy


def _work(runs: Sequence[Run], pause: float, rank: int, pipe: Connection) -> None:
    """Does the runs one after the other, as one of the workers; the first one sends the figures."""
    for run in runs:
        strategy = SAFusionStrategy(
            fusion=Aligned(run.size) if run.size else Adaptive(),
            collective="allgather",
            process_group_backend="gloo",
        )
        callbacks: list[Callback] = [Watch(run, None if rank else pipe), *([BufferSizeTuner()] if run.tuned else [])]
        module = Paced(job(pause))
        batches: Any = [module.batch()] * run.steps
        trainer = make_trainer(2, strategy, callbacks, max_steps=run.steps)
        trainer.fit(module, DataLoader(batches, batch_size=None))
    if rank == 0:
        pipe.send(list(runs))


def train(place: Place, runs: Sequence[Run], pause: float, slow_at: int | None = None) -> list[Run]:
    """Trains on a worker on each machine, and returns the runs with their figures.

    Args:
        place: Two machines.
        runs: To be done one after the other.
        pause: Seconds before the gradients of each layer.
        slow_at: Step of the last run at which the link becomes slow.
    """
    done: list[Run] = []
    for event in run_workers(place, partial(_work, runs, pause)):
        if isinstance(event, list):
            done = event
        elif event == (runs[-1].name, slow_at):
            for machine in place.machines if isinstance(place, Machines) else ():
                machine.shape(SLOW)
    return done


class Row:
    """Repeats of one training.

    Args:
        runs: With their figures.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.steps = sorted(run.step for run in runs)
        self.step = statistics.median(self.steps)

    def cells(self, best: float) -> tuple[str, ...]:
        """Those of the table; ``best`` is the step of the best static row."""
        last = self.runs[-1]
        buffers = ", ".join(str(count) for count in sorted({run.buffers[-1] for run in self.runs}))
        lost = sorted(100 * (run.lost - 1) for run in self.runs)
        model = f"{statistics.median(lost):+.1f} % ({lost[0]:+.1f} to {lost[-1]:+.1f})" if last.tuned else ""
        spread = f"{1e3 * self.steps[0]:.1f} to {1e3 * self.steps[-1]:.1f}"
        over = 100 * (self.step / best - 1)
        return last.name, buffers, f"{1e3 * self.step:.1f}", spread, f"{over:+.0f} %", model


def rows_of(rounds: Sequence[Sequence[Run]]) -> list[Row]:
    """One row for each training of a round."""
    return [Row(runs) for runs in zip(*rounds, strict=True)]


def table(title: str, rows: Sequence[Row], best: float) -> None:
    """Prints a markdown table."""
    columns = ("run", "buffers at the end", "step, ms", "repeats", "over the best static", "model")
    print(f"\n{title}\n\n{markdown(columns, [row.cells(best) for row in rows])}")


def picture(static: Sequence[Run], tuned: Sequence[Run], change: Run, best: dict[str, float]) -> Figure:
    """The sweep with the tuner's ways on it, and the steps of the run in which the link changed."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([r.buffers[-1] for r in static], [1e3 * r.step for r in static], "o-", color="0.6", label="static")
    for run, color in zip(tuned, ("tab:blue", "tab:orange"), strict=True):
        way = [(count, 1e3 * statistics.median(spans)) for count, spans in stages(run)]
        left.plot(*zip(*way, strict=True), "s--", color=color, label=run.name)
        left.plot(*way[-1], "*", color=color, markersize=15)
    left.set(xscale="log", xlabel="buffers", ylabel="window, ms", title=f"From bad starts, {SLOW}")
    left.legend()
    right.plot([1e3 * second for second in change.seconds], color="tab:blue", linewidth=1)
    right.axvline(CHANGE_AT, color="0.3", linestyle=":", label=f"link: {FAST} to {SLOW}")
    spans = {FAST: (0, CHANGE_AT), SLOW: (CHANGE_AT, len(change.seconds))}
    for (rate, (begin, end)), color in zip(spans.items(), ("tab:green", "tab:red"), strict=True):
        right.hlines(1e3 * best[rate], begin, end, color=color, label=f"best static, {rate}")
    counts = right.twinx()
    counts.step(range(len(change.buffers)), change.buffers, color="tab:orange", alpha=0.6, where="post")
    counts.set_ylabel("buffers", color="tab:orange")
    right.set(xlabel="step", ylabel="window, ms", title="A link that becomes slow")
    right.set_ylim(0, 3e3 * best[SLOW])
    right.legend()
    return figure


def stages(run: Run) -> list[tuple[int, list[float]]]:
    """Windows with one number of buffers after the other."""
    result: list[tuple[int, list[float]]] = []
    for count, seconds in list(zip(run.buffers, run.seconds, strict=True))[3:]:  # the first windows have no plan yet
        if not result or result[-1][0] != count:
            result.append((count, []))
        result[-1][1].append(seconds)
    return result


def new_plan(run: Run) -> int | None:
    """Step with the first plan that is another one than when the link changed."""
    return next((s for s in range(CHANGE_AT + 1, CHANGE_STEPS) if run.buffers[s] != run.buffers[s - 1]), None)


def tuner(image: Path | None = None, pause: float = 0.002, repeats: int = 3) -> None:
    """BufferSizeTuner over a link of known rate: from bad starts, and when the link becomes slow during the run.

    Args:
        image: Picture to save.
        pause: Seconds of backward pass for each of 24 layers.
        repeats: Times that everything is measured.
    """
    sweep = [Run(f"{size} tensors", size, STATIC_STEPS) for size in SWEEP]
    tuned = [Run("from one buffer", 4 * LAYERS, TUNED_STEPS, True), Run("from 96 buffers", 1, TUNED_STEPS, True)]
    change = Run("tuner", 0, CHANGE_STEPS, True)
    fast_rounds, slow_rounds = [], []
    for repeat in range(repeats):
        print(f"repeat {repeat + 1} of {repeats}", file=sys.stderr, flush=True)
        with machines(2, FAST) as place:
            fast_rounds.append(train(place, [*sweep, change], pause, CHANGE_AT))
            # the link has become slow
            slow_rounds.append(train(place, [*sweep, *tuned], pause))
    *fast, changed = rows_of(fast_rounds)
    slow = rows_of(slow_rounds)
    best = {FAST: min(row.step for row in fast), SLOW: min(row.step for row in slow[: len(sweep)])}
    table(f"Static, {FAST}", fast, best[FAST])
    table(f"Static, and the tuner from bad starts, {SLOW}", slow, best[SLOW])
    table(f"The tuner where {FAST} has become {SLOW}", [changed], best[SLOW])
    switched = [new_plan(run) for run in changed.runs]
    print(f"\nThe link changed at step {CHANGE_AT}; the first new plan is that of step {switched}.")
    if image is not None:
        image.parent.mkdir(parents=True, exist_ok=True)
        *static, one, many = slow_rounds[-1]
        picture(static, [one, many], changed.runs[-1], best).savefig(image, dpi=110)
