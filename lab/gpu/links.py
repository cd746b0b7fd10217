"""Throughput of the papers' networks behind emulated links: real gradients and selection, seven echoes for workers."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader

from lab.gpu.device import Device
from lab.gpu.figures import Figure, note
from lab.gpu.network import Network, link_of
from lab.gpu.networks import WORKLOADS
from lab.gpu.networks import Network as Model
from lab.gpu.stages import Setting
from lightning_safusion import SAFusionStrategy
from lightning_safusion.baselines.hooks import POWERSGD_START
from lightning_safusion.comm.transport.interface import Transport
from lightning_safusion.systems.rows import DEFAULT, SYSTEMS, HookSystem

#: Of the emulated job; all but one are echoes.
WORKERS = 8
#: Share of the elements that every sparse system sends: the default's with Adam.
DENSITY = 0.02
#: Gbit/s and the links of ``comm.cost.LINKS``.
RATES = {10: "10gbit", 1: "1gbit", 25: "25gbit", 100: "100gbit-roce"}
#: What people have, and what papers propose.
KNOWN = (DEFAULT, "ddp", "ddp-bf16", "powersgd")
PAPERS = ("safusion-paper", "saf-inter", "saf-naive", "wfbp", "omgs", "oktopk", "cupcake")
#: By Gbit/s: how many times as fast as the best of DDP, its 16 bits and PowerSGD the default is to be.
GOALS = {10: 1.5, 1: 4.0}
# Seconds of a cell that are timed at most, steps, planned windows before them, and steps without a link after them.
_SECONDS, _MOST, _PLANNED, _FREE = 3.0, 20, 12, 4
#: Seconds after which no cell begins; the last may take a minute: a step of GPT2-large takes 43 s at 1 Gbit/s.
LIMIT = 285.0


def cells() -> Iterator[tuple[str, int, str]]:
    """Network, Gbit/s and system: those first that say most, since time may end before the last."""
    first, rest = ("bert-large", "gpt2-large"), [name for name in WORKLOADS if name not in ("bert-large", "gpt2-large")]
    blocks: list[tuple[str, int, tuple[str, ...]]] = []
    blocks += [(model, 10, KNOWN) for model in first]
    blocks.append(("bert-large", 1, KNOWN))
    blocks += [(model, 10, PAPERS) for model in first] + [("gpt2-large", 1, KNOWN)]
    blocks += [(model, 10, KNOWN) for model in rest]
    blocks += [(model, rate, KNOWN) for rate in (25, 100) for model in first]
    blocks += [(model, 10, PAPERS) for model in rest]
    blocks += [(model, rate, KNOWN) for rate in (1, 25, 100) for model in rest]
    blocks += [(model, rate, PAPERS) for rate in (1, 25, 100) for model in WORKLOADS]
    yield from ((model, rate, system) for model, rate, systems in blocks for system in systems)


class BehindALink(SAFusionStrategy):
    """A system as one of several workers behind an emulated link.

    Args:
        network: The link.
        system: Its name.
    """

    def __init__(self, network: Network, system: str) -> None:
        sparse = not isinstance(SYSTEMS[system], HookSystem)
        super().__init__(system=system, density=DENSITY if sparse else None)
        self.settings.density.opens = False  # steps are timed as they will last
        self._network = network

    def _make_transport(self, model: nn.Module) -> Transport:
        return self._network.transport()

    def _register_ddp_hooks(self) -> None:
        super()._register_ddp_hooks()
        plain = self.engine is None and self._hook in (None, "none")
        if plain and self._fit.ddp is not None:  # DDP's own all-reduce passes no link
            self._fit.ddp.register_comm_hook(None, allreduce_hook)


class Timed(Callback):
    """Times steps behind a link, and the same without it; ends the training itself.

    Args:
        place: The device.
        network: The link; it is free in the first steps, which send everything in every job.
        dense: So many.
        planned: Steps after them that are not timed.
    """

    def __init__(self, place: Device, network: Network, dense: int, planned: int) -> None:
        self.place, self.network = place, network
        self._on, self._from = dense, dense + planned
        self._until, self._moment = self._from + 1, 0.0
        self.seconds = self.free = self.busy = 0.0
        self.steps = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.network.free = True
        if batch_idx == self._on:
            self.network.free = False
        if batch_idx == self._from:
            self._begin()
        elif batch_idx == self._from + 1 and not self.steps:
            first = self._passed()
            self.steps = max(1, min(_MOST, int(_SECONDS / first)))
            self._until = self._from + self.steps
        if self.steps and batch_idx == self._until:
            self.seconds = self._passed() / self.steps
            self.busy = (self.network.seconds - self._busy) / self.steps
            self.network.free = True
            self._begin()
        if self.steps and batch_idx == self._until + _FREE:
            self.free = self._passed() / _FREE
            trainer.should_stop = True

    def _begin(self) -> None:
        self.place.wait()
        self._moment, self._busy = time.perf_counter(), self.network.seconds

    def _passed(self) -> float:
        self.place.wait()
        return time.perf_counter() - self._moment


def measured(place: Device, network: Network, name: str, system: str) -> tuple[Timed, int, int, str]:
    """One cell.

    Returns:
        The times, samples of a step, bytes of the device at most, and why plain DDP took the engine's place, if it did.
    """
    hook = isinstance(SYSTEMS[system], HookSystem)
    dense = POWERSGD_START + 1 if system.startswith("powersgd") else 3
    timed = Timed(place, network, dense, 0 if hook else _PLANNED if place.cuda else 2)
    with place.device:  # to draw the numbers of a large one on the host would take as long as its steps
        model = Model(name, small=not place.cuda)
    strategy = BehindALink(network, system)
    if place.cuda:
        torch.cuda.reset_peak_memory_stats(place.device)
    trainer = Trainer(
        accelerator="gpu" if place.cuda else "cpu",
        devices=1,
        strategy=strategy,
        callbacks=[timed],
        max_epochs=1,
        precision="bf16-mixed",
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with network.installed():
        trainer.fit(model, DataLoader(range(10_000)))  # type: ignore[arg-type]  # a range is a dataset
    peak = torch.cuda.max_memory_allocated(place.device) if place.cuda else 0
    replaced = "" if hook else strategy.figures()["plain_ddp"] or ""
    return timed, model.samples, peak, replaced


def rows(
    place: Device, name: str, rate: int, system: str, found: dict[tuple[str, int, str], float]
) -> Iterator[Figure]:
    """The figures of a cell; one that fails says why, and the others go on."""
    told, network = "default" if system == DEFAULT else system, Network(place, link_of(RATES[rate]), WORKERS)
    where = f"{name}, {rate} Gbit/s, {told}"
    unit = WORKLOADS[name].unit if name in WORKLOADS else "samples"
    try:
        timed, samples, peak, replaced = measured(place, network, name, system)
    except Exception as error:
        yield note(f"{where}: failed", f"{type(error).__name__}: {error}"[:200])
        return
    finally:
        place.clear()
    rate_of_all = found[name, rate, system] = WORKERS * samples / timed.seconds
    about = (
        f"plain DDP took over: {replaced}" if replaced else f"{timed.steps} steps; link busy {timed.busy * 1e3:.3g} ms"
    )
    yield Figure(f"{where}: throughput", rate_of_all, f"{unit} per second, {WORKERS} workers", note=about)
    yield Figure(f"{where}: step", timed.seconds * 1e3, "ms")
    yield Figure(
        f"{where}: exposed", max(0.0, timed.seconds - timed.free) * 1e3, "ms", note="over a step without a link"
    )
    yield Figure(f"{where}: memory", peak / 2**30, "GiB at most")


def goals(name: str, rate: int, found: dict[tuple[str, int, str], float]) -> Iterator[Figure]:
    """The default over the best of what people have, once all of these were measured."""
    speeds = [found.get((name, rate, system)) for system in KNOWN]
    known = [speed for speed in speeds if speed is not None]
    if len(known) == len(KNOWN):
        ratio = known[0] / max(known[1:])
        yield Figure(
            f"{name}, {rate} Gbit/s: default over the best of {', '.join(KNOWN[1:])}", ratio, least=GOALS.get(rate)
        )


def links(setting: Setting) -> Iterator[Figure]:
    """See ``docs/gpu.md``."""
    place, begin, missing = Device(setting.rehearse), time.perf_counter(), set[str]()
    found: dict[tuple[str, int, str], float] = {}
    for name in RATES.values():
        yield Network(place, link_of(name), WORKERS).checked(place)
    chosen = cells() if place.cuda else (("perceptron", 100, system) for system in (*KNOWN, *PAPERS))
    for name, rate, system in chosen:
        work = WORKLOADS.get(name)
        if work is not None and importlib.util.find_spec(work.module) is None:
            if name not in missing:
                missing.add(name)
                yield note(name, f"{work.module} is not installed")
            continue
        if time.perf_counter() - begin > LIMIT and place.cuda:
            yield note("first row that time did not allow", f"{name}, {rate} Gbit/s, {system}")
            return
        yield from rows(place, name, rate, system, found)
        if system == KNOWN[-1]:
            yield from goals(name, rate, found)
