"""Three steps as torch's profiler sees them: streams, gaps, and what runs beside the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lab.gpu.device import Device
from lab.gpu.figures import Figure, note
from lab.gpu.stages import Setting
from lab.gpu.steps import strategy_of
from lab.gpu.training import SHAPES, Phase, Steps, Transformer, fitted

_PROFILED = 3
#: Most MiB of the file: it must fit into the archive.
_MOST = 6.0


class Profiled(Steps):
    """Has the timed steps profiled."""

    def __init__(self, place: Device, phase: Phase) -> None:
        super().__init__(place, [phase])
        activities = [torch.profiler.ProfilerActivity.CPU]
        if place.cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profiler = torch.profiler.profile(activities=activities)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        (phase,) = self.phases
        if batch_idx in (phase.warm, phase.warm + phase.timed):
            self.place.wait()
            if batch_idx == phase.warm:
                self.profiler.start()
            else:
                self.profiler.stop()
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)


def idle_seconds(events: Iterable[Any]) -> float:
    """Seconds in which the stream with most work had none, between its first and its last.

    Args:
        events: Of a profiler; those of the host do not count.
    """
    streams: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            streams.setdefault(event.device_resource_id, []).append((event.time_range.start, event.time_range.end))
    if not streams:
        return 0.0
    spans = sorted(max(streams.values(), key=lambda found: sum(end - begin for begin, end in found)))
    idle, last = 0.0, spans[0][1]
    for begin, end in spans:
        idle += max(0.0, begin - last)
        last = max(last, end)
    return idle * 1e-6


def trace(setting: Setting) -> Iterator[Figure]:
    """See ``docs/gpu.md``; writes ``trace.json.gz``."""
    place = Device(setting.rehearse)
    batch, warm, shape = (2, 3, "small") if setting.rehearse else (128, 66, "bert-base")
    profiled = Profiled(place, Phase(batch, warm, _PROFILED))
    fitted(profiled, Transformer(SHAPES[shape], batch), strategy_of(""), precision="bf16-mixed")
    file = setting.folder / "trace.json.gz"
    profiled.profiler.export_chrome_trace(str(file))
    idle = idle_seconds(profiled.profiler.events() or []) / _PROFILED
    yield note(
        "idle time of the busiest stream", idle * 1e3, "ms per step", f"BERT-base, bf16-mixed, {batch} sentences"
    )
    size = file.stat().st_size / 2**20
    yield Figure("trace.json.gz, for chrome://tracing", size, "MiB", most=_MOST, kind="counted")
