"""What a step of training takes with every way to exchange gradients, and how much of it that way adds to DDP's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from lightning.pytorch.strategies import Strategy

from lab.gpu.device import Device
from lab.gpu.figures import Figure, equal, note
from lab.gpu.stages import Setting
from lab.gpu.training import SHAPES, WORKERS, AmongEchoes, Phase, Steps, Transformer, fitted
from lightning_safusion import SAFusionStrategy

#: Models and precisions, and most milliseconds that the default adds to a step of DDP; the headline first.
JOBS: tuple[tuple[str, str, float | None], ...] = (
    ("bert-base", "bf16-mixed", 4.0),
    ("gpt2-medium", "bf16-mixed", None),
    ("bert-base", "32-true", 4.0),
    ("gpt2-medium", "32-true", None),
)
#: Ways to exchange gradients. Those of DDP's hooks have no other worker: what they add is their own work.
SYSTEMS = {"ddp": "DDP", "": "default", "ddp-bf16": "DDP, bf16 hook", "powersgd-rank4": "PowerSGD, rank 4"}
#: Milliseconds that a step of DDP takes about.
BATCHES = (60, 150)
# Steps of each batch before the timed ones, and these. The first 64 windows of the engine record everything, as does
# every 16th after them; PowerSGD begins after ten steps.
_ENGINE, _HOOKS = ((66, 24), (8, 16)), ((14, 16), (6, 12))
_REHEARSED = ((3, 2), (1, 1))
_LEAST = 1e-6  # seconds of a sentence
# Cycles of a device, some 200 ms, in which a slow host submits a whole step.
_AHEAD = 400_000_000
_PRECISIONS = ("16-mixed", "bf16-true")


def strategy_of(system: str) -> SAFusionStrategy:
    """A system by name; "": the default."""
    # by itself the planner would find that an exchange with echoes is free, and leave the job to DDP
    return SAFusionStrategy(system=system) if system else AmongEchoes(collective="allgather")


def _model(place: Device, name: str, sentences: int) -> Transformer:
    """On the device from the beginning: drawing the largest on the host would take as long as its steps."""
    if not place.cuda:
        return Transformer(SHAPES["small causal" if SHAPES[name].causal else "small"], sentences)
    with torch.device(place.device):
        return Transformer(SHAPES[name], sentences)


class Measured(NamedTuple):
    """A step of a batch: sentences, seconds, most bytes in use."""

    batch: int
    seconds: float
    nbytes: float


def fitting(few: Measured, many: Measured, seconds: float, room: float) -> int:
    """Sentences of a step of so many seconds, as many as fit into ``room`` bytes, by the line through two steps."""
    more = many.batch - few.batch
    each, nbytes = max((many.seconds - few.seconds) / more, _LEAST), max((many.nbytes - few.nbytes) / more, 1.0)
    wanted = few.batch + (seconds - few.seconds) / each
    return max(1, round(min(wanted, few.batch + (room - few.nbytes) / nbytes)))


def _measured(place: Device, model: Transformer, optimizer: torch.optim.Optimizer, mixed: bool, batch: int) -> Measured:
    def step() -> None:
        autocast = torch.autocast(place.device.type, torch.bfloat16) if mixed else nullcontext()
        with autocast:
            loss = model.training_step(batch, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return Measured(batch, place.median(step, 3, lambda: place.hold(_AHEAD)), place.peak(step))


def _batches(place: Device, name: str, precision: str) -> list[int]:
    """Those of :data:`BATCHES`; in a rehearsal the smallest."""
    model, mixed = _model(place, name, 512).to(place.device), precision.endswith("mixed")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5)
    few = _measured(place, model, optimizer, mixed, 8)
    many = _measured(place, model, optimizer, mixed, min(512, max(32, int(8 * 0.03 / few.seconds))))
    # of the device; the engine, activations of other precisions and what the allocator keeps need the rest
    room = 0.5 * torch.cuda.get_device_properties(place.device).total_memory if place.cuda else 1.0
    return [fitting(few, many, milliseconds * 1e-3, room) for milliseconds in BATCHES]


def _timed(
    place: Device, name: str, precision: str, strategy: Strategy, phases: Sequence[Phase]
) -> tuple[Steps, Transformer]:
    """Trains a model; its steps, and the model."""
    place.clear()
    steps, model = Steps(place, phases), _model(place, name, max(phase.batch for phase in phases))
    fitted(steps, model, strategy, precision=precision)
    return steps, model


def steps(setting: Setting) -> Iterator[Figure]:
    """See ``docs/gpu.md``."""
    place = Device(setting.rehearse)
    for name, precision, most in JOBS:
        batches = _batches(place, name, precision)
        plain: list[float] = []
        for system, told in SYSTEMS.items():
            counts = _REHEARSED if setting.rehearse else _HOOKS if system else _ENGINE
            phases = [Phase(batch, *count) for batch, count in zip(batches, counts, strict=True)]
            found, _ = _timed(place, name, precision, strategy_of(system), phases)
            plain = plain or [times.step for times in found.times]
            if not system:
                yield equal(
                    f"{name}, {precision}: the engine stays in place", found.plain_ddp is None, found.plain_ddp or ""
                )
            for phase, times, ddp, about in zip(phases, found.times, plain, BATCHES, strict=True):
                by, sentences = f"{name}, {precision}, {about} ms, {told}", f"{phase.batch} sentences"
                yield note(f"{by}: step", times.step * 1e3, "ms", sentences)
                if system == "ddp":
                    continue
                budget, others = (None, "no other worker") if system else (most, f"{WORKERS} messages decoded")
                yield Figure(f"{by}: added to DDP's step", (times.step - ddp) * 1e3, "ms", most=budget, note=others)
                if times.recorded and times.usual:
                    recorded = sum(times.recorded) / len(times.recorded)
                    yield note(f"{by}: a window that records everything", recorded * 1e3, "ms", "one in 16")


def precisions(setting: Setting) -> Iterator[Figure]:
    """See ``docs/gpu.md``."""
    place, name = Device(setting.rehearse), "bert-base"
    for precision in _PRECISIONS:
        found: dict[str, float] = {}
        for system, told in list(SYSTEMS.items())[:2]:
            counts = _REHEARSED[0] if setting.rehearse else _ENGINE[0]
            steps, model = _timed(place, name, precision, strategy_of(system), [Phase(32, *counts)])
            finite = all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
            yield equal(f"{precision}, {told}: parameters are finite", finite)
            yield note(f"{precision}, {told}: step", steps.times[0].step * 1e3, "ms", "32 sentences")
            found[told] = steps.times[0].step
        yield note(f"{precision}: added to DDP's step", (found["default"] - found["DDP"]) * 1e3, "ms")
