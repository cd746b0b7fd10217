"""The demo's trainings: a process of their own, which forks the workers of each row and reports through a pipe."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from lightning_safusion import SAFusionStrategy
from lightning_safusion.demo.data import DigitsData
from lightning_safusion.demo.events import EpochDone, Event, Failed, Finished, Settings, Started, StepDone
from lightning_safusion.demo.model import DigitsNet

#: What each row asks of the strategy; "ddp" is Lightning's own strategy.
SYSTEMS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "behind-no-feedback": {"system": "behind", "memory": "none"},
    "behind": {"system": "behind"},
    "safusion-no-feedback": {"system": "safusion", "memory": "none"},
    "safusion": {"system": "safusion"},
    "saf-pooled": {"system": "saf-pooled"},
}


def build_strategy(system: str, density: float) -> DDPStrategy:
    """Makes the strategy of one row.

    Every compressed row selects exactly the same number of elements (top-k) and always exchanges them by all-gather:
    left to itself, the strategy would take the dense all-reduce on links as fast as the loopback.
    """
    if system == "ddp":
        return DDPStrategy(process_group_backend="gloo", start_method="fork")
    return SAFusionStrategy(
        compressor="topk",
        density=density,
        collective="allgather",
        process_group_backend="gloo",
        start_method="fork",
        **SYSTEMS[system],
    )


def train_all(settings: Settings, writer: Connection, log: Path) -> None:
    """Trains every row, one after the other; the entry point of the training process.

    Args:
        settings: What to train.
        writer: Takes the events. One process writes at a time: the first worker of a row, and this one between rows.
        log: File that takes everything the libraries print, so that the display stays whole.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)  # before the workers are forked: a forked thread pool hangs
    for system in settings.systems:
        try:
            _train(system, settings, writer.send)
        except Exception:
            trace = traceback.format_exc()
            print(trace, flush=True)
            writer.send(Failed(system, trace))
            return
    writer.send(Finished())


def _train(system: str, settings: Settings, send: Callable[[Event], None]) -> None:
    """Trains one row from the common start."""
    seed_everything(settings.seed, workers=True, verbose=False)
    data = DigitsData(settings.batch_size, settings.seed)
    steps = settings.epochs * data.steps_per_epoch(settings.workers)
    trainer = Trainer(
        accelerator="cpu",
        devices=settings.workers,
        strategy=build_strategy(system, settings.density),
        max_epochs=settings.epochs,
        callbacks=[Reporter(system, send)],
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(DigitsNet(settings.widths, settings.lr, steps), data)


class Reporter(Callback):
    """Sends the events of the first worker, and gives every worker the same conditions.

    Args:
        system: The row.
        send: Takes each event.
    """

    def __init__(self, system: str, send: Callable[[Event], None]) -> None:
        self.system = system
        self.send = send
        self._started = 0.0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # One thread each, or the workers fight for the cores; denormals slow a small network down up to three times.
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.system == "ddp":
            strategy: Any = trainer.strategy
            strategy.model._set_ddp_runtime_logging_sample_rate(1)  # time every step, not every hundredth
        if trainer.is_global_zero:
            self.send(Started(self.system, int(trainer.estimated_stepping_batches)))

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._started = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        seconds = time.perf_counter() - self._started
        if trainer.is_global_zero:
            figures = _figures(trainer.strategy, pl_module)
            self.send(StepDone(self.system, loss=float(outputs["loss"]), seconds=seconds, **figures))

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.send(EpochDone(self.system, float(trainer.callback_metrics["val_accuracy"])))


def _figures(strategy: Any, model: LightningModule) -> dict[str, Any]:
    """What the exchange of the latest step did: from the strategy's report, or from DDP's own timers."""
    if isinstance(strategy, SAFusionStrategy):
        report = strategy.report()
        return {
            "exposed_s": report["exposed_s"],
            "bytes_sent": report["bytes_sent"],
            "density": report["achieved_density"],
            "tensors": report["tensors"],
            "tensors_missing": report["tensors_missing"],
        }
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    timers = strategy.model._get_ddp_logging_data()
    exposed_ns = timers.get("backward_comm_time", 0) - timers.get("backward_compute_comm_overlap_time", 0)
    return {
        "exposed_s": exposed_ns / 1e9,
        "bytes_sent": sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        "density": 1.0,
        "tensors": len(parameters),
        "tensors_missing": 0,
    }
