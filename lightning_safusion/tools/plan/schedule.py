"""The plan of an iteration under a system (which messages leave when, where selection runs), and its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_safusion.fusion.plans.ticking import Horovod
from lightning_safusion.tools.plan.cluster import CollectiveCost


@dataclass(frozen=True)
class Message:
    """One collective.

    Args:
        tensors: Places of its tensors; it leaves after the last of them. Without tensors it leaves before the forward
            pass and is awaited after the backward pass (elastic averaging).
        cost: Time and bytes on the link.
        select: Seconds of selection on the compute stream when its last tensor is ready.
        decode: Seconds in which what has arrived is added up, and the worker computes nothing else; without tensors, of
            computation after the backward pass.
        commit: Seconds of taking what was sent out of the residual, when all messages are there.
        settle: Second phase, which runs during the next forward pass (DeAR).
        collectives: Collectives that it counts for.
    """

    tensors: Sequence[int]
    cost: CollectiveCost
    select: float = 0.0
    decode: float = 0.0
    commit: float = 0.0
    settle: CollectiveCost | None = None
    collectives: int = 1

    @property
    def last(self) -> int:
        """Place of its last tensor, -1 without tensors."""
        return max(self.tensors, default=-1)


@dataclass(frozen=True)
class Timer:
    """Tensors that are ready on all workers at a tick of the clock are fused and sent (Horovod), by a thread that waits
    for the exchange; the next tick comes after that.

    Args:
        message: ``places -> message`` of the tensors at those places.
        nbytes: Bytes that each tensor adds to a fused buffer, over all workers where it is gathered [L].
        policy: Its cycle, and the largest buffer.
        negotiate: Seconds that a tick with tensors in the queue spends on agreement.
        launch: Seconds of the background thread for each buffer.
    """

    message: Callable[[Sequence[int]], Message]
    nbytes: Sequence[float]
    policy: Horovod
    negotiate: float = 0.3e-3
    launch: float = 50e-6


@dataclass(frozen=True)
class Stream:
    """Buffers of a fixed capacity that every worker fills at its own pace (SAFusion, naive system).

    Args:
        entries: Mean entries that each tensor keeps [L].
        capacity: Entries that a buffer holds.
        message: One round with full buffers.
        spread: Relative standard deviation of the entries that a worker keeps of a tensor: thresholds are estimated.
    """

    entries: Sequence[float]
    capacity: float
    message: Message
    spread: float = 0.3


@dataclass(frozen=True)
class Schedule:
    """The plan of an iteration under one system.

    Args:
        launch: Messages that are known before the iteration, the same on all workers; several may carry parts of one
            tensor. Otherwise the rule by which they leave.
        select: Seconds of selection from each tensor on the compute stream [L]; empty: none.
        host_select: Seconds of selection from each tensor on the host; 0 for tensors that stay on the device [L];
            empty: none.
        engine: This package's engine sees every gradient, and drains at the end; else DDP has another hook.
        end: Seconds that the device ends a window in, whatever its messages.
    """

    launch: Sequence[Message] | Timer | Stream
    select: Sequence[float] = ()
    host_select: Sequence[float] = ()
    engine: bool = True
    end: float = 0.0

    @property
    def messages(self) -> list[Message]:
        """The messages that are known before the iteration, in the order in which they leave."""
        known = () if isinstance(self.launch, Timer | Stream) else self.launch
        return sorted(known, key=lambda message: message.last)


@dataclass(frozen=True)
class Iteration:
    """The result of one iteration.

    Args:
        seconds: The whole iteration.
        compute: Forward, backward and optimizer of the trace alone.
        select: Selection on the compute stream.
        device: Selection, packing, decoding and the end of the window: all seconds in which a worker does what it would
            not do without an exchange.
        nbytes: Bytes that one worker receives.
        node_bytes: Bytes that enter one node.
        collectives: Collectives.
        waited: Seconds that the mean worker waits for the slowest one before collectives can begin, summed over them.
        first_busy: Place of the first tensor after the last moment at which the link waited for a gradient.
    """

    seconds: float
    compute: float
    select: float
    device: float
    nbytes: float
    node_bytes: float
    collectives: int
    waited: float
    first_busy: int = 0

    @property
    def exposed(self) -> float:
        """Seconds by which the exchange, selection and jitter make the iteration longer than the trace alone."""
        return self.seconds - self.compute
