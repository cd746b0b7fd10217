"""Every compressor through PyTorch's operations: selection from a model's tensors, and a message, against a copy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from lab.gpu.device import Device
from lab.gpu.figures import Figure, note
from lab.gpu.jobs import shapes_of
from lab.gpu.stages import Setting
from lab.gpu.waits import watched
from lab.selection import per_tensor
from lightning_safusion.comm.wire.codec import Codec
from lightning_safusion.comm.wire.formats import resolve_codec
from lightning_safusion.sparsify import Segments, Sparsifier, available_sparsifiers, resolve_sparsifier

_DENSITY, _WIRE = 0.01, "auto"


def selection(setting: Setting) -> Iterator[Figure]:
    """See ``docs/gpu.md``."""
    place, repetitions = Device(setting.rehearse), 1 if setting.rehearse else 10
    shapes = shapes_of(setting.rehearse)
    numel = sum(map(math.prod, shapes))
    x = torch.randn(numel, device=place.device, generator=torch.Generator(place.device).manual_seed(0))
    target = torch.empty_like(x)
    copy = place.median(lambda: target.copy_(x), repetitions)
    yield note("a copy", copy * 1e3, "ms", f"{len(shapes)} tensors, {numel / 1e6:.1f} M elements")
    for name in available_sparsifiers():
        sparsifier = resolve_sparsifier(name)
        segments = per_tensor(sparsifier, shapes, _DENSITY)
        codec = resolve_codec(_WIRE, numel, segments.capacity, torch.float32)
        out = torch.empty(codec.nbytes, dtype=torch.uint8, device=place.device)
        work = partial(_send, sparsifier, segments, codec, x, out)
        work()  # constants reach the device
        place.wait()
        with watched(place) as stacks:
            work()
        about = "\n\n".join(stacks.seen)
        yield Figure(f"{name}: waits", stacks.seen.total(), most=0, note=about)
        yield note(f"{name}: selection and message", place.median(work, repetitions) / copy, "copies")


def _send(sparsifier: Sparsifier, segments: Segments, codec: Codec, x: Tensor, out: Tensor) -> None:
    codec.encode(sparsifier.select(x, segments, 0), out)
