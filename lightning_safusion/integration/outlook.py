"""How long a step takes, and would take under DDP: a line after the first review, and two figures."""

from __future__ import annotations

from collections import deque
from statistics import median
from time import perf_counter

from lightning_safusion.fusion.engine import Engine

_STEPS = 15  # that the running median spans


class Outlook:
    """Follows the steps of one fit on this rank.

    A step lasts from one batch that follows an exchange to the next, data loading and accumulated batches included.

    Attributes:
        step_s: Median of the latest steps, in seconds; None before there is a review.
        ddp_step_s: The same step with the gradients averaged by DDP, as predicted at the latest review; None before.
    """

    def __init__(self) -> None:
        self.step_s: float | None = None
        self.ddp_step_s: float | None = None
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._began: tuple[int, float] | None = None  # windows so far, and when the latest step began

    def begin_batch(self, engine: Engine | None) -> str | None:
        """A batch begins; returns a line for the user after the first review.

        Args:
            engine: Of this rank; None with plain DDP, which changes nothing any more.
        """
        if engine is None:
            return None
        now, windows = perf_counter(), engine.windows
        if self._began is not None and windows == self._began[0]:
            return None  # among the batches of an accumulation
        # windows at first, before there is a plan, say nothing of those that follow
        planned = engine.record is not None and engine.record.planned
        if self._began is not None and windows == self._began[0] + 1 and planned:
            self._steps.append(now - self._began[1])
        self._began = windows, now
        review = engine.planner.latest
        if review is None or not self._steps:
            return None
        first = self.step_s is None
        self.step_s = median(self._steps)
        self.ddp_step_s = max(0.0, self.step_s - review.seconds) + review.plain_ddp
        return self._line(engine) if first else None

    def _line(self, engine: Engine) -> str | None:
        record = engine.record
        if record is None or self.step_s is None or self.ddp_step_s is None:
            return None
        lasting = engine.density.lasting()
        later = ", fewer later" if lasting is not None and lasting < engine.space.quotas.density else ""
        share = record.bytes_sent / max(1, 4 * record.layout.numel)
        return (
            f"a step takes {self.step_s * 1e3:.3g} ms, under DDP a predicted {self.ddp_step_s * 1e3:.3g} ms; "
            f"{share:.2%} of the bytes of fp32 gradients are sent{later}"
        )
