"""When a worker waits for its next batch."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_safusion.integration.meeting import between_batches
from tests.models import TinyClassifier, classification


class Asks(TinyClassifier):
    """Asks where Lightning has fetched the next batch, and not begun it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[bool] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            self.waits.append(between_batches(self.trainer))
        return batch

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing is measured."""


class Stops(Callback):
    """Asks in hooks in which a worker may be told to stop."""

    def __init__(self) -> None:
        self.waits: list[bool] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.waits.append(between_batches(trainer))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.waits.append(between_batches(trainer))


def test_a_worker_that_may_still_be_told_to_stop_does_not_wait() -> None:
    model, stops = Asks(), Stops()
    options: dict[str, Any] = {"limit_train_batches": 3, "limit_val_batches": 1, "val_check_interval": 1}
    options |= {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(max_epochs=1, callbacks=[stops], num_sanity_val_steps=0, **options).fit(
        model, classification(), classification()
    )
    assert model.waits == [False, True, True]
    assert stops.waits == [False] * 6
