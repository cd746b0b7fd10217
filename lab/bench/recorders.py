"""What a step costs a worker, recorded: of a job without any exchange, of the engine in that job, of collectives."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lab.bench.collectives import time_collectives
from lab.clock.costs import QueuedTimes
from lightning_safusion.comm.transport.torch_backend import default_transport
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.events import BufferEvents, Clock, WindowEvents
from lightning_safusion.fusion.layout import Layout, specs_from_parameters
from lightning_safusion.fusion.plans.pricing import GroupPricer
from lightning_safusion.strategy import SAFusionStrategy

# Tensors in a buffer, in turns, which separates the costs of a buffer, of its elements and of a step. From one to all
# (the largest number), since some systems have as many buffers as tensors and others have one.
_TOUR = (8, 1, sys.maxsize, 4, 64, 16)


@dataclass(frozen=True)
class FloorStep:
    """A step without any exchange. Every time is a pair: seconds, and those for which the thread had a core.

    Args:
        ready: From the start of the backward pass to each gradient, in the order of the gradients [L, 2].
        layers: Forward pass of each module that has parameters, with what follows it [2].
        rest: From the last gradient to the end of the step [2].
    """

    ready: np.ndarray
    layers: dict[str, np.ndarray]
    rest: np.ndarray

    @property
    def parts(self) -> np.ndarray:
        """Forward pass, backward pass and rest [3, 2]."""
        return np.array([sum(self.layers.values()), self.ready[-1], self.rest])


@dataclass(frozen=True)
class FloorRecord:
    """The steps of a job without any exchange, and its tensors in the order of the gradients."""

    name: str
    layout: Layout
    steps: tuple[FloorStep, ...]


def _now() -> tuple[float, float]:
    """Seconds of the clock, and seconds for which this thread has had a core."""
    return time.perf_counter(), time.thread_time()


class FloorRecorder(Callback):
    """Records the steps of a job without any exchange.

    Args:
        pipe: Takes a :class:`FloorRecord` after the last step.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._ready: list[tuple[Tensor, tuple[float, float]]] = []
        self._layers: list[tuple[str, tuple[float, float]]] = []
        self._begin = self._before_backward = (0.0, 0.0)
        self._steps: list[FloorStep] = []
        self._handles: list[RemovableHandle] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for param in pl_module.parameters():
            if param.requires_grad:
                self._handles.append(param.register_post_accumulate_grad_hook(self._arrives))
        for name, module in pl_module.named_modules():
            if any(param.requires_grad for param in module.parameters(recurse=False)):
                self._handles.append(module.register_forward_pre_hook(partial(self._enters, name)))

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _arrives(self, param: Tensor) -> None:
        self._ready.append((param, _now()))

    def _enters(self, name: str, module: nn.Module, inputs: Any) -> None:
        self._layers.append((name, _now()))

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._ready, self._layers = [], []
        self._begin = _now()

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._before_backward = _now()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        end, ready = np.array(_now()), np.array([moment for _, moment in self._ready])
        # what comes before the first layer counts as its own
        starts = np.array([self._begin, *(moment for _, moment in self._layers[1:]), self._before_backward])
        layers: dict[str, np.ndarray] = {}
        for (name, _), spent in zip(self._layers or [("", self._begin)], np.diff(starts, axis=0), strict=True):
            layers[name] = layers.get(name, 0.0) + spent
        self._steps.append(FloorStep(ready - self._before_backward, layers, end - ready[-1]))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        names: dict[Tensor, str] = {param: name for name, param in pl_module.named_parameters()}
        layout = Layout(specs_from_parameters([(names[param], param) for param, _ in self._ready]))
        self._pipe.send(FloorRecord(type(pl_module).__name__, layout, tuple(self._steps)))


class BufferCost(NamedTuple):
    """What a buffer holds and sends, and what it costs: seconds of selection, packing and launch, and of decoding."""

    tensors: int
    elements: int
    entries: int
    nbytes: int
    select: float
    decode: float


@dataclass(frozen=True)
class EngineStep:
    """A step with the engine, in seconds of a core.

    Args:
        number: Of the step.
        buffers: Those that were sparse.
        backward: From the start of the backward pass to the last gradient, selections included.
        drain: From there until gradients and memory were final, decoding included.
        rest: From there to the end of the step.
        others: All threads but that of the backward pass, in the whole step.
    """

    number: int
    buffers: tuple[BufferCost, ...]
    backward: float
    drain: float
    rest: float
    others: float


@dataclass(frozen=True)
class EngineRecord:
    """Steps with the engine, and the collectives of the group, if they were timed."""

    steps: tuple[EngineStep, ...]
    collectives: dict[str, QueuedTimes]


class ProcessorClock(Clock):
    """Records how long this thread has had a core, in place of the time."""

    @override
    def mark(self) -> float:
        return time.thread_time()


class EngineRecorder(Callback):
    """Records what a step costs the host with buffers of several sizes in turns, and at last times the collectives.

    Costs are seconds for which the thread had a core: the simulator adds the waiting.

    Args:
        pipe: Brings after training, when no team trains, whether to time the collectives; takes an
            :class:`EngineRecord`.
        every: Steps with buffers of one size.
    """

    def __init__(self, pipe: Connection, every: int) -> None:
        self._pipe = pipe
        self._every = every
        self._engine: Engine | None = None
        self._events: WindowEvents | None = None
        self._begin = self._before_backward = self._process = 0.0
        self._number = 0  # of the step, over all epochs
        self._steps: list[EngineStep] = []

    def observe(self, events: WindowEvents) -> None:
        """Records the events of a window."""
        self._events = events

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, SAFusionStrategy) or strategy.engine is None:
            raise RuntimeError("nothing to calibrate: plain DDP exchanges the gradients. Give a density below 1.")
        strategy.add_observer(self)
        self._engine = strategy.engine
        self._engine.clock = ProcessorClock()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        engine = self._engine
        if engine is not None and self._number % self._every == 0 and engine.order_known:
            total, each = len(engine.space.layout), _TOUR[self._number // self._every % len(_TOUR)]
            pricer = GroupPricer(engine.planner.costs(engine.space.shape))
            plan = pricer.plan([*range(each, total, each), total])
            engine.planner.use(plan, engine.space.shape)
        self._events, self._process, self._begin = None, time.process_time(), time.thread_time()

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._before_backward = time.thread_time()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        end, process, events = time.thread_time(), time.process_time(), self._events
        number, self._number = self._number, self._number + 1
        if events is None or np.isnan(events.ready).any():
            return
        last = float(events.ready.max())
        self._steps.append(
            EngineStep(
                number,
                tuple(_costs(buffer) for buffer in events.buffers if buffer.collective == "allgather"),
                last - self._before_backward,
                events.drained - last,
                end - events.drained,
                process - self._process - (end - self._begin),
            )
        )

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        collectives: dict[str, QueuedTimes] = {}
        if self._pipe.recv():
            transport = default_transport()
            collectives = time_collectives(transport)
            transport.close()
        self._pipe.send(EngineRecord(tuple(self._steps), collectives))


def _costs(buffer: BufferEvents) -> BufferCost:
    selected, decoded = buffer.issued - buffer.closed, buffer.decoded - buffer.arrived
    return BufferCost(len(buffer.places), buffer.elements, buffer.capacity, buffer.bytes_sent, selected, decoded)
