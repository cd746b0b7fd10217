"""Time that passes when a test says so: a clock, and layers, selections and messages that take a known time of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_safusion import Segments, Selection, TopK
from lightning_safusion.comm.transport.interface import Work
from lightning_safusion.comm.transport.torch_backend import TorchTransport
from lightning_safusion.fusion.events import Clock


class SimulatedTime(threading.local):
    """A host's clock, whose seconds are those that its thread has slept: workers in threads do not share it."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += max(0.0, seconds)

    def rule(self, monkeypatch: pytest.MonkeyPatch) -> SimulatedTime:
        """Lets the host's clock tell this time."""
        monkeypatch.setattr(Clock, "mark", staticmethod(self.now))
        return self


#: That of all that follows.
TIME = SimulatedTime()


class Sleep(torch.autograd.Function):
    """Takes so many seconds in the forward pass, and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        TIME.sleep(forward)
        ctx.seconds = backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        TIME.sleep(ctx.seconds)
        return grads[0], None, None


class SlowTopK(TopK):
    """Takes ``seconds`` for every selection."""

    seconds = 0.03

    def select(self, x: Tensor, segments: Segments, step: int) -> Selection:
        TIME.sleep(self.seconds)
        return super().select(x, segments, step)


class Delayed:
    """A collective that ends at a known time."""

    def __init__(self, work: Work, end: float) -> None:
        self.work, self.end = work, end

    def wait(self) -> None:
        self.work.wait()
        TIME.sleep(self.end - TIME.now())

    def on_done(self, callback: Callable[[float], None]) -> None:
        callback(self.end)


def slow_messages(end: Callable[[], float]) -> None:
    """Every all-gather of this process, which is forked for one training, ends when ``end`` says at its start."""
    Clock.mark = staticmethod(TIME.now)  # type: ignore[method-assign]
    gather = TorchTransport.all_gather

    def slow(self: TorchTransport, output: Tensor, tensor: Tensor) -> Work:
        return Delayed(gather(self, output, tensor), end())

    TorchTransport.all_gather = slow  # type: ignore[method-assign]
