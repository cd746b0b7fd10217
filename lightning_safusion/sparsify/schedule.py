"""Density schedules: which share of the gradient is sent at which point of the training."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


def check_density(density: float) -> float:
    """Returns ``density`` as a float if it is a share of elements that can be sent.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is outside (0, 1].
    """
    if isinstance(density, bool) or not isinstance(density, (int, float)):
        raise TypeError(f"density must be a number in (0, 1], got {density!r} of type {type(density).__name__}")
    if not 0 < density <= 1:
        raise ValueError(f"density must be in (0, 1], got {density}; 0.01 sends 1 % of the elements, 1 all of them")
    return float(density)


class DensitySchedule(ABC):
    """Density as a function of the training's progress. Pure: the same arguments give the same density on all ranks.

    Attributes:
        opens: Whether the first steps send more, by an :class:`Opening`. May be changed before training.
    """

    opens = False

    @abstractmethod
    def __call__(self, step: int, epoch: int) -> float:
        """Density of a step, in (0, 1], after ``step`` optimizer steps and ``epoch`` epochs."""

    def lasting(self) -> float | None:
        """The density that it comes to and keeps; None if it keeps none, or that is not known."""
        return None


class ConstantDensity(DensitySchedule):
    """The same density in every step.

    Args:
        density: Share of the elements that is sent, in (0, 1].
    """

    def __init__(self, density: float) -> None:
        self.density = check_density(density)

    def __call__(self, step: int, epoch: int) -> float:
        return self.density

    def lasting(self) -> float:
        return self.density


@dataclass(frozen=True)
class Opening:
    """Least density of the first steps: ``density`` for ``steps`` steps, later half of it after every ``half`` steps.

    It falls by half octaves, so that plans last a while. Chosen in ``docs/convergence.md``.

    Args:
        density: Of the first steps, in (0, 1].
        steps: How long it stays, about. Of a warm-up more steps (see
            :class:`~lightning_safusion.fusion.opening.FirstWindows`).
        half: Steps in which it halves.
    """

    density: float
    steps: int
    half: int

    def __call__(self, step: int) -> float:
        """Least density of a step, after ``step`` optimizer steps."""
        octaves = max(0, step - self.steps) / self.half
        return self.density * 2.0 ** (-round(2 * octaves) / 2)

    def lasts(self, density: float) -> int:
        """How many of the first steps send more than ``density``, in (0, 1]."""
        return next(step for step in itertools.count() if self(step) <= density)


#: Where elements are compared in units of the update: as long and as much as the optimizer's momentum is needed.
BY_UPDATE = Opening(0.35, 24, 20)
#: Elsewhere as long as the optimizer has the momentum: gradients change fast at first.
BY_GRADIENT = Opening(0.5, 50, 60)


class SuitedDensity(ConstantDensity):
    """A constant density that follows from the optimizers: what ``density=None`` stands for.

    2 % where the residual has a momentum (Adam and its kind), which ended level with dense training on the tasks that
    judge it (``docs/convergence.md``), 5 % with RAdam; 72 % with Muon; 25 % with optimizers that have another momentum
    than SGD's, such as Lion; 10 % with SGD and schedule-free optimizers.

    Attributes:
        density: 10 % until the optimizers are known: at less SGD's momentum would count as the residual's.
    """

    WITH_MOMENTUM, RECTIFIED, PLAIN, CAUTIOUS, ESTIMATED = 0.02, 0.05, 0.1, 0.25, 0.72

    def __init__(self) -> None:
        super().__init__(self.PLAIN)
        self.opens = True


class DGCWarmup(DensitySchedule):
    """Exponential warm-up by epochs (Lin et al., Deep Gradient Compression, ICLR 2018, section 3.3).

    With the defaults the densities of the paper: 0.25, 0.0625, 0.015625, 0.00390625, then ``density``.

    Args:
        density: Density after the warm-up, in (0, 1]; no warm-up epoch is below it.
        epochs: Length of the warm-up.
        coefficient: Ratio of successive densities, in (0, 1]. ``None`` spreads the warm-up evenly,
            ``density ** (1 / (epochs + 1))``, as the authors' code does.
        values: Densities of the warm-up epochs, one by one, instead of ``epochs`` and ``coefficient``.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        density: float = 0.001,
        epochs: int = 4,
        coefficient: float | None = 0.25,
        values: Sequence[float] | None = None,
    ) -> None:
        self.density = check_density(density)
        if epochs < 0:
            raise ValueError(f"epochs must not be negative, got {epochs}")
        if coefficient is not None and not 0 < coefficient <= 1:
            raise ValueError(f"coefficient must be in (0, 1], got {coefficient}")
        if values is None:
            ratio = density ** (1 / (epochs + 1)) if coefficient is None else coefficient
            values = [max(ratio ** (epoch + 1), self.density) for epoch in range(epochs)]
        self.values = tuple(check_density(value) for value in values)

    def __call__(self, step: int, epoch: int) -> float:
        return self.values[epoch] if epoch < len(self.values) else self.density

    def lasting(self) -> float:
        return self.density


class _Ramp(DensitySchedule):
    """From one density to another in a number of steps.

    Args:
        start: Density of step 0, in (0, 1].
        end: Density from step ``steps`` on, in (0, 1].
        steps: Length of the ramp, at least 1.
    """

    def __init__(self, start: float, end: float, steps: int) -> None:
        self.start, self.end, self.steps = check_density(start), check_density(end), _check_steps(steps)

    def lasting(self) -> float:
        return self.end


class LinearRamp(_Ramp):
    """From one density to another in a number of steps, in equal differences."""

    def __call__(self, step: int, epoch: int) -> float:
        done = min(step / self.steps, 1.0)
        return self.start * (1 - done) + self.end * done


class ExponentialRamp(_Ramp):
    """From one density to another in a number of steps, in equal ratios."""

    def __call__(self, step: int, epoch: int) -> float:
        done = min(step / self.steps, 1.0)
        # No power of start and end at the ends of the ramp, so that they come out exactly.
        return self.end if done == 1 else min(self.start * (self.end / self.start) ** done, 1.0)


class DenseStart(DensitySchedule):
    """Sends everything in the first steps, then follows another schedule.

    Args:
        density: What follows: a density or a schedule (which counts from the very first step).
        steps: Number of dense steps, at least 1.
    """

    def __init__(self, density: float | DensitySchedule, steps: int) -> None:
        self.schedule = resolve_density(density)
        self.steps = _check_steps(steps)

    def __call__(self, step: int, epoch: int) -> float:
        return 1.0 if step < self.steps else self.schedule(step, epoch)

    def lasting(self) -> float | None:
        return self.schedule.lasting()


def resolve_density(density: float | DensitySchedule) -> DensitySchedule:
    """Turns a density into a schedule that opens; a schedule is returned as it is.

    Raises:
        TypeError: If ``density`` is neither.
        ValueError: If it is outside (0, 1].
    """
    if isinstance(density, DensitySchedule):
        return density
    schedule = ConstantDensity(density)
    schedule.opens = True
    return schedule


def _check_steps(steps: int) -> int:
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    return steps
