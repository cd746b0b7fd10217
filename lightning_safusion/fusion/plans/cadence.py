"""When plans are reviewed. Pure: all ranks decide alike."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TypedDict

from typing_extensions import Unpack


class CadenceOptions(TypedDict, total=False):
    """The arguments of :class:`Cadence`, as its users took them one by one before they took a cadence."""

    warmup_windows: int
    warmup_every: int
    warmup_threshold: float
    every: int
    threshold: float
    trial_windows: int
    freeze_after: int | None


@dataclass(frozen=True)
class Cadence:
    """How often plans are reviewed, and how large a gain is worth a change.

    Often and for small gains in the warm-up, while times still change; then rarely and for more, above the noise.

    Args:
        warmup_windows: Windows of the warm-up.
        warmup_every: Windows between two reviews in the warm-up.
        warmup_threshold: Predicted gain that a change must exceed in the warm-up, share of the current finish.
        every: Windows between two reviews afterwards.
        threshold: Predicted gain that a change must exceed afterwards.
        trial_windows: Windows after a change that are compared with as many before it. An even number, by default,
            sees as many of both kinds where two kinds of window alternate.
        freeze_after: Windows after which the plan stays; ``None``: never.
        on_trial: A new plan must promise more than the threshold, and keep its promise by the clock. False: what the
            policy proposes at a review is used, as in published planners that plan once.

    Raises:
        ValueError: If a number is out of range.
    """

    warmup_windows: int = 50
    warmup_every: int = 5
    warmup_threshold: float = 0.01
    every: int = 50
    threshold: float = 0.03
    trial_windows: int = 6
    freeze_after: int | None = None
    on_trial: bool = True

    @classmethod
    def once(cls, windows: int) -> Cadence:
        """One plan from what the first ``windows`` windows have measured, and no other."""
        return cls(warmup_windows=windows, warmup_every=windows, freeze_after=windows, on_trial=False)

    @classmethod
    def of(cls, owner: str, cadence: Cadence | None, **options: Unpack[CadenceOptions]) -> Cadence:
        """The given cadence, the default one, or one of the options that ``owner`` was given in its place.

        Raises:
            TypeError: If both are given.
        """
        if not options:
            return cadence or cls()
        names = ", ".join(options)
        if cadence is not None:
            raise TypeError(f"{owner} has a cadence, and {names} as well: give these to the Cadence")
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        warnings.warn(
            f"{names} of {owner} will go with the next release: write {owner}(cadence=Cadence({given}))",
            DeprecationWarning,
            stacklevel=3,
        )
        return cls(**options)

    def __post_init__(self) -> None:
        for name in ("warmup_every", "every", "trial_windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 window or more, got {getattr(self, name)}")
        for name in ("warmup_windows", "freeze_after"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("warmup_threshold", "threshold"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} is a share in [0, 1), got {getattr(self, name)}")


class ReplanSchedule:
    """Counts windows, and decides when to plan again."""

    def __init__(self, cadence: Cadence | None = None) -> None:
        self.cadence = cadence or Cadence()
        self.windows = 0  #: counted; part of the checkpoint, so that a resumed run plans after the same windows

    @property
    def threshold(self) -> float:
        """Gain that a change must exceed after the window counted last."""
        warming_up = self.windows <= self.cadence.warmup_windows
        return self.cadence.warmup_threshold if warming_up else self.cadence.threshold

    @property
    def over(self) -> bool:
        """Whether no plan may be proposed after the window counted last."""
        return self.cadence.freeze_after is not None and self.windows > self.cadence.freeze_after

    def advance(self) -> bool:
        """Counts a window that has ended; returns whether to plan again before the next one."""
        due = self.due_within(1)
        self.windows += 1
        return due

    def due_within(self, windows: int) -> bool:
        """Whether a review follows one of the next ``windows`` windows."""
        cadence, last = self.cadence, self.windows + windows
        if cadence.freeze_after is not None:
            last = min(last, cadence.freeze_after)
        if last <= self.windows:
            return False
        return self._reviews(last) > self._reviews(self.windows)

    def _reviews(self, windows: int) -> int:
        cadence = self.cadence
        early = min(windows, cadence.warmup_windows)
        return early // cadence.warmup_every + (windows - early) // cadence.every
