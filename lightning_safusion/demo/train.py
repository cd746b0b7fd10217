"""What each worker of the demo does: it trains one row, and the first one tells how that goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from typing_extensions import override

from lightning_safusion import SAFusionStrategy
from lightning_safusion.bench.rows import parse_row
from lightning_safusion.bench.workers import WORKER_OPTIONS
from lightning_safusion.demo.data import DigitsData
from lightning_safusion.demo.events import Event, Settings, StepDone
from lightning_safusion.demo.model import DigitsNet


def build_strategy(system: str, density: float) -> SAFusionStrategy:
    """Makes the strategy of one row.

    Every compressed row exchanges by all-gather if it says nothing else: left to itself, the strategy would take the
    dense all-reduce on links as fast as the loopback.

    Raises:
        ValueError: If there is no such system or option; names it.
    """
    row = parse_row(system)
    auto = row.published.ddp_hook is None and row.published.collective == "auto"
    return row.strategy(density, **({"collective": "allgather"} if auto else {}))


def train(system: str, settings: Settings, rank: int, pipe: Connection) -> None:
    """Trains one row from the common start, as one of the workers; the pipe takes the events, and None at the end."""
    seed_everything(settings.seed, workers=True, verbose=False)
    data = DigitsData(settings.batch_size, settings.seed)
    trainer = Trainer(
        num_nodes=settings.workers,
        strategy=build_strategy(system, settings.density),
        max_epochs=settings.epochs,
        callbacks=[Reporter(pipe.send)],
        num_sanity_val_steps=0,
        **WORKER_OPTIONS,
    )
    steps = settings.epochs * data.steps_per_epoch(settings.workers)
    trainer.fit(DigitsNet(settings.widths, settings.lr, steps), data)
    pipe.send(None)


class Reporter(Callback):
    """Sends the events of the first worker."""

    def __init__(self, send: Callable[[Event], None]) -> None:
        self.send = send
        self._started = 0.0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        torch.set_num_threads(1)  # Lightning gives a node with one device all cores

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy: Any = trainer.strategy
        if strategy.controller is None:
            strategy.model._set_ddp_runtime_logging_sample_rate(1)  # time every step, not every hundredth

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
            self.send(StepDone(loss=float(outputs["loss"]), seconds=seconds, **figures))

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.send(float(trainer.callback_metrics["val_accuracy"]))


def _figures(strategy: Any, model: LightningModule) -> dict[str, Any]:
    """What the exchange of the latest step did: from the strategy's report, or from DDP's own timers."""
    if strategy.controller is not None:
        report = strategy.report()
        figures = {key: report[key] for key in ("exposed_s", "bytes_sent", "tensors", "tensors_missing")}
        return {**figures, "density": report["achieved_density"]}
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
