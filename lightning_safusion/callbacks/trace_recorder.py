"""A callback that records a job's trace for the simulator: how long each gradient takes."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_safusion.callbacks.base import StrategyCallback, writing
from lightning_safusion.fusion.events import Clock, Mark, WindowEvents
from lightning_safusion.fusion.layout import Layout
from lightning_safusion.integration.readings import EngineReadings
from lightning_safusion.literal import plural
from lightning_safusion.profiling.trace import Trace, TraceTensor
from lightning_safusion.strategy import SAFusionStrategy


class TraceRecorder(StrategyCallback):
    """Records the trace of a job on rank 0: when each gradient is ready, and the other times of a step.

    ``safusion plan --trace FILE`` then predicts this job with every system on another cluster. Of each gradient the
    trace holds the time since the one before it, without the selection, waiting and decoding of this package; of each
    layer the time of its forward pass. The rest of a batch, the optimizer's step included, counts as ``optimizer``.
    Loading is left out. Times are medians over the recorded steps; on CUDA those of events in the order of the streams.

    Args:
        path: JSON file to write; None: only :attr:`trace` has it.
        record_steps: Steps to record.
        skip_steps: Steps before them: the first ones open connections, and find the order of the gradients.

    Attributes:
        trace: The recorded trace; None on other ranks and before the last step to record.

    Raises:
        ValueError: If ``record_steps`` is below 1 or ``skip_steps`` is negative.

    Example::

        Trainer(strategy=SAFusionStrategy(), callbacks=[TraceRecorder("job.json")]).fit(model)
    """

    _purpose = "records"
    _serves = SAFusionStrategy

    def __init__(self, path: str | Path | None, record_steps: int = 20, skip_steps: int = 10) -> None:
        if record_steps < 1 or skip_steps < 0:
            raise ValueError(
                f"record_steps must be 1 or more and skip_steps 0 or more, got {record_steps} and {skip_steps}"
            )
        self.path = None if path is None else Path(path)
        self.record_steps = record_steps
        self.skip_steps = skip_steps
        self.trace: Trace | None = None
        self._handles: list[RemovableHandle] = []
        self._step: _Marks | None = None
        self._batches = 0
        self._windows: list[WindowEvents] = []
        self._marked: list[_Marks] = []

    @override
    def _begin(self, strategy: EngineReadings, trainer: Trainer, module: LightningModule) -> None:
        if trainer.accumulate_grad_batches != 1:
            raise MisconfigurationException(
                "TraceRecorder records steps of one batch, got "
                f"accumulate_grad_batches={trainer.accumulate_grad_batches}: record the job without accumulation."
            )
        self._release(strategy)  # of a fit that an error has ended
        self.trace, self._batches = None, 0
        self._windows, self._marked = [], []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = self._strategy(trainer)
        reason = strategy.figures()["plain_ddp"]
        if reason is not None:
            rank_zero_warn(f"TraceRecorder records nothing, for gradients are not seen: {reason}. Use system='wfbp'.")
        elif trainer.is_global_zero:
            strategy.add_observer(self)
            for name, module in pl_module.named_modules():
                if any(param.requires_grad for param in module.parameters(recurse=False)):
                    self._handles.append(module.register_forward_pre_hook(partial(self._enter, strategy, name)))

    def _enter(self, strategy: EngineReadings, name: str, module: nn.Module, inputs: Any) -> None:
        if self._step is not None and self._step.before_backward is None:
            self._step.layers.append((name, strategy.clock.mark()))

    def observe(self, events: WindowEvents) -> None:
        """Adds a window."""
        if self._windows and self._windows[-1].layout is not events.layout:
            self._windows, self._marked = [], []  # the order has changed: steps before it have other places
        self._windows.append(events)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        engine = self._strategy(trainer).engine
        if self._handles and engine is None:
            self._finish(trainer)  # plain DDP has taken over
        # what a dense step exchanges has no times of its own, and would count as the optimizer's
        elif self._handles and self._batches >= self.skip_steps and engine is not None and not engine.dense:
            self._step = _Marks(self._strategy(trainer).clock.mark())

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._step is not None:
            self._step.before_backward = self._strategy(trainer).clock.mark()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        if self._step is not None:
            self._step.end = self._strategy(trainer).clock.mark()
            self._marked.append(self._step)
            self._step = None
            # on CUDA the window of a batch is observed during the next one
            if len(self._marked) > self.record_steps:
                self._finish(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._handles:
            self._finish(trainer)

    def _finish(self, trainer: Trainer) -> None:
        strategy, clock = self._strategy(trainer), self._strategy(trainer).clock
        self._release(strategy)
        steps = [times for marks in self._marked if (times := _times(marks, self._windows, clock)) is not None]
        steps = steps[: self.record_steps]
        reason = strategy.figures()["plain_ddp"]
        unseen = "" if reason is None else f" Gradients are no longer seen: {reason}; system='wfbp' shows them all."
        if not steps:
            rank_zero_warn(
                f"TraceRecorder has recorded no step of {self._batches}: a step must have one backward pass with all "
                f"gradients, and {self.skip_steps} steps are skipped.{unseen}"
            )
            return
        module = trainer.lightning_module
        device = (
            torch.cuda.get_device_name() if trainer.strategy.root_device.type == "cuda" else platform.machine() or "cpu"
        )
        source = (
            f"recorded: medians of {len(steps)} steps of rank 0 on {device} with torch {torch.__version__}, "
            f"{trainer.world_size} workers, system {strategy.system}"
        )
        self.trace = build_trace(type(module).__name__, self._windows[-1].layout, steps, source)
        if self.path is None:
            return
        with writing(self.path.parent):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.trace.save(self.path)
            rank_zero_info(f"TraceRecorder: {plural(len(steps), 'step')} written to {self.path}.{unseen}")

    def _release(self, strategy: EngineReadings) -> None:
        strategy.remove_observer(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._step = None

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy, SAFusionStrategy):
            self._release(trainer.strategy)


@dataclass
class _Marks:
    begin: Mark
    layers: list[tuple[str, Mark]] = field(default_factory=list)  # modules in the order in which they are entered
    before_backward: Mark = None
    end: Mark = None


@dataclass(frozen=True)
class StepTimes:
    """One step in seconds, without selection, exchange and decoding."""

    backward: np.ndarray  # between each gradient and the one before it, by place [L]
    layers: dict[str, float]  # forward pass of each module that has parameters, and of what follows it
    rest: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return float(self.backward.sum()) + sum(self.layers.values()) + self.rest


def _times(marks: _Marks, windows: Sequence[WindowEvents], clock: Clock) -> StepTimes | None:
    """The times of a step; None if it had not exactly one window with all gradients."""
    begin, end = clock.seconds(marks.begin), clock.seconds(marks.end)
    inside = [events for events in windows if begin < events.drained <= end]
    if len(inside) != 1 or marks.before_backward is None or np.isnan(inside[0].ready).any():
        return None
    before = clock.seconds(marks.before_backward)
    ready, stalls = inside[0].ready - before, 0.0
    if not inside[0].beside:
        for buffer in inside[0].buffers:  # selection between two gradients delays those after it
            stalls += buffer.issued - buffer.closed
            ready[buffer.places.stop :] -= buffer.issued - buffer.closed
    stalls += sum(buffer.exposed + buffer.decoded - buffer.arrived for buffer in inside[0].buffers)
    ready = np.maximum.accumulate(np.maximum(ready, 0.0))
    names = [name for name, _ in marks.layers] or [""]
    later = [clock.seconds(mark) for _, mark in marks.layers[1:]]  # the time before the first layer counts as its own
    layers = dict.fromkeys(names, 0.0)
    for name, (start, stop) in zip(names, pairwise([begin, *later, before]), strict=True):
        layers[name] += stop - start
    rest = max(0.0, end - before - stalls - float(ready[-1]))
    return StepTimes(np.diff(ready, prepend=0.0), layers, rest)


def build_trace(name: str, layout: Layout, steps: Sequence[StepTimes], source: str) -> Trace:
    """The medians of recorded steps as a trace, all of them scaled so that their sum is the median of the steps' sums.

    (A sum of medians is too small where times have long tails.) The forward pass of a layer is charged to that of its
    tensors whose gradient is ready last: it is needed first.

    Args:
        name: Of the job.
        layout: Its tensors in ready order.
        steps: At least one.
        source: Describes where the times come from.
    """
    backward = np.median([step.backward for step in steps], axis=0)
    forward = dict.fromkeys(range(len(layout)), 0.0)
    owners = [spec.name.rpartition(".")[0] for spec in layout.specs]
    lasts = {owner: place for place, owner in enumerate(owners)}
    for layer in dict.fromkeys(layer for step in steps for layer in step.layers):
        # parameters that belong to no recorded module, or are shared: charged to the first tensor of the forward pass
        place = lasts.get(layer, len(layout) - 1)
        forward[place] += median(step.layers.get(layer, 0.0) for step in steps)
    rest = median(step.rest for step in steps)
    parts = float(backward.sum()) + sum(forward.values()) + rest
    scale = median(step.seconds for step in steps) / parts if parts > 0 else 1.0
    tensors = tuple(
        TraceTensor(spec.name, spec.shape, float(backward[place]) * scale, forward[place] * scale)
        for place, spec in enumerate(layout.specs)
    )
    return Trace(name, tensors, rest * scale, source)
