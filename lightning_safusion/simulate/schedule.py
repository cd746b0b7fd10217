"""What a system makes of an iteration: where selection runs, and which messages leave when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_safusion.simulate.cluster import CollectiveCost


@dataclass(frozen=True)
class Message:
    """One collective.

    Args:
        tensors: Places of the tensors in it; it leaves after the last of them.
        cost: Time and bytes on the link.
        select: Seconds of selection on the compute stream when its last tensor is ready (sparsification behind fusion).
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
    """Messages known before the iteration, the same on all workers.

    Args:
        messages: In the order of launch; each tensor in one of them, or in several that carry a part of it.
    """

    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Timer:
    """Whatever is ready on all workers at a tick of the clock is fused and sent (Horovod).

    One background thread agrees, fuses and waits for the exchange; there is no tick before it is done.

    Args:
        cost: ``places -> message`` of the tensors at those places.
        nbytes: Bytes that each tensor adds to a fused buffer, over all workers where it is gathered [L].
        cycle: Seconds between ticks.
        threshold: Largest buffer in bytes; a larger tensor travels alone, 0 fuses nothing.
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
    """One collective of what the last iteration has left behind: it leaves before the forward pass, and is waited for
    after the backward pass (elastic averaging).

    Args:
        cost: Time and bytes on the link.
        update: Seconds of computation with its result.
    """

    cost: CollectiveCost
    update: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """What a system makes of an iteration.

    Args:
        launch: When messages leave.
        select: Seconds of selection of each tensor on the compute stream (ahead of fusion) [L].
        host_select: Seconds of selection of each tensor on the host; 0 for tensors that stay on the device [L].
        engine: This package's engine sees every gradient, and drains at the end; else DDP has its own hook.
    """

    launch: Planned | Timer | Stream | Ahead
    select: tuple[float, ...]
    host_select: tuple[float, ...] | None = None
    engine: bool = True
