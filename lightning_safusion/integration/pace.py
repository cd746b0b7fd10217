"""How large the steps of Adam's kind are without their momentum, by density."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from torch import Tensor
from torch.optim import Optimizer

from lightning_safusion.fusion.engine import Engine

# Densities are those of two workers. Below one of them steps are larger, by this power of how far it is below: an
# element that is sent moves for all the steps in which it was not.
_PACED_BELOW, _PACE = 0.05, 0.25
# Share of the optimizer's momentum that stays: all of it at density 1, falling with the logarithm to none at 4 %.
_NONE_KEPT_AT = 0.04
# In the first steps, while networks leave their first plateau. Then it falls slowly: with a momentum of 0.9 a training
# comes to where curvature is up to 19 times what steps without one bear (Cohen et al., Adaptive Gradient Methods at the
# Edge of Stability, 2022).
_KEPT_AT_FIRST = 0.95


class Pace:
    """Steps of Adam's kind where elements are compared in units of the update (docs/convergence.md).

    They depend on the share of the elements that moves in a window: with many workers each selects others.

    Args:
        density: Share of the elements that a worker selected in the latest window.
        first: 1 if that was one of the first windows, which send the most, then less, and at last 0.
        workers: Whose selections all workers receive.
    """

    def __init__(
        self, density: Callable[[], float], first: Callable[[], float] = lambda: 0.0, workers: int = 2
    ) -> None:
        self._density, self._first, self._workers = density, first, workers

    @staticmethod
    def of(engine: Engine) -> Pace:
        """That of the engine's windows."""
        space, first = engine.space, engine.first_windows
        # owners select again, and deliver as many elements with few workers as with many
        workers = engine.transport.world_size if space.scattered == 1 else 2
        return Pace(
            lambda: space.scattered * space.quotas.density,
            lambda: first.fading(engine.windows - 1) if engine.density.opens else 0.0,
            workers,
        )

    def of_two(self, density: float) -> float:
        """Density at which two workers move as many elements as all workers do at another."""
        return 1.0 - (1.0 - density) ** (self._workers / 2)

    def factor_at(self, density: float) -> float:
        """On the learning rate at a density: with it the learning rate that serves dense training serves."""
        return max(1.0, (_PACED_BELOW / self.of_two(density)) ** _PACE)

    @property
    def factor(self) -> float:
        """On the learning rate after the latest window."""
        return self.factor_at(self._density())

    @property
    def kept(self) -> float:
        """Share of the optimizer's momentum that stays.

        The more often elements move, the more do steps without a momentum shake the weights; the less often, the
        less do they need one.
        """
        lasting = max(0.0, 1.0 - math.log(self.of_two(self._density())) / math.log(_NONE_KEPT_AT))
        return lasting + self._first() * max(0.0, _KEPT_AT_FIRST - lasting)


def risen(optimizers: Iterable[Optimizer]) -> float:
    """Share of the largest learning rate of the training that the coming step has, in [0, 1].

    The largest is what schedulers write into an optimizer's groups: ``max_lr`` of ``OneCycleLR``, else ``initial_lr``,
    from which ``LinearLR`` and ``LambdaLR`` take shares. Without a scheduler, and where another device has the learning
    rate, it is the present one.
    """
    shares = [
        float(rate) / largest
        for optimizer in optimizers
        for group in optimizer.param_groups
        if not isinstance(rate := group["lr"], Tensor) or rate.is_cpu
        if (largest := max(float(rate), *(float(group.get(name, 0.0)) for name in ("initial_lr", "max_lr")))) > 0
    ]
    return max(shares, default=1.0)
