"""What one fit has done so far: which engines have come and gone, and how long a step takes."""

from __future__ import annotations

from collections import deque
from statistics import median
from time import perf_counter
from typing import Any

from lightning_safusion.announce import announce
from lightning_safusion.comm.transport.interface import during
from lightning_safusion.fusion.engine import Engine
from lightning_safusion.fusion.record import WindowRecord, nothing_exchanged
from lightning_safusion.fusion.replan import Decision

_STEPS = 15  # that the running median spans


class FitHistory:
    """What is known of one fit on this rank. Each re-wrapping of the model makes another engine.

    A step lasts from one batch that follows an exchange to the next, data loading and accumulated batches included.

    Attributes:
        decisions: Of the planners of engines that are gone, oldest first.
        last: The engine of a fit that has ended: it may still be saved.
        ended: The figures of a fit that has ended.
    """

    def __init__(self) -> None:
        self.decisions: tuple[Decision, ...] = ()
        self.last: Engine | None = None
        self.ended: dict[str, Any] | None = None
        self._windows = self._replans = 0  # of engines that are gone
        self._engine_step: int | None = None  # number of the latest window of an engine that is gone
        self._step_s: float | None = None  # median of the latest steps
        self._ddp_step_s: float | None = None  # the same step under DDP, as predicted at the latest review
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._asked = 0  # windows when the engine was asked whether it steps aside
        self._began: tuple[int, float] | None = None  # windows so far, and when the latest step began

    def __deepcopy__(self, memo: object) -> FitHistory:
        return self  # an engine cannot be copied; the next fit of the copy has a history of its own

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"last": None}  # nor does it leave its process

    def keep(self, engine: Engine) -> None:
        """Adds an engine that another one, or plain DDP, takes the place of."""
        self.decisions += tuple(engine.planner.decisions)
        self._windows, self._replans = engine.windows, self._replans + engine.planner.replans
        self._engine_step = self._engine_step if engine.record is None else engine.record.step

    def begin_batch(self, engine: Engine | None) -> None:
        """A batch begins; the user is told after the first review. Plain DDP changes nothing any more."""
        if engine is None:
            return
        now, windows = perf_counter(), engine.windows
        if self._began is not None and windows == self._began[0]:
            return  # among the batches of an accumulation
        # windows at first, before there is a plan, say nothing of those that follow
        planned = engine.record is not None and engine.record.planned
        if self._began is not None and windows == self._began[0] + 1 and planned:
            self._steps.append(now - self._began[1])
        self._began = windows, now
        review = engine.planner.latest
        if review is None or not self._steps:
            return
        first = self._step_s is None
        self._step_s = median(self._steps)
        self._ddp_step_s = max(0.0, self._step_s - review.seconds) + review.plain_ddp
        if first and engine.record is not None:
            announce(_outlook(engine, engine.record, self._step_s, self._ddp_step_s))

    def why_aside(self, engine: Engine) -> str | None:
        """Why plain DDP takes the engine's place, to follow a "because"; None unless all is dense and stays so."""
        # once after each window: never among the batches of an accumulation, whose gradients are in DDP's buckets
        if engine.windows == self._asked:
            return None
        self._asked = engine.windows
        with during(f"the change to plain DDP after step {engine.windows}"):
            if not engine.step_aside():
                return None
        steps = ""
        if self._step_s is not None and self._ddp_step_s is not None:
            steps = f": a step of {self._ddp_step_s * 1e3:.3g} ms, {self._step_s * 1e3:.3g} ms until now"
        return (
            f"its all-reduce has been predicted to be faster in several reviews{steps}; collective='allgather' keeps "
            "the exchange sparse, to look at it"
        )

    def figures(self, engine: Engine | None) -> dict[str, Any]:
        """Counters, seconds of a step, and figures of the latest step of an engine."""
        record = engine.record if engine is not None else None
        figures = nothing_exchanged() if record is None else record.as_dict()
        figures["last_engine_step"] = self._engine_step if record is None else record.step
        windows, replans = self._windows, self._replans
        if engine is not None:
            windows, replans = engine.windows, replans + engine.planner.replans
        times = {"step_s": self._step_s, "ddp_step_s": self._ddp_step_s}
        return {**times, **_slow_worker(engine), "windows": windows, "replans": replans, **figures}


def _slow_worker(engine: Engine | None) -> dict[str, Any]:
    slow = None if engine is None else engine.planner.slowest.slow
    if slow is None:
        return dict.fromkeys(("slow_rank", "waiting_s", "slow_since"))
    return {"slow_rank": slow.rank, "waiting_s": slow.waiting_s, "slow_since": slow.since}


def _outlook(engine: Engine, record: WindowRecord, step_s: float, ddp_step_s: float) -> str:
    lasting = engine.density.lasting()
    later = ", fewer later" if lasting is not None and lasting < engine.space.quotas.density else ""
    share = record.bytes_sent / max(1, 4 * record.layout.numel)
    return (
        f"a step takes {step_s * 1e3:.3g} ms, under DDP a predicted {ddp_step_s * 1e3:.3g} ms; "
        f"{share:.2%} of the bytes of fp32 gradients are sent{later}"
    )
