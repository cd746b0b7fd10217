"""Time that passes when a test says so."""

from __future__ import annotations

import threading

import pytest

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
