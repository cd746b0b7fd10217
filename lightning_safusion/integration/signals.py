"""Signals that ask a job to stop: deferred until all ranks are at the same step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from lightning.pytorch.plugins.environments import SLURMEnvironment

from lightning_safusion.comm.exchange import Notice

_Handler = Callable[[int, FrameType | None], Any]


class DeferredSignals:
    """Runs Lightning's signal handlers between two steps, on all ranks alike.

    Lightning's handlers save a checkpoint or broadcast: collectives, in the middle of whatever this rank was doing,
    while other ranks are elsewhere. A deferred signal is told to all ranks in the header of the next gradients, and
    every rank, signalled or not, runs its handler before the same batch. Where no gradients will follow for a while,
    the ranks ask each other.

    Args:
        tell: Called with a bit of ``Notice`` when a signal arrives.
        requeue_signal: The one on which the cluster environment saves and requeues; None if there is none.
    """

    def __init__(self, tell: Callable[[Notice], None], requeue_signal: int | None = None) -> None:
        self._tell = tell
        self._notices = {int(signal.SIGTERM): Notice.TERMINATE}
        if requeue_signal is not None:
            self._notices[int(requeue_signal)] = Notice.REQUEUE
        self._handlers: dict[int, _Handler] = {}
        self._waiting: set[int] = set()

    def install(self) -> None:
        """Takes the place of the handlers that are there now; of none outside the main thread, which alone may."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._notices:
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._hold)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._waiting.add(number)
        self._tell(self._notices[number])

    def deliver(self, heard: int) -> None:
        """Runs the handlers of the signals that some rank was sent."""
        for number, notice in self._notices.items():
            if heard & notice:
                self._waiting.discard(number)
                if number in self._handlers:
                    self._handlers[number](number, None)

    def remove(self, deliver: bool = True) -> None:
        """Puts the handlers back.

        Args:
            deliver: Run those whose signal has been told to nobody. Not where other ranks may be gone: handlers call
                collectives.
        """
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._hold:
                signal.signal(number, handler)
        waiting, self._waiting = self._waiting, set()
        for number in waiting if deliver else ():
            self._handlers[number](number, None)
        self._handlers = {}


def requeue_signal(environment: object) -> int | None:
    """The signal on which Lightning saves and requeues a Slurm job; None elsewhere."""
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        return environment.requeue_signal
    return None
