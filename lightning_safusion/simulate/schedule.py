"""What a system makes of an iteration, where selection runs and which messages leave when, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lightning_safusion.simulate.cluster import CollectiveCost

Resource = Literal["compute", "select", "host", "bus", "link"]


@dataclass(frozen=True)
class Message:
    """One collective.

    Args:
        tensors: Places of the tensors in it; it leaves after the last of them.
        cost: Time and bytes on the link.
        select: Seconds of selection on the compute stream when its last tensor is ready.
        decode: Seconds of decoding, on the link's stream.
        settle: Second phase, which runs during the next forward pass (forward-coupled updates, DeAR).
        collectives: Collectives that it counts for.
    """

    tensors: tuple[int, ...]
    cost: CollectiveCost
    select: float = 0.0
    decode: float = 0.0
    settle: CollectiveCost | None = None
    collectives: int = 1


@dataclass(frozen=True)
class Planned:
    """Messages known before the iteration, the same on all workers, in the order of launch; a tensor may be in several
    that carry a part of it."""

    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Timer:
    """Whatever is ready on all workers at a tick of the clock is fused and sent (Horovod).

    One background thread agrees, fuses and waits for the exchange; there is no tick before it is done.

    Args:
        cost: ``places -> message`` of the tensors at those places.
        nbytes: Bytes that each tensor adds to a fused buffer, over all workers where it is gathered [L].
        cycle: Seconds between ticks.
        threshold: Largest buffer in bytes; a larger tensor is sent alone, 0 fuses nothing.
        negotiate: Seconds that a tick with tensors in the queue spends on agreement.
        launch: Seconds of the background thread for each buffer.
    """

    cost: Callable[[Sequence[int]], Message]
    nbytes: tuple[float, ...]
    cycle: float = 1e-3
    threshold: float = 128 * 2**20
    negotiate: float = 0.3e-3
    launch: float = 50e-6


@dataclass(frozen=True)
class Stream:
    """Buffers of a fixed capacity that every worker fills at its own pace (SAFusion, naive system).

    Args:
        entries: Mean entries that each tensor keeps [L].
        capacity: Entries that a buffer holds.
        cost: Of one round with full buffers, decoding included.
        spread: Relative standard deviation of what a worker keeps of a tensor: thresholds are estimated.
    """

    entries: tuple[float, ...]
    capacity: float
    cost: Message
    spread: float = 0.3


@dataclass(frozen=True)
class Ahead:
    """One collective of what the last iteration has left: it leaves before the forward pass, and is waited for after
    the backward pass (elastic averaging); ``update``: seconds of computation with its result."""

    cost: CollectiveCost
    update: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """What a system makes of an iteration.

    Args:
        launch: When messages leave.
        select: Seconds of selection of each tensor on the compute stream (before fusion) [L].
        host_select: Seconds of selection of each tensor on the host; 0 for tensors that stay on the device [L].
        engine: This package's engine sees every gradient, and drains at the end; else DDP has its own hook.
    """

    launch: Planned | Timer | Stream | Ahead
    select: tuple[float, ...]
    host_select: tuple[float, ...] | None = None
    engine: bool = True


class Interval(NamedTuple):
    """From ``begin`` to ``end`` seconds of an iteration a resource does one thing; worker 0's, where workers differ."""

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
