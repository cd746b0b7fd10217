"""How much of the exchange hides behind computation: a callback that times steps and their buffers."""

from __future__ import annotations

import socket
import warnings
from collections import deque
from dataclasses import asdict, astuple
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from rich.console import RenderableType
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_safusion.callbacks.base import StrategyCallback
from lightning_safusion.callbacks.run_directory import run_directory, run_id
from lightning_safusion.callbacks.terminal import print_table
from lightning_safusion.profiling.figures import RankFigures, StepFigures, buffer_means
from lightning_safusion.profiling.hosts import clock_offsets, gather, meet
from lightning_safusion.profiling.picture import plot_step
from lightning_safusion.profiling.recorder import StepRecorder
from lightning_safusion.profiling.summary import summarize, write_summary
from lightning_safusion.profiling.table import build_table
from lightning_safusion.profiling.timeline import StepTimeline
from lightning_safusion.profiling.trace import trace_events, write_trace
from lightning_safusion.strategy import SAFusionStrategy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_ROWS = 1000  # recorded steps whose figures are kept for the report


class OverlapProfiler(StrategyCallback):
    """Times every phase of a step and of each buffer, and says how much of the exchange was exposed.

    Of every ``every_n_steps`` optimizer steps the last ``record_steps`` are recorded (and the first ones of a fit);
    after them the ranks exchange their means (104 bytes each), values are logged and a table is printed. Nothing waits
    for the device before that. On CUDA times are those of events in the order of the streams, read one step later.

    Logged through every logger of the trainer, means over the recorded steps and over ranks:

    ==============================  ===================================================================================
    ``safusion/step_s``             seconds of a step of the optimizer, with all batches accumulated for it
    ``safusion/data_s``             seconds between batches: loading, other callbacks, Lightning's own messages
    ``safusion/forward_s``          seconds from a batch's beginning to its backward pass
    ``safusion/backward_s``         seconds of backward passes, without the next three
    ``safusion/select_s``           seconds of compensation, selection and packing
    ``safusion/exposed_s``          seconds for which the backward pass stood still for an exchange (NOCT)
    ``safusion/decode_s``           seconds of decoding
    ``safusion/optimizer_s``        seconds of clipping and the optimizer's step
    ``safusion/other_s``            seconds of everything else
    ``safusion/exchange_s``         seconds in which at least one collective was under way
    ``safusion/work_s``             seconds of forward, backward, selection, decoding and optimizer
    ``safusion/overlap_ratio``      share of ``exchange_s`` in which the rank computed, in [0, 1]
    ``safusion/bytes_sent``         bytes that a rank hands to its collectives in a step
    ``safusion/slowest_rank``       rank with the longest ``work_s``
    ``safusion/skew_s``             seconds by which its ``work_s`` exceeds the median rank's
    ==============================  ===================================================================================

    Progress bars show ``exposed_ms``: milliseconds of exposed exchange per step. With plain DDP only phases are known;
    what belongs to the exchange is left out, and a message says so.

    At the end of a fit, also after an error, every rank writes ``trace_rank_00000.json`` (its own number) with the
    latest recorded steps: ``safusion trace RUN_DIR`` merges them for https://ui.perfetto.dev. Rank 0 also writes
    ``overlap.json`` for reports (keys: :mod:`lightning_safusion.profiling.summary`). Where the trainer starts processes
    of its own (spawn, fork), draw the picture from that file:
    ``plot_step(load_timeline(run_dir))`` of :mod:`lightning_safusion.profiling`.

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
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be 1 or more, got {every_n_steps}")
        if record_steps is None:
            record_steps = min(10, every_n_steps)
        if not 1 <= record_steps <= every_n_steps:
            raise ValueError(f"record_steps must be 1 to every_n_steps = {every_n_steps}, got {record_steps}")
        self.every_n_steps = every_n_steps
        self.record_steps = record_steps
        self.dirpath = dirpath
        self.progress_bar = progress_bar
        self.table = table
        self.steps: list[StepTimeline] = []
        self.figures: RankFigures | None = None
        self.run_dir: Path | None = None
        self._recorder = StepRecorder()
        self._rows: deque[tuple[int, StepFigures]] = deque(maxlen=_ROWS)
        self._handles: list[RemovableHandle] = []
        self._recording = self._stepped = self._said = False
        self._count = self._reported = 0  # steps of this fit, and of these, those before the latest report
        self._first = 0  # number of its first step in the logs
        self._run = 0.0  # the same on all ranks
        self._clocks = (np.zeros(1), np.zeros(1))

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._strategy(trainer)
            self.steps, self.figures = [], None
            self._rows.clear()
            self._recorder.clear()
            self._recording = self._stepped = self._said = False
            self._count = self._reported = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.run_dir = run_directory(trainer, self.dirpath)
        self._run = run_id(trainer)
        self._first = trainer.fit_loop.epoch_loop._batches_that_stepped
        self._compare_clocks(trainer)
        for optimizer in trainer.optimizers:
            if hasattr(optimizer, "register_step_post_hook"):  # not where it is not one of torch's
                hook = optimizer.register_step_post_hook(lambda *_: self._after_optimizer(trainer))
                self._handles.append(hook)
        self._follow(self._strategy(trainer))

    def _compare_clocks(self, trainer: Trainer) -> None:
        self._clocks = clock_offsets(meet(trainer.strategy.root_device))

    def _records(self, number: int) -> bool:
        """Whether the step with this number in the fit is recorded."""
        return number < self.record_steps or number % self.every_n_steps >= self.every_n_steps - self.record_steps

    def _follow(self, strategy: SAFusionStrategy) -> None:
        """Listens to the next step, if that is recorded."""
        self._recording = self._records(self._count)
        if self._recording:
            strategy.remove_observer(self._recorder)
            strategy.add_observer(self._recorder)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._recorder.pause()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._recorder.pause()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._recording:
            self._recorder.batch_start(self._strategy(trainer).clock.mark())

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        if self._recording:
            self._recorder.before_backward(self._strategy(trainer).clock.mark())

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._recording:
            self._recorder.after_backward(self._strategy(trainer).clock.mark())

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._stepped = True
        if self._recording:
            self._recorder.before_optimizer(self._strategy(trainer).clock.mark())

    def _after_optimizer(self, trainer: Trainer) -> None:
        if self._recording:
            self._recorder.after_optimizer(self._strategy(trainer).clock.mark())

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy = self._strategy(trainer)
        stepped, self._stepped = self._stepped, False
        mark = strategy.clock.mark()
        if self._recording:
            self._recorder.batch_end(mark, self._first + self._count if stepped else None)
        else:
            self._recorder.skip(mark)
        reported = stepped and self._step_ended(trainer)
        if reported or batch_idx == 0:  # Lightning forgets it with the epoch
            self._show_exposed(trainer, pl_module)

    def _step_ended(self, trainer: Trainer) -> bool:
        """Counts a step; returns whether a report was due."""
        strategy = self._strategy(trainer)
        self._count += 1
        self._follow(strategy)
        known = self._known(strategy)
        if known == 0 or (known != self.record_steps and known % self.every_n_steps):
            return False
        self._report(trainer, known)
        self._recorder.pause()
        return True

    def _known(self, strategy: SAFusionStrategy) -> int:
        """Steps whose windows have been told: a device's clock tells of a window while the next one begins."""
        return max(0, self._count - (0 if strategy.clock.instant else 1))

    def _report(self, trainer: Trainer, known: int) -> None:
        """Agrees with all ranks on the figures of the latest recorded steps, and tells them. A collective."""
        strategy = self._strategy(trainer)
        self._reported = known
        self.steps = self._recorder.take(strategy.clock, self._first + known)
        if not self._recording:
            strategy.remove_observer(self._recorder)
        rows = [StepFigures.of(step) for step in self.steps]
        self._rows += zip((step.step for step in self.steps), rows, strict=True)
        # steps before the engine has left the job to DDP have other figures than those after it
        latest = [row for step, row in zip(self.steps, rows, strict=True) if step.exchanged == self.steps[-1].exchanged]
        mine = torch.tensor(astuple(StepFigures.mean(latest)), dtype=torch.float64, device=strategy.root_device)
        everyone = gather(mine).cpu()
        self.figures = RankFigures(tuple(StepFigures(*row) for row in everyone.tolist()))
        if self._clocks[0].any():  # clocks of several hosts drift apart
            self._compare_clocks(trainer)
        self._say_aside(strategy)
        self._log(trainer, self.figures)
        if self.table:
            print_table(trainer, self._build_table(self.figures))

    def _say_aside(self, strategy: SAFusionStrategy) -> None:
        if self._said or (self.steps and self.steps[-1].exchanged):
            return
        reason = strategy.report()["plain_ddp"]
        if reason is not None:
            self._said = True
            rank_zero_info(f"OverlapProfiler times phases, and no exchange: plain DDP is used, because {reason}.")

    def _log(self, trainer: Trainer, figures: RankFigures) -> None:
        rank, skew = figures.slowest
        values = figures.mean.as_dict() | {"slowest_rank": rank, "skew_s": skew}
        step = self._first + self._reported - 1  # the last one that the figures are of
        for logger in trainer.loggers:
            logger.log_metrics({f"safusion/{key}": float(value) for key, value in values.items()}, step=step)

    def _show_exposed(self, trainer: Trainer, pl_module: LightningModule) -> None:
        exposed = self.figures.mean.exposed_s if self.figures is not None else nan
        if self.progress_bar and not trainer.barebones and not isnan(exposed):
            value = round(exposed * 1e3, 2)
            pl_module.log("exposed_ms", value, prog_bar=True, logger=False, rank_zero_only=True, batch_size=1)

    def _build_table(self, figures: RankFigures) -> RenderableType:
        numbers = f"{self.steps[0].step} to {self.steps[-1].step}" if self.steps else "none"
        title = f"Where the time went: {len(self.steps)} steps ({numbers}), {len(figures.ranks)} ranks"
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
        if self.figures is not None:
            self._write(trainer)  # without the other ranks, which may be lost

    def _write(self, trainer: Trainer) -> None:
        if self.run_dir is None or self.figures is None:
            return
        rank, host = trainer.global_rank, socket.gethostname()
        offset, error = (float(values[rank]) for values in self._clocks)
        clock = {"clock_offset_s": offset, "clock_error_s": error}
        about = {"run": self._run, "rank": rank, "world_size": trainer.world_size, "host": host, **clock}
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            write_trace(self.run_dir, trace_events(self.steps, rank, host, offset), about)
            if trainer.is_global_zero:
                write_summary(self.run_dir, self._summary(trainer, self.figures))
        except OSError as failure:  # a full disk is no reason to lose what was trained
            warnings.warn(f"OverlapProfiler could not write to {self.run_dir}: {failure}", stacklevel=2)

    def _summary(self, trainer: Trainer, figures: RankFigures) -> dict[str, Any]:
        strategy = self._strategy(trainer)
        report = strategy.report()
        about = {
            "run": self._run,
            "system": strategy.system,
            "world_size": trainer.world_size,
            "device": strategy.root_device.type,
            "plain_ddp": report["plain_ddp"],
            "density": report["density"] if report["plan"] else None,
            "settings": strategy.settings.describe(),
            "profiler": {"every_n_steps": self.every_n_steps, "record_steps": self.record_steps},
            "decisions": [asdict(decision) for decision in strategy.decisions],
        }
        return summarize(figures, self._rows, self.steps, strategy.plan, strategy.costs, self._clocks, about)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy, SAFusionStrategy):
            trainer.strategy.remove_observer(self._recorder)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._recorder.clear()

    def plot(self, ax: Axes | None = None) -> Figure | SubFigure:
        """Draws the latest recorded step of this rank: which buffer was late, and why.

        Args:
            ax: Where to draw; a new figure if there is none.

        Raises:
            RuntimeError: If this process has recorded no step.
            ModuleNotFoundError: If matplotlib is missing; names the extra that brings it.
        """
        if not self.steps:
            raise RuntimeError(
                "no step has been recorded in this process: call plot() after fit; where the trainer starts processes "
                "of its own (spawn, fork), use plot_step(load_timeline(run_dir)) of lightning_safusion.profiling"
            )
        return plot_step(self.steps[-1], ax)
