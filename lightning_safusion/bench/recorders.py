"""Callbacks that record what a step costs a worker: of a job without any exchange, and of the engine in that job."""

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
from typing_extensions import override

from lightning_safusion.bench.collectives import time_collectives
from lightning_safusion.comm.transport.torch_backend import default_transport
from lightning_safusion.fusion.clock import HostClock
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.events import BufferEvents, WindowEvents
from lightning_safusion.fusion.plans.pricing import GroupPricer
from lightning_safusion.simulate.measured import CollectiveTimes
from lightning_safusion.strategy import SAFusionStrategy

#: Tensors in a buffer, in turns: costs of a buffer are told from costs of its elements, and from those of a step. From
#: one to all (the largest number), since some systems have as many buffers as tensors and others have one.
TOUR = (8, 1, sys.maxsize, 4, 64, 16)


class Moment(NamedTuple):
    """When a thread got somewhere: seconds of the clock on the wall, and seconds of a core that the thread has had."""

    seconds: float
    processor: float

    @classmethod
    def now(cls) -> Moment:
        return cls(time.perf_counter(), time.thread_time())

    def __sub__(self, other: Moment) -> Moment:
        return Moment(self.seconds - other.seconds, self.processor - other.processor)


@dataclass(frozen=True)
class FloorStep:
    """A step without any exchange.

    Args:
        ready: From the start of the backward pass to each gradient, in the order of ``names``.
        layers: Forward pass of each module that has parameters, with what follows it.
        rest: From the last gradient to the end of the step.
        whole: All of the step.
    """

    ready: tuple[Moment, ...]
    layers: dict[str, Moment]
    rest: Moment
    whole: Moment


@dataclass(frozen=True)
class FloorRecord:
    """The steps of a job without any exchange, and names and shapes of its tensors by the order of the gradients."""

    name: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    steps: tuple[FloorStep, ...]


class FloorRecorder(Callback):
    """Records the steps of a job without any exchange; its pipe takes a :class:`FloorRecord` after the last one."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._names: list[str] = []
        self._ready: list[Moment] = []
        self._layers: list[tuple[str, Moment]] = []
        self._begin = self._before_backward = Moment(0.0, 0.0)
        self._steps: list[FloorStep] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, param in pl_module.named_parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(partial(self._arrives, name))
        for name, module in pl_module.named_modules():
            if any(param.requires_grad for param in module.parameters(recurse=False)):
                module.register_forward_pre_hook(partial(self._enters, name))

    def _arrives(self, name: str, param: Tensor) -> None:
        self._names.append(name)
        self._ready.append(Moment.now())

    def _enters(self, name: str, module: nn.Module, inputs: Any) -> None:
        self._layers.append((name, Moment.now()))

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._names, self._ready, self._layers = [], [], []
        self._begin = Moment.now()

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._before_backward = Moment.now()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        end, before = Moment.now(), self._before_backward
        layers: dict[str, Moment] = {}
        starts = [self._begin, *(moment for _, moment in self._layers[1:]), before]
        for (name, _), start, stop in zip(self._layers or [("", before)], starts, starts[1:], strict=False):
            known = layers.get(name, Moment(0.0, 0.0))
            layers[name] = Moment(known[0] + stop[0] - start[0], known[1] + stop[1] - start[1])
        ready = tuple(moment - before for moment in self._ready)
        self._steps.append(FloorStep(ready, layers, end - self._ready[-1], end - self._begin))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        shapes = {name: tuple(param.shape) for name, param in pl_module.named_parameters()}
        tensors = tuple((name, shapes[name]) for name in self._names)
        self._pipe.send(FloorRecord(type(pl_module).__name__, tensors, tuple(self._steps)))


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
    """A step with the engine; processor seconds of the thread of the backward pass.

    Args:
        number: Of the step.
        buffers: Of each that was sparse.
        forward: Up to the backward pass.
        backward: From there to the last gradient, selections included.
        drain: From there until gradients and memory were final, decoding included.
        rest: From there to the end of the step.
        process: All threads of the process, in the whole step.
    """

    number: int
    buffers: tuple[BufferCost, ...]
    forward: float
    backward: float
    drain: float
    rest: float
    process: float

    @property
    def thread(self) -> float:
        """Seconds of the thread of the backward pass, in the whole step."""
        return self.forward + self.backward + self.drain + self.rest


@dataclass(frozen=True)
class EngineRecord:
    """Steps with the engine, and the collectives of the group, timed after the last step if that was asked for."""

    steps: tuple[EngineStep, ...]
    collectives: dict[str, CollectiveTimes]


class ProcessorClock(HostClock):
    """Records how long this thread has had a core, in place of the time."""

    @override
    def mark(self) -> float:
        return time.thread_time()


class EngineRecorder(Callback):
    """Records what a step costs the host with buffers of several sizes in turns, and at last times the collectives.

    Costs are seconds for which the thread had a core: what it waits for, and whom, is the simulator's to find out.

    Args:
        pipe: Brings a sign when the machine is free, after training; takes an :class:`EngineRecord`.
        every: Steps with buffers of one size.
        collectives: Time them.
    """

    def __init__(self, pipe: Connection, every: int, collectives: bool) -> None:
        self._pipe = pipe
        self._every = every
        self._collectives = collectives
        self._controller: Engine | None = None
        self._events: WindowEvents | None = None
        self._begin = self._before_backward = self._process = 0.0
        self._steps: list[EngineStep] = []

    def observe(self, events: WindowEvents) -> None:
        """Takes in a window."""
        self._events = events

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, SAFusionStrategy) or strategy.controller is None:
            raise TypeError(f"costs of the engine are recorded with SAFusionStrategy, got {strategy!r}")
        strategy.add_observer(self)
        self._controller = strategy.controller
        self._controller.clock = ProcessorClock()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        controller = self._controller
        if controller is not None and batch_idx % self._every == 0 and controller.order_known:
            total, each = len(controller.space.layout), TOUR[batch_idx // self._every % len(TOUR)]
            pricer = GroupPricer(controller.planner.costs(controller.space.shape))
            controller.use(pricer.plan([*range(each, total, each), total]))
        self._events, self._process, self._begin = None, time.process_time(), time.thread_time()

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._before_backward = time.thread_time()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        end, process, events = time.thread_time(), time.process_time(), self._events
        if events is None or np.isnan(events.ready).any():
            return
        last = float(events.ready.max())
        self._steps.append(
            EngineStep(
                batch_idx,
                tuple(_costs(buffer) for buffer in events.buffers if buffer.collective == "allgather"),
                self._before_backward - self._begin,
                last - self._before_backward,
                events.drained - last,
                end - events.drained,
                process - self._process,
            )
        )

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pipe.recv()  # until the other teams have done all their turns
        collectives: dict[str, CollectiveTimes] = {}
        if self._collectives:
            transport = default_transport()
            collectives = time_collectives(transport)
            transport.close()
        self._pipe.send(EngineRecord(tuple(self._steps), collectives))


def _costs(buffer: BufferEvents) -> BufferCost:
    selected, decoded = buffer.issued - buffer.closed, buffer.decoded - buffer.arrived
    return BufferCost(len(buffer.places), buffer.elements, buffer.capacity, buffer.bytes_sent, selected, decoded)
