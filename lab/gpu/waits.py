"""Every place where the host waits for the device, with the stack that leads there."""

from __future__ import annotations

import os
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from lab.gpu.device import Device
from lab.gpu.figures import Figure, note
from lab.gpu.jobs import Job, described, middle_shapes
from lab.gpu.stages import ROOT, Setting
from lightning_safusion.comm.transport.torch_backend import TorchTransport

_MESSAGE = "called a synchronizing CUDA operation"
_WINDOWS, _WARM = 6, 10  # between two reviews of shared quotas; the window after one reads what was counted
#: Frames of a stack that are shown, from the innermost of this repository on.
_FRAMES = 5

#: Jobs over NCCL with one worker; none makes the host wait.
JOBS: dict[str, dict[str, Any]] = {
    "default": {},
    "pooled quotas": {"quota": "pooled", "by_update": False},
    "a one-element parameter": {"scalar": True},
    "bf16 gradients": {"dtype": torch.bfloat16},
    "dense tensors": {"dense": (1, 4)},
    "collective='allreduce'": {"collective": "allreduce", "by_update": False, "memory": "residual"},
    "compressor='gaussiank'": {"compressor": "gaussiank"},
    "compressor='randomk'": {"compressor": "randomk"},
    "collective='sharded'": {"collective": "sharded"},
}


class Stacks:
    """Stacks of waits, and how often each was seen.

    Attributes:
        seen: Of those that PyTorch warns of.
        events: Of those for events and streams, of which it does not.
    """

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.events: Counter[str] = Counter()

    def noting(self, wait: Callable[[Any], None]) -> Callable[[Any], None]:
        """A wait for an event or a stream that is noted."""

        def noted(awaited: Any) -> None:
            self.events[_stack()] += 1
            wait(awaited)

        return noted

    def __call__(self, message: Any, *_: Any, **__: Any) -> None:
        """Takes the place of ``warnings.showwarning``."""
        if _MESSAGE in str(message):
            self.seen[_stack()] += 1


def _stack() -> str:
    """The innermost frames of this repository, the innermost first."""
    frames = [frame for frame in reversed(traceback.extract_stack()[:-2]) if frame.filename.startswith(str(ROOT))]
    places = (f"{os.path.relpath(f.filename, ROOT)}:{f.lineno} {f.line}" for f in frames)
    return "\n".join(islice(places, _FRAMES))


@contextmanager
def watched(place: Device) -> Iterator[Stacks]:
    """Inside, every wait that PyTorch knows of is noted; on the CPU there is none."""
    stacks = Stacks()
    with warnings.catch_warnings(), ExitStack() as replaced:
        warnings.simplefilter("always")
        warnings.showwarning = stacks
        if place.cuda:
            for awaited in (torch.cuda.Event, torch.cuda.Stream):
                wait = stacks.noting(awaited.synchronize)
                replaced.enter_context(patch.object(awaited, "synchronize", wait))
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield stacks
        finally:
            if place.cuda:
                torch.cuda.set_sync_debug_mode("default")


@contextmanager
def one_worker(place: Device) -> Iterator[TorchTransport]:
    """A process group of one, over NCCL."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder, "store")), 1)
        dist.init_process_group("nccl" if place.cuda else "gloo", store=store, rank=0, world_size=1)
        try:
            yield TorchTransport()
        finally:
            dist.destroy_process_group()


def _job(place: Device, transport: TorchTransport, given: dict[str, Any]) -> Job:
    options = dict(given)
    shapes = middle_shapes(not place.cuda) + ([(1,)] if options.pop("scalar", False) else [])
    specs = described(shapes, options.pop("dtype", torch.float32), options.pop("dense", ()))
    return Job(place, specs, transport, **options)


def _told(stacks: Counter[str]) -> str:
    return "\n\n".join(f"{number} x {stack}" for stack, number in stacks.items())


def waits(setting: Setting) -> Iterator[Figure]:
    """See ``docs/gpu.md``."""
    place = Device(setting.rehearse)
    windows, warm = (1, 3) if setting.rehearse else (_WINDOWS, _WARM)
    with one_worker(place) as transport:
        for name, given in JOBS.items():
            job = _job(place, transport, given)
            job.warm(warm)
            place.wait()
            with watched(place) as stacks:
                for _ in range(windows):
                    job.window()
                job.engine.settle()
            each, where = stacks.seen.total() / windows, _told(stacks.seen)
            yield Figure(f"waits of a window: {name}", each, most=0.0, note=where)
            yield note(f"waits for events: {name}", stacks.events.total() / windows, about=_told(stacks.events))
            place.wait()
            del job
