"""How large the steps of Adam's kind are without their momentum, by density and by time."""

from __future__ import annotations

import math
from collections.abc import Callable

from lightning_safusion.fusion.engine import Engine
from lightning_safusion.integration.units import DENSE_WINDOWS

# Below one density steps are larger, by this power of how far it is below: an element that is sent moves for all the
# steps in which it was not.
_PACED_BELOW, _PACE = 0.05, 0.25
# After the dense windows steps begin at this share, and rise for so many windows: without the optimizer's momentum they
# are several times as large from one window to the next.
_FIRST_SHARE, _RISING = 0.25, 50
# Share of the optimizer's momentum that stays: all of it at density 1, falling with the logarithm to none at 4 %.
_NONE_KEPT_AT = 0.04


class Pace:
    """Steps of Adam's kind where elements are compared in units of the update (docs/convergence.md).

    Args:
        density: Share of the elements that a worker selected in the latest window.
        windows: So far.
    """

    def __init__(self, density: Callable[[], float], windows: Callable[[], int]) -> None:
        self._density, self._windows = density, windows

    @staticmethod
    def of(engine: Engine) -> Pace:
        """That of the engine's windows."""
        return Pace(lambda: engine.space.scattered * engine.space.quotas.density, lambda: engine.windows)

    @property
    def factor(self) -> float:
        """On the learning rate, once it has risen: with it the learning rate that serves dense training serves."""
        return max(1.0, (_PACED_BELOW / self._density()) ** _PACE)

    @property
    def kept(self) -> float:
        """Share of the optimizer's momentum that stays.

        The more often elements are sent, the more do steps without a momentum shake the weights; the less often, the
        less do they need one.
        """
        return max(0.0, 1.0 - math.log(self._density()) / math.log(_NONE_KEPT_AT))

    @property
    def now(self) -> float:
        """Factor on the learning rate of the step that follows the latest window."""
        risen = (self._windows() - DENSE_WINDOWS) / _RISING
        return self.factor * min(1.0, _FIRST_SHARE + (1.0 - _FIRST_SHARE) * risen)
