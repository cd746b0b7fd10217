"""What the workers tell the process that shows it, and what a finished training amounts to."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from lightning_safusion.demo.model import WIDTHS


@dataclass(frozen=True)
class Settings:
    """One demo, the same for all its rows.

    Args:
        systems: The rows, in order: names of systems, with options.
        density: Share of the gradient elements that a worker sends, in (0, 1].
        epochs: Passes over the training images.
        workers: Processes that train together.
        seed: Seed of the split, the batches and the initial weights.
        batch_size: Images per worker and step.
        widths: Channels of the network's stages.
        lr: Learning rate.
    """

    systems: tuple[str, ...]
    density: float = 0.05
    epochs: int = 20
    workers: int = 2
    seed: int = 0
    batch_size: int = 32
    widths: tuple[int, ...] = WIDTHS
    lr: float = 0.01


@dataclass(frozen=True)
class StepDone:
    """A step has ended on the first worker.

    Args:
        loss: Training loss of that worker's batch.
        seconds: Wall time of the step.
        exposed_s: Seconds of it during which nothing but the exchange was going on.
        bytes_sent: Bytes that one worker handed to the network.
        density: Share of the gradient elements that was sent.
        tensors: Gradient tensors exchanged.
        tensors_missing: How many of them had not one element sent.
    """

    loss: float
    seconds: float
    exposed_s: float
    bytes_sent: float
    density: float
    tensors: int
    tensors_missing: float


# What a worker tells of its training: a step, or the validation accuracy after an epoch.
Event = StepDone | float


@dataclass
class History:
    """All that one row has reported, and the figures of the table."""

    system: str
    steps: list[StepDone] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Takes the next event of this row."""
        if isinstance(event, StepDone):
            self.steps.append(event)
        else:
            self.accuracies.append(event)

    @property
    def missing_share(self) -> float:
        """Share of all (tensor, step) pairs in which a tensor had not one element sent."""
        return sum(step.tensors_missing for step in self.steps) / max(1, sum(step.tensors for step in self.steps))

    def median(self, figure: str) -> float:
        """Median of a figure of the steps; the first one opens connections, and a system may send it dense."""
        return median(getattr(step, figure) for step in self.steps[1:] or self.steps)
