"""What a strategy tells of itself, across the engines of a fit."""

from __future__ import annotations

from typing import Any

from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.record import nothing_exchanged
from lightning_safusion.fusion.replan import Decision


class History:
    """Decisions, counters and the last report, which outlive the engine that made them.

    Args:
        system: Name of the system.
    """

    def __init__(self, system: str) -> None:
        self._system = system
        self.begin()

    def begin(self) -> None:
        """A fit begins."""
        self._ended: dict[str, Any] | None = None  # report of a fit that has ended
        self._decisions: tuple[Decision, ...] = ()
        self._windows = self._replans = 0

    def keep(self, engine: Engine) -> None:
        """Keeps what is told of an engine that another one, or plain DDP, takes the place of."""
        self._decisions += tuple(engine.planner.decisions)
        self._windows, self._replans = engine.windows, self._replans + engine.planner.replans

    def end(self, engine: Engine | None, plain_ddp: str | None) -> None:
        """A fit has ended."""
        self._ended = self.report(engine, plain_ddp)
        if engine is not None:
            self.keep(engine)

    def decisions(self, engine: Engine | None) -> tuple[Decision, ...]:
        """The planner's decisions, oldest first."""
        return self._decisions + (tuple(engine.planner.decisions) if engine is not None else ())

    def report(self, engine: Engine | None, plain_ddp: str | None) -> dict[str, Any]:
        """Figures of the latest step; see :meth:`SAFusionStrategy.report`."""
        if self._ended is not None:
            return self._ended
        counted = {"windows": self._windows, "replans": self._replans}
        if engine is not None:
            counted = {"windows": engine.windows, "replans": self._replans + engine.planner.replans}
        record = engine.report if engine is not None else None
        figures = record.as_dict() if record is not None else nothing_exchanged()
        return {"system": self._system, "plain_ddp": plain_ddp, **counted, **figures}
