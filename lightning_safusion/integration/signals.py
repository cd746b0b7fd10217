"""Signals that ask a job to stop: deferred until all ranks are at the same step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from lightning.pytorch.plugins.environments import ClusterEnvironment, SLURMEnvironment

from lightning_safusion.comm.exchange import Notice
from lightning_safusion.comm.transport.interface import Transport, during
from lightning_safusion.fusion.engine import Engine

_Handler = Callable[[int, FrameType | None], Any]
# A second Ctrl-C comes no earlier: launchers such as torchrun pass on the one that the terminal has sent to all.
_SAME_S = 1.0
_HELD = b"\nCtrl-C: training stops at the end of this step, on all workers. Once more: at once.\n"


class DeferredSignals:
    """Runs Lightning's signal handlers between two steps, on all ranks alike.

    Lightning's handlers save a checkpoint or broadcast: collectives, in the middle of whatever this rank was doing,
    while other ranks are elsewhere. A deferred signal is a notice in the header of the next gradients, and every rank,
    signalled or not, runs its handler before the same batch. A second Ctrl-C does not wait for that. Where no gradients
    follow for a while, as in validation, the ranks compare their notices, and Lightning's handlers are put back.

    Args:
        engine: The engine at present; None with plain DDP.
        environment: The cluster environment, which may save and requeue on a signal.
    """

    def __init__(self, engine: Callable[[], Engine | None], environment: ClusterEnvironment | None = None) -> None:
        self._engine = engine
        self._notices = {int(signal.SIGTERM): Notice.TERMINATE, int(signal.SIGINT): Notice.INTERRUPT}
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue and environment.requeue_signal:
            self._notices[int(environment.requeue_signal)] = Notice.REQUEUE
        self._handlers: dict[int, _Handler] = {}
        self._waiting: dict[int, float] = {}  # when each signal came that no handler has seen

    def __deepcopy__(self, memo: object) -> DeferredSignals:
        return self  # handlers are those of the process

    def install(self) -> None:
        """Takes the place of the present handlers. Only the main thread may, and only an engine sends notices."""
        if self._engine() is None or threading.current_thread() is not threading.main_thread():
            return
        for number in self._notices:
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._hold)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        before, engine = self._waiting.setdefault(number, now), self._engine()
        if number == signal.SIGINT and before + _SAME_S < now:
            self._handlers[number](number, frame)
            return
        if engine is not None:
            if number == signal.SIGINT and before == now and engine.transport.rank == 0:
                os.write(2, _HELD)  # a handler may have interrupted what else writes
            engine.notices.own |= self._notices[number]

    def deliver(self) -> None:
        """Runs the handlers of the signals whose notices have reached all ranks."""
        engine = self._engine()
        if engine is None:
            return
        heard = engine.notices.take()
        for number, notice in self._notices.items():
            if heard & notice:
                self._waiting.pop(number, None)
                self._handle(number)

    def ask(self) -> None:
        """Delivers also those whose notices no gradients have carried yet. Collective."""
        engine = self._engine()
        if engine is None:
            return
        engine.settle()  # notices of the last window may still be on the device
        with during(f"epoch {engine.epoch}, when workers ask each other for signals, after step {engine.windows}"):
            for notices in engine.transport.gather_objects(engine.notices.own):
                engine.notices.hear(notices)
        self.deliver()

    def release(self) -> None:
        """Leaves signals to Lightning while no gradients are exchanged. Collective."""
        self._put_back()  # first: what comes from now on is Lightning's, and what came before is asked for
        self.ask()
        self._forget()

    def hand_over(self, transport: Transport) -> None:
        """Leaves signals to Lightning where no engine is left. Collective."""
        self._put_back()
        with during("the change to plain DDP, when workers ask each other for signals"):
            heard = {number for numbers in transport.gather_objects(list(self._waiting)) for number in numbers}
        for number in sorted(heard):
            self._handle(number)
        self._forget()

    def remove(self) -> None:
        """Puts the handlers back, and runs none: other ranks may be gone, and handlers call collectives."""
        self._put_back()
        self._forget()

    def _handle(self, number: int) -> None:
        if number in self._handlers:
            self._handlers[number](number, None)
        elif number == signal.SIGINT:  # ignored here: the others end all the same
            raise KeyboardInterrupt

    def _put_back(self) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._hold:
                signal.signal(number, handler)

    def _forget(self) -> None:
        self._handlers, self._waiting = {}, {}
