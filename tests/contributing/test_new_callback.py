"""A new callback is a class that reads records: the recipe of docs/contributing.md, in a training."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_safusion import SAFusionStrategy
from lightning_safusion.callbacks.base import StrategyCallback
from tests.models import fit
from tests.process_group import run_launched


class SentShare(StrategyCallback):
    """Keeps the share of all elements that this rank sent in every window."""

    _purpose = "reads the windows of"

    def __init__(self) -> None:
        self.shares: dict[int, float] = {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        record = self._strategy(trainer).record
        if record is not None:  # None with plain DDP
            self.shares[record.step] = record.sent_counts.sum() / record.layout.numel


def test_it_reads_every_window_of_a_training() -> None:
    def train(rank: int) -> dict[int, float]:
        callback = SentShare()
        strategy = SAFusionStrategy(system="saf-inter", density=0.05)
        fit(strategy, max_steps=8, callbacks=[callback])
        return callback.shares

    shares, other = run_launched(2, train)
    assert list(shares) == list(other) == list(range(8))
    assert list(shares.values())[-1] == pytest.approx(0.05, rel=0.1)


def test_another_strategy_is_refused_by_name() -> None:
    with pytest.raises(MisconfigurationException, match="SentShare reads the windows of SAFusionStrategy, got "):
        fit("auto", devices=1, max_steps=1, callbacks=[SentShare()])
