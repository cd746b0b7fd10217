"""Device time of other ways to send less, over the gradients of BERT-base, beside a window of the engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from lab.gpu.device import Device
from lab.gpu.figures import Figure, note
from lab.gpu.jobs import DENSITY, Echo, Job, described, shapes_of
from lab.gpu.stages import Setting
from lab.gpu.waits import one_worker

# Of DDP's buckets.
_BUCKET_BYTES = 25 << 20
_RANK = 4


@dataclass
class Bucket:
    """What torch's hooks read of a bucket of DDP.

    Args:
        number: Of it.
        shapes: Of its tensors.
        flat: float32 [N], their gradients.
        last: There is none after it.
    """

    number: int
    shapes: Sequence[tuple[int, ...]]
    flat: Tensor
    last: bool

    def index(self) -> int:
        return self.number

    def buffer(self) -> Tensor:
        return self.flat

    def is_last(self) -> bool:
        return self.last

    def gradients(self) -> list[Tensor]:
        parts = self.flat.split([math.prod(shape) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


def buckets_of(shapes: Sequence[tuple[int, ...]], device: torch.device) -> list[Bucket]:
    """As DDP makes them, the last tensors first."""
    groups: list[list[tuple[int, ...]]] = [[]]
    for shape in reversed(shapes):
        if 4 * sum(map(math.prod, groups[-1])) >= _BUCKET_BYTES:
            groups.append([])
        groups[-1].append(shape)
    generator = torch.Generator(device).manual_seed(29)
    numbers = [sum(map(math.prod, group)) for group in groups]
    flats = [torch.randn(number, device=device, generator=generator) for number in numbers]
    return [Bucket(i, *pair, i == len(groups) - 1) for i, pair in enumerate(zip(groups, flats, strict=True))]


def _hooked(hook: Callable[[Any, Any], Any], state: Any, buckets: Sequence[Bucket]) -> Callable[[], None]:
    """One step of a hook."""

    def step() -> None:
        for future in [hook(state, bucket) for bucket in buckets]:
            future.wait()

    return step


def rivals(setting: Setting) -> Iterator[Figure]:
    """See ``docs/gpu.md``."""
    place, repetitions = Device(setting.rehearse), 1 if setting.rehearse else 15
    shapes = shapes_of(setting.rehearse)
    with one_worker(place):
        buckets = buckets_of(shapes, place.device)
        flats = [bucket.flat for bucket in buckets]
        fresh = [bucket.flat.clone() for bucket in buckets]
        targets = [torch.empty_like(bucket.flat) for bucket in buckets]
        gradients = [gradient.flatten().abs() for bucket in buckets for gradient in bucket.gradients()]
        counts = [max(1, int(DENSITY * gradient.numel())) for gradient in gradients]
        power = PowerSGDState(None, _RANK, start_powerSGD_iter=2)
        ways: dict[str, Callable[[], object]] = {
            "a copy": lambda: torch._foreach_copy_(targets, flats),
            "torch's bf16 hook": _hooked(bf16_compress_hook, dist.group.WORLD, buckets),
            f"torch's PowerSGD hook, rank {_RANK}": _hooked(powerSGD_hook, power, buckets),
            "torch.topk of each tensor": lambda: [g.topk(k) for g, k in zip(gradients, counts, strict=True)],
        }
        for name, work in ways.items():
            for _ in range(4):
                work()
            seconds = place.median(work, repetitions, lambda: torch._foreach_copy_(flats, fresh))
            yield note(name, seconds * 1e3, "ms", "selection alone: nothing is written or sent" * ("topk" in name))
    for world_size in (2, 8):
        job = Job(place, described(shapes), Echo(world_size))
        job.settle(3) if setting.rehearse else job.settle()
        seconds = place.median(job.window, repetitions, job.refresh)
        yield note(f"a window of the engine, {world_size} workers", seconds * 1e3, "ms", "from gradients to means")
