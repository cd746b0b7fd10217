"""A callback that times steps and their buffers: how much of the exchange overlaps with computation."""

from __future__ import annotations

import json
import shlex
import socket
import sys
from collections import deque
from dataclasses import astuple
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning import __version__ as lightning_version
from lightning.pytorch import LightningModule, Trainer
from rich.console import RenderableType
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_safusion.__about__ import __version__
from lightning_safusion.callbacks.base import StrategyCallback, check_every, print_table, run_directory, run_id, writing
from lightning_safusion.integration.readings import EngineReadings
from lightning_safusion.literal import plural
from lightning_safusion.profiling.figures import RankFigures, StepFigures, buffer_means, build_table
from lightning_safusion.profiling.overlap_file import FILE, Overlap
from lightning_safusion.profiling.pictures import plot_step
from lightning_safusion.profiling.timeline import Moment, StepRecorder, StepTimeline
from lightning_safusion.profiling.timeline_file import clock_offsets, gather, meet, timeline_events, write_timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_ROWS = 1000  # recorded steps whose figures are kept for the report


class OverlapProfiler(StrategyCallback):
    """Times every phase of a step and of each buffer, and reports how much of the exchange was exposed.

    Of every ``every_n_steps`` optimizer steps the last ``record_steps`` are recorded (and the first ones of a fit).
    After them the ranks exchange their means (104 bytes each), values are logged and a table is printed. Nothing waits
    for the device before that. On CUDA, times are those of events in the order of the streams, read one step later.

    Logged through every logger of the trainer, means over the recorded steps and over ranks: the numbers of
    :class:`~lightning_safusion.profiling.StepFigures` (``safusion/step_s``, ``safusion/exposed_s`` and so on),
    ``safusion/slowest_rank`` (the rank with the longest ``work_s``) and ``safusion/skew_s`` (seconds by which its
    ``work_s`` exceeds the median rank's). Where the planner has found a slow worker, also ``safusion/slow_rank`` and
    ``safusion/waiting_s``, as in :meth:`SAFusionStrategy.figures`.

    Progress bars show ``exposed_ms``: milliseconds of exposed exchange per step. With plain DDP only phases are timed;
    figures of the exchange are left out, and a message says so.

    At the end of a fit, also after an error, every rank writes ``timeline_rank_00000.json`` (its own number) with the
    latest recorded steps: ``safusion timeline RUN_DIR`` merges them for https://ui.perfetto.dev. Rank 0 also writes
    ``overlap.json`` for reports (keys: :class:`~lightning_safusion.profiling.overlap_file.Overlap`). Where the trainer
    starts processes of its own (spawn, fork), draw the picture from that file: ``plot_step(load_timeline(run_dir))`` of
    :mod:`lightning_safusion.profiling`.

    Args:
        every_n_steps: Optimizer steps from one report to the next.
        record_steps: Steps that are recorded for a report, 1 to ``every_n_steps``.
        dirpath: Directory for the files; ``safusion`` in the first logger's directory by default, or in the trainer's
            ``default_root_dir``.
        progress_bar: Show ``exposed_ms`` there.
        table: Print a table with every report and at the end (rank 0).

    Attributes:
        steps: The latest recorded steps of this rank.
        figures: Of all ranks, over those steps; None before the first report.
        run_dir: Where the files are; None before the first fit.

    Raises:
        ValueError: If ``every_n_steps`` is below 1, or ``record_steps`` is not in 1 to ``every_n_steps``.

    Example::

        profiler = OverlapProfiler(every_n_steps=100)
        trainer = Trainer(strategy=SAFusionStrategy(), callbacks=[profiler])
        trainer.fit(model)
        profiler.plot().savefig("step.png")
    """

    _purpose = "times"

    def __init__(
        self,
        every_n_steps: int = 50,
        record_steps: int | None = None,
        dirpath: str | Path | None = None,
        progress_bar: bool = True,
        table: bool = True,
    ) -> None:
        self.every_n_steps = check_every(every_n_steps)
        self.record_steps = min(10, every_n_steps) if record_steps is None else record_steps
        if not 1 <= self.record_steps <= every_n_steps:
            raise ValueError(f"record_steps must be 1 to every_n_steps = {every_n_steps}, got {record_steps}")
        self.dirpath = dirpath
        self.progress_bar = progress_bar
        self.table = table
        self.run_dir: Path | None = None
        self._recorder = StepRecorder()
        self._handles: list[RemovableHandle] = []
        self._first = 0  # number of this fit's first step in the logs
        self._run = 0.0  # when this fit began
        self._clocks = (np.zeros(1), np.zeros(1))
        self._reset()

    def _reset(self) -> None:
        self.steps: list[StepTimeline] = []
        self.figures: RankFigures | None = None
        self._rows: deque[tuple[int, StepFigures]] = deque(maxlen=_ROWS)
        self._recording = self._stepped = False
        self._dense = 0  # steps of this fit, the first ones, that are dense
        self._count = self._reported = 0  # steps of this fit, and of these, those before the latest report
        self._recorder.clear()

    @override
    def _begin(self, strategy: EngineReadings, trainer: Trainer, module: LightningModule) -> None:
        self._reset()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.run_dir = run_directory(trainer, self.dirpath)
        self._run = run_id(trainer)
        self._first = trainer.fit_loop.epoch_loop._batches_that_stepped
        self._clocks = clock_offsets(meet(trainer.strategy.root_device))
        for optimizer in trainer.optimizers:
            if hasattr(optimizer, "register_step_post_hook"):  # torch's optimizers have it
                hook = optimizer.register_step_post_hook(lambda *_: self._mark(trainer, "optimizer_end"))
                self._handles.append(hook)
        self._follow(self._strategy(trainer))

    def _records(self, number: int) -> bool:
        first = number < self._dense + self.record_steps
        return number >= self._dense and (
            first or number % self.every_n_steps >= self.every_n_steps - self.record_steps
        )

    def _follow(self, strategy: EngineReadings) -> None:
        engine = strategy.engine
        if engine is not None and engine.dense:
            self._dense = self._count + 1
        self._recording = self._records(self._count)
        if self._recording:
            strategy.remove_observer(self._recorder)
            strategy.add_observer(self._recorder)

    def _mark(self, trainer: Trainer, moment: Moment) -> None:
        if self._recording:
            self._recorder.mark(moment, self._strategy(trainer).clock.mark())

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._recorder.pause()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:  # the time between epochs is not loading
            self._recorder.pause()
        self._mark(trainer, "batch")

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        self._mark(trainer, "backward")

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark(trainer, "backward_end")

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._stepped = True
        self._mark(trainer, "optimizer")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy = self._strategy(trainer)
        stepped, self._stepped = self._stepped, False
        self._mark(trainer, "batch_end")
        if not self._recording:
            self._recorder.skip(strategy.clock.mark())
        reported = stepped and self._step_ended(trainer, strategy)
        if reported or batch_idx == 0:  # Lightning drops the value at the end of an epoch
            self._show_exposed(trainer, pl_module)

    def _step_ended(self, trainer: Trainer, strategy: EngineReadings) -> bool:
        """Counts a step; returns whether a report was due."""
        if self._recording:
            self._recorder.end_step(self._first + self._count)
        self._count += 1
        self._follow(strategy)
        known = self._known(strategy)
        if known == 0 or (known != self.record_steps and known % self.every_n_steps):
            return False
        self._report(trainer, known)
        self._recorder.pause()
        return True

    def _known(self, strategy: EngineReadings) -> int:
        """Steps whose windows were observed: with a device's clock that is while the next window begins."""
        return max(0, self._count - (0 if strategy.clock.instant else 1))

    def _report(self, trainer: Trainer, known: int) -> None:
        """Gathers the figures of the latest recorded steps from all ranks; logs and prints them. A collective."""
        strategy = self._strategy(trainer)
        self._reported = known
        self.steps = self._recorder.take(strategy.clock, self._first + known)
        if not self._recording:
            strategy.remove_observer(self._recorder)
        rows = [StepFigures.of(step) for step in self.steps]
        self._rows += zip((step.step for step in self.steps), rows, strict=True)
        # steps before plain DDP took over have other figures than those after it
        engine = [bool(step.windows) for step in self.steps]
        latest = [row for row, exchanged in zip(rows, engine, strict=True) if exchanged == engine[-1]]
        mine = torch.tensor(astuple(StepFigures.mean(latest)), dtype=torch.float64, device=trainer.strategy.root_device)
        everyone = gather(mine).cpu()
        self.figures = RankFigures(tuple(StepFigures(*row) for row in everyone.tolist()))
        if self._clocks[0].any():  # clocks of several hosts drift apart
            self._clocks = clock_offsets(meet(trainer.strategy.root_device))
        latest_step = strategy.figures()
        reason = latest_step["plain_ddp"]
        if reason is not None and not any(engine[-1:]):
            self._say(f"times phases, and no exchange: plain DDP is used, because {reason}")
        last = self._first + self._reported - 1  # the last step that the figures are of
        waiting = {key: latest_step[key] for key in ("slow_rank", "waiting_s")}
        self._log(trainer, self.figures.as_dict() | waiting, last)
        if self.table:
            print_table(trainer, self._build_table(self.figures))

    def _show_exposed(self, trainer: Trainer, pl_module: LightningModule) -> None:
        exposed = self.figures.mean.exposed_s if self.figures is not None else nan
        if self.progress_bar and not trainer.barebones and not isnan(exposed):
            value = round(exposed * 1e3, 2)
            pl_module.log("exposed_ms", value, prog_bar=True, logger=False, rank_zero_only=True, batch_size=1)

    def _build_table(self, figures: RankFigures) -> RenderableType:
        numbers = f"{self.steps[0].step} to {self.steps[-1].step}" if self.steps else "none"
        steps, ranks = plural(len(self.steps), "step"), plural(len(figures.ranks), "rank")
        title = f"Where the time went: {steps} ({numbers}), {ranks}"
        return build_table(title, figures, buffer_means(self.steps))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = self._strategy(trainer)
        known = self._known(strategy)
        if any(map(self._records, range(self._reported, known))):
            self._report(trainer, known)
        elif self.figures is not None and self.table and known > self._reported:
            print_table(trainer, self._build_table(self.figures))
        self._write(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._write(trainer)  # no collective: the other ranks may be lost

    def _write(self, trainer: Trainer) -> None:
        if self.run_dir is None or self.figures is None:
            return
        rank, host = trainer.global_rank, socket.gethostname()
        offset, error = (float(values[rank]) for values in self._clocks)
        about = {"run": self._run, "rank": rank, "world_size": trainer.world_size, "host": host}
        about |= {"clock_offset_s": offset, "clock_error_s": error}
        with writing(self.run_dir):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            write_timeline(self.run_dir, timeline_events(self.steps, rank, host, offset), about)
            if trainer.is_global_zero:
                content = json.dumps(self._summary(trainer, self.figures).to_dict(), allow_nan=False, indent=1)
                (self.run_dir / FILE).write_text(content, encoding="utf-8")

    def _summary(self, trainer: Trainer, figures: RankFigures) -> Overlap:
        strategy = self._strategy(trainer)
        report, slowest = strategy.figures(), strategy.slowest
        offsets, errors = (values.tolist() for values in self._clocks)
        return Overlap(
            run=self._run,
            system=strategy.system,
            world_size=trainer.world_size,
            device=trainer.strategy.root_device.type,
            plain_ddp=report["plain_ddp"],
            density=report["density"] if report["plan"] else None,
            settings=strategy.describe(),
            profiler={"every_n_steps": self.every_n_steps, "record_steps": self.record_steps},
            versions={"lightning_safusion": __version__, "lightning": lightning_version, "torch": torch.__version__},
            command=shlex.join(sys.argv),
            steps=dict(self._rows),
            ranks=figures,
            buffers=tuple(buffer_means(self.steps)),
            plan=strategy.plan,
            costs=strategy.costs,
            timeline=self.steps[-1] if self.steps else None,
            decisions=tuple(strategy.decisions),
            workers=None if slowest is None else slowest.times,
            slow_worker=None if slowest is None else slowest.slow,
            clocks={"offset_s": offsets, "error_s": errors},
        )

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy, self._serves):
            trainer.strategy.remove_observer(self._recorder)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._recorder.clear()

    def plot(self, ax: Axes | None = None) -> Figure | SubFigure:
        """Draws the latest recorded step of this rank with :func:`~lightning_safusion.profiling.plot_step`.

        Raises:
            RuntimeError: If this process has recorded no step.
        """
        if not self.steps:
            raise RuntimeError(
                "no step has been recorded in this process: call plot() after fit; where the trainer starts processes "
                "of its own (spawn, fork), use plot_step(load_timeline(run_dir)) of lightning_safusion.profiling"
            )
        return plot_step(self.steps[-1], ax)
