"""What a strategy says without being asked: figures of the exchange in the user's loggers."""

from __future__ import annotations

from math import isfinite
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor

from lightning_safusion import SAFusionStrategy
from tests.models import TinyClassifier, classification, trainer
from tests.process_group import run_launched

NAMES = {"safusion/exposed_ms", "safusion/sent_mb", "safusion/dense_mb", "safusion/density"}


class Kept(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:  # type: ignore[override]
        self.rows.append((step, metrics))


class Logs(TinyClassifier):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize(
    ("options", "logged"),
    [
        ({"density": 0.1, "collective": "allgather"}, True),
        ({"density": 0.1, "collective": "allgather", "log_figures": False}, False),
        ({"system": "ddp"}, False),
    ],
    ids=["sparse", "switched off", "plain DDP"],
)
def test_figures_of_the_exchange_are_logged(options: dict[str, Any], logged: bool) -> None:
    def job(rank: int) -> list[tuple[int | None, dict[str, float]]]:
        torch.manual_seed(0)
        logger = Kept()
        trainer(SAFusionStrategy(**options), logger=logger, log_every_n_steps=4, max_steps=12).fit(
            Logs(), classification()
        )
        return logger.rows

    rows, _ = run_launched(2, job)
    assert [step for step, _ in rows] == [3, 7, 11]
    assert all(set(row) == {"loss", "epoch"} | (NAMES if logged else set()) for _, row in rows)
    assert all(isfinite(value) for _, row in rows for value in row.values())
    assert not logged or all(0 < row["safusion/density"] <= 1 and row["safusion/sent_mb"] > 0 for _, row in rows)
    gradients = 4e-6 * sum(each.numel() for each in Logs().parameters())
    assert not logged or [row["safusion/dense_mb"] for _, row in rows] == pytest.approx([gradients] * len(rows))
