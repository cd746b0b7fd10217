"""A Trainer with a model of BERT-base's size, on one device and against DDP."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lab.gpu.device import Device
from lab.gpu.figures import Figure, equal, note
from lab.gpu.jobs import DENSITY, Echo, Job, described, shapes_of
from lab.gpu.stages import Setting
from lightning_safusion import SAFusionStrategy
from lightning_safusion.comm.transport.interface import Transport

#: Workers whose messages the only one decodes: they echo its own.
_WORKERS = 8
_WARM, _TIMED, _PROFILED = 30, 20, 3  # steps; the first 20 windows of the default are dense with Adam
_BATCH = 8
#: Words, width, layers, heads and words of a sentence; "base" has BERT-base's size.
SIZES = {"base": (30_522, 768, 12, 12, 128), "middle": (8000, 256, 4, 4, 64), "small": (50, 16, 1, 2, 8)}


class AmongEchoes(SAFusionStrategy):
    """The strategy as one of several workers, all of which send what this one sends: alone it would leave the job to
    DDP, since there is nothing to exchange."""

    def _make_transport(self, model: nn.Module) -> Transport:
        return Echo(_WORKERS)


class Encoder(LightningModule):
    """A transformer encoder.

    Args:
        size: One of :data:`SIZES`.
    """

    words: Tensor
    labels: Tensor

    def __init__(self, size: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        words, width, layers, heads, length = SIZES[size]
        self.embedding, self.positions = nn.Embedding(words, width), nn.Embedding(512, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), nn.Linear(width, 2)
        generator = torch.Generator().manual_seed(9)
        self.register_buffer("words", torch.randint(0, words, (_BATCH, length), generator=generator))
        self.register_buffer("labels", torch.arange(_BATCH) % 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        positions = self.positions.weight[: self.words.shape[1]]
        hidden = self.body(self.embedding(self.words) + positions)
        return nn.functional.cross_entropy(self.head(hidden.mean(1)).float(), self.labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-5)


class Steps(Callback):
    """Times steps, and after them looks how long the device's busiest stream is idle.

    Args:
        place: The device.
        warm, timed, profiled: Steps before, within and after.
    """

    def __init__(self, place: Device, warm: int, timed: int, profiled: int) -> None:
        self.place, self.warm, self.timed, self.profiled = place, warm, timed, profiled
        self.seconds = self.idle = 0.0
        self._begin = 0.0
        activity = torch.profiler.ProfilerActivity.CUDA if place.cuda else torch.profiler.ProfilerActivity.CPU
        self._profiler = torch.profiler.profile(activities=[activity])

    @property
    def steps(self) -> int:
        """Of the whole training."""
        return self.warm + self.timed + self.profiled

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.warm:
            self.place.wait()
            self._begin = time.perf_counter()
        if batch_idx == self.warm + self.timed:
            self.place.wait()
            self.seconds = (time.perf_counter() - self._begin) / self.timed
            self._profiler.start()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.place.wait()
        self._profiler.stop()
        self.idle = idle_seconds(self._profiler.events() or []) / self.profiled


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


def fitted(place: Device, strategy: Strategy | str, steps: Steps, model: LightningModule, **options: Any) -> Trainer:
    """Trains for the steps of a callback."""
    trainer = Trainer(
        accelerator="gpu" if place.cuda else "cpu",
        devices=1,
        strategy=strategy,
        callbacks=[steps],
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, DataLoader(range(steps.steps)))  # type: ignore[arg-type]  # a range is a dataset
    return trainer


def precisions(setting: Setting) -> Iterator[Figure]:
    """See ``docs/gpu.md``."""
    place = Device(setting.rehearse)
    counts = (3, 1, 1) if setting.rehearse else (_WARM, _TIMED, _PROFILED)
    size = "small" if setting.rehearse else "base"
    yield note("parameters", sum(p.numel() for p in Encoder(size).parameters()))
    for precision in ("bf16-mixed", "16-mixed", "bf16-true"):
        found: dict[str, Steps] = {}
        strategies: Mapping[str, Strategy] = {
            "DDP": DDPStrategy(),
            "default": AmongEchoes(density=DENSITY, collective="allgather"),
        }
        for name, strategy in strategies.items():
            model, found[name] = Encoder(size), Steps(place, *counts)
            fitted(place, strategy, found[name], model, precision=precision)
            finite = all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
            yield equal(f"{precision}, {name}: parameters are finite", finite)
            yield note(f"{precision}, {name}: step", found[name].seconds * 1e3, "ms")
            yield note(f"{precision}, {name}: idle time of the busiest stream", found[name].idle * 1e3, "ms per step")
        ratio = found["default"].seconds / found["DDP"].seconds
        budget = 1.05 if precision == "bf16-mixed" else None
        about = f"one worker, which decodes {_WORKERS} messages"
        yield Figure(f"{precision}: step over DDP's", ratio, most=budget, note=about)


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
