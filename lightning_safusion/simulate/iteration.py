"""What happened in one iteration on the clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Resource = Literal["compute", "select", "host", "bus", "link"]


class Interval(NamedTuple):
    """One stretch of time of one resource, of worker 0 where workers differ.

    Args:
        resource: Which one.
        label: What went on.
        begin: Seconds from the start of the iteration.
        end: Seconds from the start of the iteration.
    """

    resource: Resource
    label: str
    begin: float
    end: float


@dataclass(frozen=True)
class Iteration:
    """What happened in one iteration.

    Args:
        seconds: The whole iteration.
        compute: Forward, backward and optimizer of the trace alone.
        select: Selection on the compute stream of the busiest worker.
        nbytes: Bytes that one worker receives.
        node_bytes: Bytes that enter one node.
        collectives: Collectives.
        waited: Seconds that the mean worker waits for the slowest one before collectives can begin, summed over them.
        intervals: Worker 0's timeline and the link's.
        first_busy: Place of the first tensor after the last moment at which the link waited for a gradient.
        comparable: Whether the work of the processors counts, as far as the cluster knows what it costs. Not where
            buffers leave at ticks or fill at each worker's own pace: such an iteration comes out too short.
    """

    seconds: float
    compute: float
    select: float
    nbytes: float
    node_bytes: float
    collectives: int
    waited: float
    intervals: tuple[Interval, ...] = field(repr=False)
    first_busy: int = 0
    comparable: bool = True

    @property
    def exposed(self) -> float:
        """Seconds by which the exchange, selection and jitter make the iteration longer than the trace alone."""
        return self.seconds - self.compute
