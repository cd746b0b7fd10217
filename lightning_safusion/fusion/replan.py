"""When to plan again."""

from __future__ import annotations

from typing import Any


class ReplanSchedule:
    """Counts windows and says when to plan again, and how large a gain is worth a change.

    Often and for small gains while the job warms up and its times are still settling, then rarely and for
    larger ones, so that noise changes nothing. The count is part of the checkpoint.

    Args:
        warmup_windows: Windows of the warm-up.
        warmup_every: Windows between two plans in the warm-up.
        warmup_threshold: Predicted gain that a change must exceed in the warm-up, share of the current finish.
        every: Windows between two plans afterwards.
        threshold: Predicted gain that a change must exceed afterwards.
        freeze_after: Windows after which the plan stays; ``None``: never.
    """

    def __init__(
        self,
        warmup_windows: int = 50,
        warmup_every: int = 5,
        warmup_threshold: float = 0.01,
        every: int = 50,
        threshold: float = 0.03,
        freeze_after: int | None = None,
    ) -> None:
        counts = {"warmup_every": warmup_every, "every": every}
        for name, value in counts.items():
            if value < 1:
                raise ValueError(f"{name} must be 1 window or more, got {value}")
        for name, value in {"warmup_windows": warmup_windows, "freeze_after": freeze_after or 0}.items():
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        for name, share in {"warmup_threshold": warmup_threshold, "threshold": threshold}.items():
            if not 0.0 <= share < 1.0:
                raise ValueError(f"{name} is a share in [0, 1), got {share}")
        self.warmup_windows = warmup_windows
        self.warmup_every = warmup_every
        self.warmup_threshold = warmup_threshold
        self.every = every
        self.steady_threshold = threshold
        self.freeze_after = freeze_after
        self.windows = 0

    @property
    def warming_up(self) -> bool:
        """Whether the window counted last belongs to the warm-up."""
        return self.windows <= self.warmup_windows

    @property
    def threshold(self) -> float:
        """Gain that a change must exceed now."""
        return self.warmup_threshold if self.warming_up else self.steady_threshold

    def advance(self) -> bool:
        """Counts a window that has ended.

        Returns:
            Whether to plan again before the next one.
        """
        self.windows += 1
        if self.freeze_after is not None and self.windows > self.freeze_after:
            return False
        if self.warming_up:
            return self.windows % self.warmup_every == 0
        return (self.windows - self.warmup_windows) % self.every == 0

    def state_dict(self) -> dict[str, Any]:
        """The count, with which a resumed run plans at the windows at which the interrupted one would have."""
        return {"windows": self.windows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        self.windows = int(state["windows"])
