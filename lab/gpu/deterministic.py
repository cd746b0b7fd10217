"""What a one-element parameter adds to a window, and torch's deterministic algorithms."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lab.gpu.device import Device
from lab.gpu.figures import Figure
from lab.gpu.jobs import Echo, Job, described, shapes_of
from lab.gpu.stages import Setting


def deterministic(setting: Setting) -> Iterator[Figure]:
    """See ``docs/gpu.md``."""
    place, repetitions = Device(setting.rehearse), 1 if setting.rehearse else 10
    shapes, times = shapes_of(setting.rehearse), dict[str, float]()
    for name, own in (("without", shapes), ("with", [*shapes, (1,)])):
        job = Job(place, described(own), Echo(2))
        job.warm()
        times[name] = place.median(job.window, repetitions)
    yield Figure("a window with a one-element parameter, over one without", times["with"] / times["without"], most=1.1)
    for name, deferred in (("fused kernels", True), ("PyTorch's operations", False)):
        job = Job(place, described(shapes), Echo(2), deferred=deferred)
        job.warm()
        plain = place.median(job.window, repetitions)
        torch.use_deterministic_algorithms(True)
        try:
            job.window()
            slow = place.median(job.window, repetitions)
        finally:
            torch.use_deterministic_algorithms(False)
        yield Figure(f"{name}: deterministic algorithms over others", slow / plain, most=1.1 if deferred else 10.0)
