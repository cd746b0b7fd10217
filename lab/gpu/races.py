"""Streams that are held up at random, and an abandoned window: what only a device can get wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from lab.gpu.device import Device
from lab.gpu.figures import Figure, equal, note
from lab.gpu.jobs import Echo, Job, described, middle_shapes
from lab.gpu.stages import Setting
from lightning_safusion.comm.transport.interface import Work
from lightning_safusion.kernels.cuda import launch

_WINDOWS, _SETS = 200, 8
#: Most cycles of a delay, and how many of the possible places have one.
_DELAY, _SHARE = 400_000, 0.3
# Windows that are abandoned when half of the gradients have come.
_ABANDONED = (5, 60, 61, 150)
#: Of a loss.
SCALE = 1024.0


class Delays:
    """Holds up the current stream now and then.

    Args:
        place: Where.
        seed: Of the places and lengths.
    """

    def __init__(self, place: Device, seed: int) -> None:
        self._place, self._random = place, random.Random(seed)  # noqa: S311 - no secret
        self._launch = launch.launch

    def maybe(self) -> None:
        """A delay, or none."""
        if self._random.random() < _SHARE:
            self._place.hold(self._random.randrange(1, _DELAY))

    def launch(self, *arguments: Any, **constants: Any) -> None:
        """Takes the place of a launch."""
        self.maybe()
        self._launch(*arguments, **constants)


class _Sent:
    """An operation on a stream of its own.

    Args:
        event: Its end.
    """

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """See :meth:`Work.wait`."""
        torch.cuda.current_stream().wait_event(self._event)

    def on_done(self, callback: Callable[[float], None]) -> None:
        """See :meth:`Work.on_done`; as with NCCL, when it was enqueued."""
        callback(perf_counter())


class LateEcho(Echo):
    """An echo on a stream of its own, as NCCL has one, that may come late.

    Args:
        world_size: Workers.
        delays: Of its answers.
    """

    def __init__(self, world_size: int, delays: Delays) -> None:
        super().__init__(world_size)
        self._delays, self._stream = delays, torch.cuda.Stream()

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._delays.maybe()
            super().all_gather(output, tensor)
            return _Sent(self._stream.record_event())


@contextmanager
def beside(place: Device, apart: bool) -> Iterator[None]:
    """A stream of its own, which begins when the current one gets here; that waits for its end. In a rehearsal, or
    unless ``apart``, the current one."""
    if not (place.cuda and apart):
        yield
        return
    outer, inner = torch.cuda.current_stream(), torch.cuda.Stream()
    inner.wait_stream(outer)
    with torch.cuda.stream(inner):
        yield
    outer.wait_stream(inner)


def _trained(place: Device, how: str, windows: int) -> list[Tensor]:
    """The means of every window, and the residual at last.

    Args:
        place: The device.
        how: "late"; "serial"; "scaled" (fused kernels, and the host decides, of gradients that are :data:`SCALE` times
            as large); or "host" (which decides). Late windows get gradients on a stream of their own, as DDP's hooks
            run on that of its construction, and end on another, where autograd runs its callbacks.
        windows: So many.
    """
    delays, late = Delays(place, 7), how == "late"
    specs = described(middle_shapes(not place.cuda))
    transport = LateEcho(3, delays) if late and place.cuda else Echo(3)
    scale = SCALE if how == "scaled" else 1.0  # powers of two: exact
    job = Job(place, specs, transport, late or how == "serial", fused=how != "host", memory="residual")
    if how == "scaled":
        factor = torch.full((1,), scale, device=place.device)
        job.engine.loss_scale = lambda: factor
    generator = torch.Generator().manual_seed(1)
    sets = [torch.randn(job.numel, generator=generator).to(place.device).mul_(scale) for _ in range(_SETS)]
    plain, found = launch.launch, []

    def serial(*arguments: Any, **constants: Any) -> None:
        plain(*arguments, **constants)
        place.wait()

    launches = {"late": delays.launch, "serial": serial}
    replaced: Any = patch.object(launch, "launch", launches.get(how, plain))
    with replaced:
        for step in range(windows):
            job.engine.ending.finish()  # an abandoned window may still write
            with beside(place, late):
                for grad, part in zip(job.grads, sets[step % _SETS].split([s.numel for s in specs]), strict=True):
                    grad.copy_(part)
                if late:
                    delays.maybe()
                job.push(len(specs) // 2 if step in _ABANDONED else None)
            if step in _ABANDONED:
                job.engine.reset()
                continue
            if late:
                delays.maybe()
            job.engine.drain()
            found.append(torch.cat(job.grads) / scale)
        job.engine.settle()
    place.wait()
    return [*found, job.residual()]


def races(setting: Setting) -> Iterator[Figure]:
    """See ``docs/gpu.md``."""
    place = Device(setting.rehearse)
    windows = 8 if setting.rehearse else _WINDOWS
    others = {
        "serial": "one kernel at a time",
        "scaled": "a scaled loss, where the host decides",
        "host": "PyTorch's operations, where the host decides",
    }
    found = {how: _trained(place, how, windows) for how in ("late", *others)}
    for how, about in others.items():
        pairs = zip(found["late"], found[how], strict=True)
        wrong = [step for step, (ours, theirs) in enumerate(pairs) if not torch.equal(ours, theirs)]
        where = f"first in window {wrong[0]} of those that ended" if wrong else ""
        yield equal(f"{windows} windows with random delays equal those of {about}", not wrong, where)
    abandoned = sum(step < windows for step in _ABANDONED)
    yield note("of these abandoned when half of the gradients had come", abandoned)
