"""When the first windows end, which send the most: all ranks decide it together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from lightning_safusion.comm.exchange import Notice
from lightning_safusion.fusion.window import Notices
from lightning_safusion.sparsify.schedule import Opening

# Share of a step that each step of a warm-up counts for at least: first windows end, whatever a schedule does.
_LEAST_SHARE = 0.05


class FirstWindows:
    """The least density of a window, by an :class:`Opening` whose clock follows the learning rate.

    A step of a warm-up counts by the share of the largest learning rate that it has, since networks leave their first
    plateau that much later; every other step counts in full. Ranks may disagree about that, so that the first to have
    counted enough tells all others in its messages, and all go on after the same window.

    Attributes:
        opening: Density by steps; None if the first windows send no more than others.
        rate: Share of the largest learning rate of the training, in [0, 1], that the coming step has.
    """

    def __init__(self) -> None:
        self.opening: Opening | None = None
        self.rate: Callable[[], float] = _whole
        self._steps = 0.0  # those of the warm-up by their share
        self._share = 0.0  # of the latest step while learning rates rise, 1 from then on
        self._began: int | None = None  # windows before the opening's step 0, once it is known when they end

    def density(self, windows: int) -> float:
        """Least density of the next window, after so many."""
        if self.opening is None:
            return 0.0
        return self.opening.density if self._began is None else self.opening(windows - self._began)

    def includes(self, window: int) -> bool:
        """Whether a window, by its number from 0, has the opening's first density."""
        return self.opening is not None and (self._began is None or window < self._began + self.opening.steps)

    def tell(self, notices: Notices) -> None:
        """Tells other ranks if the coming window is the last of the first ones."""
        if self._began is None and self.opening is not None:
            last = self._steps + max(self._share, _LEAST_SHARE) >= self.opening.steps
            notices.own |= Notice.OPENED if last else 0

    def count(self) -> None:
        """Counts a window, before its optimizer steps."""
        if self._began is None:
            share = self.rate() if self.opening is not None else 1.0
            self._share = share if share >= self._share else 1.0
            self._steps += max(self._share, _LEAST_SHARE)

    def hear(self, notices: Notices, windows: int) -> None:
        """Ends the first windows if some rank has said so in the latest of so many windows."""
        if notices.take(Notice.OPENED) and self._began is None and self.opening is not None:
            self._began = windows - self.opening.steps

    def state_dict(self) -> dict[str, Any]:
        """Plain values; those of rank 0 serve all."""
        return {"steps": self._steps, "share": self._share, "began": self._began}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores it."""
        self._steps, self._share, self._began = state["steps"], state["share"], state["began"]

    def ignore_rate(self) -> None:
        """Goes on as if there had been no warm-up: the clock counts windows."""
        self._began = 0


def are_first_windows(state: object) -> bool:
    """Whether it is a state of :class:`FirstWindows`."""
    if not isinstance(state, dict) or state.keys() != FirstWindows().state_dict().keys():
        return False
    steps, share, began = state["steps"], state["share"], state["began"]
    numbers = all(isinstance(each, float) and math.isfinite(each) for each in (steps, share))
    return numbers and steps >= 0 and 0 <= share <= 1 and (began is None or type(began) is int)


def _whole() -> float:
    return 1.0
