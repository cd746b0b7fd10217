"""The end of a window where the host decides: it waits for every buffer, reads what all ranks said, and acts on it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_safusion.comm.exchange import Notice, Verdict, all_finite, saturated
from lightning_safusion.comm.transport import Transport
from lightning_safusion.fusion.buffer import FusionBuffer
from lightning_safusion.fusion.generator import Generator, unscaled
from lightning_safusion.fusion.plan import Group
from lightning_safusion.fusion.ranges import profiler_range
from lightning_safusion.fusion.window import BufferTimes, Window

# Elements that share an all-reduce where gradients are averaged in place: latency counts for no more than these bytes.
_TOGETHER = 1 << 18


@dataclass(frozen=True)
class Rounding:
    """What a narrow gradient could not hold of the mean; it goes back into the memory.

    Args:
        start: First element in the flat space.
        stop: Behind the last.
        error: float32 [stop - start].
    """

    start: int
    stop: int
    error: Tensor


class Scratch:
    """Zeros to decode into: the same memory for all buffers of one stream.

    Args:
        device: Where it lives.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.zeros(0, device=device)

    def of(self, buffer: FusionBuffer) -> Tensor:
        """float32 [N], or empty if the buffer needs none; whoever takes them leaves zeros behind."""
        numel = buffer.stop - buffer.start if buffer.exchange.uses_scratch else 0
        if len(self._memory) < numel:
            self._memory = torch.zeros(numel, device=self._memory.device)
        return self._memory[:numel]

    def release(self) -> None:
        """Frees the memory."""
        self._memory = self._memory[:0].clone()


class Drain:
    """Gives the means of a complete window back, and takes what was sent out of the memory.

    Args:
        generator: Made the buffers.
        transport: Communicator of the buffers.
    """

    def __init__(self, generator: Generator, transport: Transport) -> None:
        self.generator = generator
        self.transport = transport
        self._scratch = Scratch(generator.device)
        self._warned = False

    def release(self) -> None:
        """Frees what only speeds up the next window."""
        self._scratch.release()

    def run(self, window: Window) -> tuple[bool, int]:
        """Ends a window.

        Returns:
            Whether it ended well: what was sent has been taken out of the memory. And the notices (bits of ``Notice``)
            of all ranks. The same on all ranks.

        Raises:
            RuntimeError: If a peer is lost (with the buffer's tensors), or a rank could not fill its message.
        """
        repairs: list[int] = []
        notices = 0
        good = self._forgets_skipped(window)
        errors: list[Rounding] = []
        for buffer, times in window.inflight:
            verdict, finite = self._receive(window, buffer, times, errors)
            notices |= verdict.notices
            good &= finite and not verdict.bad.any()
            first = buffer.group.start
            repairs += [first + int(t) for t in np.flatnonzero(verdict.irregular(self.transport.world_size))]
            window.unused += [first + int(t) for t in np.flatnonzero(verdict.raw)]
        if notices & Notice.FAILED:
            return False, notices
        good &= self._repair(window, repairs)
        if good:
            self._commit(window, repairs, errors)
        return good, notices

    def _forgets_skipped(self, window: Window) -> bool:
        """Under a loss scaler, takes the gradients of a step that it will skip out of the memory again; else True.

        DDP throws such a step away. Kept, the gradients of several skipped steps (scalers begin with some) would reach
        the optimizer at once. What was held back before stays, sent or not.
        """
        if window.scale is None:
            return True
        for buffer, _ in window.inflight:
            self._wait(window, buffer)
        if not any(buffer.exchange.verdict().bad.any() for buffer, _ in window.inflight):
            return True
        for place in np.flatnonzero(window.fresh & ~window.raw).tolist():
            grad = window.grads_of(Group(place, place + 1))[0]
            if all_finite(grad):  # what is not was never added
                self.generator.memory.withdraw(place, unscaled([grad], window.scale)[0])
        window.raw |= window.fresh  # nothing of them is left to withdraw
        return False

    def _wait(self, window: Window, buffer: FusionBuffer) -> None:
        try:
            buffer.exchange.wait()
        except Exception as error:
            raise lost(self.generator, buffer, window, error) from error

    def _receive(
        self, window: Window, buffer: FusionBuffer, times: BufferTimes, errors: list[Rounding]
    ) -> tuple[Verdict, bool]:
        times.awaited = window.mark()
        self._wait(window, buffer)
        times.arrived = window.mark()
        if self.transport.stream_ordered:
            times.finished = times.arrived  # no later than this: the backend only tells when it was queued
        with profiler_range("decode", self.generator, buffer):
            try:
                verdict, finite = self._decode(window, buffer, errors)
            except ValueError as error:  # a message is damaged
                raise lost(self.generator, buffer, window, error) from error
        times.decoded = window.mark()
        return verdict, finite

    def _decode(self, window: Window, buffer: FusionBuffer, errors: list[Rounding]) -> tuple[Verdict, bool]:
        verdict = buffer.exchange.verdict() if self._plain(window, buffer) else None
        if verdict is not None and verdict.is_regular(self.transport.world_size) and not verdict.bad.any():
            finite = buffer.exchange.decode_into(window.grads_of(buffer.group))
            if finite is not None:
                return verdict, finite
        scratch = self._scratch.of(buffer)
        mean = buffer.exchange.decode(scratch)
        finite = buffer.exchange.is_finite(mean)
        verdict = buffer.exchange.verdict() if verdict is None else verdict
        if verdict.bad.any():
            buffer.exchange.poison(mean, torch.from_numpy(verdict.bad).to(mean.device))
        regular = None
        if not verdict.is_regular(self.transport.world_size):
            regular = (verdict.fresh > 0) & ~verdict.irregular(self.transport.world_size)
        mean = self.generator.memory.received(buffer.start, buffer.stop, mean)
        errors += deliver(window, buffer, mean, regular)
        buffer.exchange.release(scratch)
        return verdict, finite

    def _plain(self, window: Window, buffer: FusionBuffer) -> bool:
        """Whether the decoded mean itself is what the gradients get, as it is, and no device has to be waited for."""
        on_host = buffer.exchange.device.type == "cpu"
        return on_host and window.scale is None and buffer.exact and self.generator.memory.hands_on

    def _repair(self, window: Window, places: Sequence[int]) -> bool:
        """Averages gradients as DDP does, outside the compressed path, in place; their residuals stay as they were.

        Returns:
            Whether they are finite.
        """
        if not places:
            return True
        self._warn(places)
        grads = [window.grads_of(Group(place, place + 1))[0] for place in places]
        for place, grad in zip(places, grads, strict=True):
            # what is not finite was never added
            if window.fresh[place] and not window.raw[place] and all_finite(grad):
                added = grad if window.scale is None else unscaled([grad], window.scale)[0]
                self.generator.memory.withdraw(place, added)
        self._average(grads)
        return all(map(all_finite, grads))

    def average(self, window: Window) -> bool:
        """Ends a window of which nothing was launched, as DDP does: in place, without buffers and without the memory.

        Returns:
            Whether all gradients are finite; True where the host does not wait to know it.
        """
        present = np.ones(window.length, bool)
        if not window.deferred:
            fresh = torch.from_numpy(window.fresh).to(self.generator.device, torch.float32)
            self.transport.all_reduce(fresh).wait()
            present = fresh.cpu().numpy() > 0
        grads = []
        for place in np.flatnonzero(present).tolist():
            grads += window.grads_of(Group(place, place + 1))
            if not window.fresh[place]:
                grads[-1].zero_()
        self._average(grads)
        return window.deferred or all(map(all_finite, grads))

    def _average(self, grads: Sequence[Tensor]) -> None:
        """Writes the means over ranks into the gradients."""
        sent = []
        for few in _pieces(grads):
            flat = few[0] if len(few) == 1 else torch.cat(few)
            flat.mul_(1.0 / self.transport.world_size)
            sent.append((few, flat, self.transport.all_reduce(flat)))
        for few, flat, work in sent:
            work.wait()
            if len(few) > 1:
                torch._foreach_copy_(few, list(flat.split([len(grad) for grad in few])))

    def _warn(self, places: Sequence[int]) -> None:
        if self._warned or self.transport.rank != 0:
            return
        self._warned = True
        names = self.generator.layout.names(places)
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        warnings.warn(
            f"{len(names)} tensors ({shown}) were computed on some ranks only, or computed again before their "
            "optimizer stepped; such gradients travel dense. In manual optimization, toggle_optimizer and "
            "untoggle_optimizer keep tensors out of backward passes whose gradients are thrown away, and "
            "`with trainer.strategy.model.no_sync():` around all but the last backward pass of a step accumulates "
            "without sending.",
            stacklevel=2,
        )

    def _commit(self, window: Window, repairs: Sequence[int], errors: Iterable[Rounding]) -> None:
        for buffer, _ in window.inflight:
            withdrawn = [p - buffer.group.start for p in repairs if p in buffer.places and not window.raw[p]]
            self.generator.commit(buffer, withdrawn)
            self._settle(buffer, [p for p in repairs if p in buffer.places])
        for rounding in errors:
            self.generator.memory.add(rounding.start, rounding.stop, rounding.error)

    def _settle(self, buffer: FusionBuffer, repaired: Sequence[int]) -> None:
        """Keeps what was received, but for tensors that went round again."""
        edges, start = self.generator.layout.edges, buffer.start
        for place in sorted(repaired):
            self.generator.memory.settle(start, int(edges[place]))
            start = int(edges[place + 1])
        self.generator.memory.settle(start, buffer.stop)


def _pieces(grads: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one type that are small together; a large one alone, so that it need not be copied."""
    few: list[Tensor] = []
    numel = 0
    for grad in grads:
        if few and (grad.dtype != few[0].dtype or numel + grad.numel() > _TOGETHER):
            yield few
            few, numel = [], 0
        few.append(grad)
        numel += grad.numel()
    if few:
        yield few


def deliver(window: Window, buffer: FusionBuffer, mean: Tensor, chosen: np.ndarray | None = None) -> list[Rounding]:
    """Copies the mean into the gradients of a buffer.

    Args:
        window: Holds the gradients.
        buffer: The buffer.
        mean: Floating [N].
        chosen: bool [T], tensors to write; None writes all.

    Returns:
        What narrow gradients cannot hold.
    """
    means, targets = list(mean.split(buffer.sizes)), window.grads_of(buffer.group)
    places = list(range(len(targets)))
    if chosen is not None:
        places = np.flatnonzero(chosen).tolist()
        means, targets = [means[t] for t in places], [targets[t] for t in places]
    if not places:
        return []
    if window.scale is not None:
        means = list(torch._foreach_mul(means, window.scale))
    if not buffer.narrow:
        torch._foreach_copy_(targets, means)
        return []
    torch._foreach_copy_(targets, [saturated(m, g.dtype) for m, g in zip(means, targets, strict=True)])
    edges = buffer.exchange.spec.edges
    errors = []
    for t, exact, held in zip(places, means, targets, strict=True):
        if held.itemsize < mean.itemsize:
            error = exact - held if window.scale is None else unscaled([exact - held], window.scale)[0]
            errors.append(Rounding(buffer.start + edges[t], buffer.start + edges[t + 1], error))
    return errors


def lost(generator: Generator, buffer: FusionBuffer, window: Window, error: Exception) -> RuntimeError:
    """The error of an exchange that failed, with the names of its tensors."""
    names = generator.layout.names(buffer.places)
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return RuntimeError(
        f"rank {generator.pool.transport.rank}: the exchange of the buffer with {shown} failed in step {window.step}: "
        f"{error}"
    )
