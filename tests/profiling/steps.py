"""Steps with known numbers, in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import Any

from lightning_safusion.fusion.events import BufferEvents
from lightning_safusion.profiling.timeline import BufferTimeline, Phase, StepTimeline, WindowTimeline


def buffer(first: int, count: int, moments: Sequence[float], beside: bool = False, **more: Any) -> BufferTimeline:
    """A buffer of ``count`` tensors from place ``first`` on.

    ``moments`` are closed, launched, finished, awaited, arrived and decoded; ``more`` are further fields of its events.
    """
    closed, launched, finished, awaited, arrived, decoded = moments
    fields: dict[str, Any] = {
        "places": range(first, first + count),
        "collective": "allgather",
        "elements": 1000,
        "capacity": 50,
        "bytes_sent": 300,
        "bytes_received": 300,
        "closed": closed,
        "selected": (closed + launched) / 2,
        "launched": launched,
        "issued": launched,
        "finished": finished,
        "awaited": awaited,
        "arrived": arrived,
        "decoded": decoded,
    }
    names = tuple(f"layer{place}.weight" for place in range(first, first + count))
    ready = tuple(closed - 0.5 * (count - 1 - i) for i in range(count))
    return BufferTimeline(BufferEvents(**(fields | more)), names, ready, beside)


def cpu_step(number: int = 7) -> StepTimeline:
    """Two buffers on the CPU; the second one is late.

    0 data 1 forward 4 backward 20 optimizer 22, ends at 23. Selection 6-7 and 12-13; exchange 7-10 and 13-18; decoding
    15-16 and 18-19.
    """
    buffers = (buffer(0, 2, (6.0, 7.0, 10.0, 15.0, 15.0, 16.0)), buffer(2, 3, (12.0, 13.0, 18.0, 16.0, 18.0, 19.0)))
    phases = (
        Phase("data", 0.0, 1.0),
        Phase("forward", 1.0, 4.0),
        Phase("backward", 4.0, 20.0),
        Phase("optimizer", 20.0, 22.0),
    )
    return StepTimeline(number, 0.0, 23.0, phases, (WindowTimeline(buffers, 19.5, False),))


def cuda_step() -> StepTimeline:
    """The same on CUDA: the first buffer is decoded at 10 to 11, beside the backward pass, which waits from 16 on."""
    buffers = (
        buffer(0, 2, (6.0, 7.0, 10.0, 16.0, 16.0, 11.0), beside=True, decoding=10.0),
        buffer(2, 3, (12.0, 13.0, 18.0, 16.0, 18.0, 19.0), beside=True, decoding=18.0),
    )
    return StepTimeline(7, 0.0, 23.0, cpu_step().phases, (WindowTimeline(buffers, 20.0, True),))


def plain_step() -> StepTimeline:
    """A step of plain DDP."""
    return StepTimeline(7, 0.0, 23.0, cpu_step().phases, ())


def unrecorded(step: StepTimeline) -> StepTimeline:
    """The step without recorded ends of its collectives, and without a gradient of the first tensor."""
    values = step.to_dict()
    for window in values["windows"]:
        for each in window["buffers"]:
            each["finished"] = nan
    values["windows"][0]["buffers"][0]["ready"][0] = None
    return StepTimeline.from_dict(values)
