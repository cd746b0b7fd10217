"""The plan of an iteration under a system (which messages leave when, where selection runs), and its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_safusion.fusion.plans.ticking import Horovod
from lightning_safusion.tools.plan.cluster import CollectiveCost


@dataclass(frozen=True)
class Message:
    """One collective; times in seconds."""

    # places of its tensors; it leaves after the last of them. Without tensors it leaves before the forward pass and is
    # awaited after the backward pass (elastic averaging)
    tensors: Sequence[int]
    cost: CollectiveCost
    select: float = 0.0  # selection on the compute stream when its last tensor is ready
    # what has arrived is added up, and the worker computes nothing else; without tensors, computation after the
    # backward pass
    decode: float = 0.0
    commit: float = 0.0  # taking what was sent out of the residual, when all messages are there
    settle: CollectiveCost | None = None  # second phase, which runs during the next forward pass (DeAR)
    collectives: int = 1  # that it counts for

    @property
    def last(self) -> int:
        """Place of its last tensor, -1 without tensors."""
        return max(self.tensors, default=-1)


@dataclass(frozen=True)
class Timer:
    """Tensors that are ready on all workers at a tick of the clock are fused and sent (Horovod), by a thread that waits
    for the exchange; the next tick comes after that."""

    message: Callable[[Sequence[int]], Message]  # of the tensors at these places
    nbytes: Sequence[float]  # that each tensor adds to a fused buffer, over all workers where it is gathered [L]
    policy: Horovod  # its cycle, and the largest buffer
    negotiate: float = 0.3e-3  # seconds that a tick with tensors in the queue spends on agreement
    launch: float = 50e-6  # seconds of the background thread for each buffer


@dataclass(frozen=True)
class Stream:
    """Buffers of a fixed capacity that every worker fills at its own pace (SAFusion, naive system)."""

    entries: Sequence[float]  # mean of those that each tensor keeps [L]
    capacity: float  # entries that a buffer holds
    message: Message  # one round with full buffers
    # relative standard deviation of the entries that a worker keeps of a tensor: thresholds are estimated
    spread: float = 0.3


@dataclass(frozen=True)
class Schedule:
    """The plan of an iteration under one system; times in seconds."""

    # messages that are known before the iteration, the same on all workers; several may carry parts of one tensor.
    # Otherwise the rule by which they leave
    launch: Sequence[Message] | Timer | Stream
    select: Sequence[float] = ()  # selection from each tensor on the compute stream [L]; empty: none
    host_select: Sequence[float] = ()  # the same on the host; 0 for tensors that stay on the device [L]; empty: none
    engine: bool = True  # this package's engine sees every gradient, and drains at the end; else DDP has another hook
    end: float = 0.0  # in which the device ends a window, whatever its messages

    @property
    def messages(self) -> list[Message]:
        """The messages that are known before the iteration, in the order in which they leave."""
        known = () if isinstance(self.launch, Timer | Stream) else self.launch
        return sorted(known, key=lambda message: message.last)


@dataclass(frozen=True)
class Iteration:
    """The result of one iteration; times in seconds."""

    seconds: float  # all of it
    compute: float  # forward, backward and optimizer of the trace alone
    select: float  # selection on the compute stream
    # selection, packing, decoding and the end of the window: in which a worker does what it would not do without an
    # exchange
    device: float
    nbytes: float  # that one worker receives
    node_bytes: float  # that enter one node
    collectives: int
    waited: float  # that the mean worker waits for the slowest one before collectives can begin, summed over them
    first_busy: int = 0  # place of the first tensor after the last moment at which the link waited for a gradient

    @property
    def exposed(self) -> float:
        """Seconds by which the exchange, selection and jitter make the iteration longer than the trace alone."""
        return self.seconds - self.compute
