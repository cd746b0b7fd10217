"""From measured times and counted work to the file of a device's costs, which the simulator reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from lab.gpu.device import Device as Place
from lab.gpu.jobs import DENSITY
from lightning_safusion.tools.plan.device import Device
from lightning_safusion.tools.plan.work import END, Span, Work, commitment, decoding, selection

# Integer operations of a multiprocessor in a clock: as in lightning_safusion.tools.plan.device.
_PER_CLOCK = 64
_SLEEP, _SHORT = 20_000_000, 200
_LEAST = 1e-9  # seconds: no time is negative


def counted(sizes: Sequence[Sequence[int]], workers: int) -> dict[str, Work]:
    """What a window costs: fp32 gradients, keys in units of the update.

    Args:
        sizes: Of the tensors of each buffer.
        workers: Whose messages are decoded.
    """
    total: dict[str, Work] = defaultdict(Work)
    for own in sizes:
        span = Span(sum(own), DENSITY * sum(own), len(own), by_update=True)
        for stages in (selection(span), decoding(span, workers), commitment(span)):
            for stage, work in stages.items():
                total[stage] += work
    for stage, work in END.items():
        total[stage] += work
    return dict(total)


def clock(place: Place) -> float:
    """Cycles per second of the device while it works; 1 GHz for the CPU, which stands for one."""
    if not place.cuda:
        return 1e9
    place.hold()
    begin = place.moment()
    place.hold(_SLEEP)
    return _SLEEP / place.seconds(begin, place.moment())


def launch_seconds(place: Place) -> float:
    """Between the beginnings of two short kernels that follow each other."""
    one = torch.zeros(1, device=place.device)

    def many() -> None:
        for _ in range(_SHORT):
            one.zero_()

    return place.median(many, 5) / _SHORT


def pcie_rate(place: Place, numel: int) -> float:
    """Bytes per second of a copy from pinned memory of the host."""
    source = torch.zeros(numel, pin_memory=place.cuda)
    target = torch.empty(numel, device=place.device)
    return 4 * numel / place.median(lambda: target.copy_(source, non_blocking=True), 5)


def speeds(place: Place, memory: float) -> Device:
    """The device's speeds.

    Args:
        place: Where they are measured.
        memory: Bytes per second of a copy.
    """
    name, processors = "a CPU in a rehearsal, not a device", 1
    if place.cuda:
        properties = torch.cuda.get_device_properties(place.device)
        name, processors = properties.name, properties.multi_processor_count
    launch, instructions = launch_seconds(place), processors * _PER_CLOCK * clock(place)
    pcie = pcie_rate(place, 1 << (24 if place.cuda else 10))
    source = f"python -m lab gpu, torch {torch.__version__}, CUDA {torch.version.cuda}"
    return Device(name, memory, launch, instructions, pcie, source=source)


def factors(device: Device, seconds: Mapping[str, float], work: Mapping[str, Work]) -> dict[str, float]:
    """How many times longer stages take than the larger of their bytes and instructions at a device's speeds.

    Args:
        device: Its speeds.
        seconds: Of the stages of a window.
        work: Counted, of the same stages.
    """
    found = {}
    for stage, spent in seconds.items():
        part = work.get(stage, Work())
        busy = max(part.nbytes / device.memory, part.instructions / device.instructions)
        if busy > 0:
            found[stage] = max(spent - part.launches * device.launch, _LEAST) / busy
    return found
