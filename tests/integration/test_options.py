"""Workers that were started with different options: found at set-up, on all of them, with both values."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn

from lightning_safusion import SAFusionStrategy
from lightning_safusion.integration.options import ddp_options
from tests.models import TinyClassifier, classification, trainer
from tests.process_group import run_launched

TIMEOUT = 30.0


class Model(TinyClassifier):
    """Options of the optimizer, and two layers of equal shape that are registered in one order or the other."""

    def __init__(self, kind: type[torch.optim.Optimizer] = torch.optim.SGD, swapped: bool = False, **options: Any):
        super().__init__()
        for name in ("second", "first") if swapped else ("first", "second"):
            self.add_module(name, nn.Linear(10, 10))
        self.kind, self.options = kind, {"lr": 0.1} | options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(super().forward(x)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.kind(self.parameters(), **self.options)


def fit(rank: int, chosen: dict[str, Any], options: dict[str, Any], model: dict[str, Any], system: str) -> str:
    strategy = SAFusionStrategy(system=system, timeout=timedelta(seconds=TIMEOUT), **(chosen if rank == 1 else {}))
    began = time.monotonic()
    try:
        trainer(strategy, **({"max_steps": 2} | (options if rank == 1 else {}))).fit(
            Model(**(model if rank == 1 else {})), classification()
        )
    except RuntimeError as error:
        assert time.monotonic() - began < TIMEOUT / 2
        return str(error)
    return "trained"


Options = tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]


def differing(
    strategy: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    system: str = "saf-inter",
) -> Options:
    """Options of the second worker."""
    return strategy or {}, options or {}, model or {}, system


def fit_all(rank: int, differences: Sequence[Options]) -> list[str]:
    return [fit(rank, *options) for options in differences]


def test_both_workers_are_told_of_the_difference() -> None:
    cases = {
        "find_unused_parameters: rank 0 has False, rank 1 has True": differing({"find_unused_parameters": True}),
        "static_graph: rank 0 has False, rank 1 has True": differing({"static_graph": True}),
        "bucket_cap_mb: rank 0 has None, rank 1 has 25": differing({"bucket_cap_mb": 25}),
        "gradient_as_bucket_view: rank 0 has False, rank 1 has True": differing({"gradient_as_bucket_view": True}),
        "sync_batchnorm: rank 0 has False, rank 1 has True": differing(options={"sync_batchnorm": True}),
        "accumulate_grad_batches: rank 0 has 1, rank 1 has 4": differing(options={"accumulate_grad_batches": 4}),
        "gradient accumulation schedule: rank 0 has None, rank 1 has": differing(
            options={"callbacks": [GradientAccumulationScheduler({2: 4})]}
        ),
        "gradient_clip_val: rank 0 has None, rank 1 has 0.5": differing(options={"gradient_clip_val": 0.5}),
        "max_steps: rank 0 has 2, rank 1 has 3": differing(options={"max_steps": 3}),
        "val_check_interval: rank 0 has 1.0, rank 1 has 2": differing(options={"val_check_interval": 2}),
        "val_check_interval: rank 0 has 1.0, rank 1 has 90 s": differing(options={"val_check_interval": "00:00:01:30"}),
        "limit_train_batches: rank 0 has 1.0, rank 1 has 4": differing(options={"limit_train_batches": 4}),
        "precision: rank 0 has 32-true, rank 1 has bf16-mixed": differing(options={"precision": "bf16-mixed"}),
        "optimizers: rank 0 has SGD, rank 1 has Adam": differing(model={"kind": torch.optim.Adam}),
        "optimizer 0 (SGD), group 0, lr: rank 0 has 0.1, rank 1 has 0.2": differing(model={"lr": 0.2}),
        "group 0, momentum: rank 0 has 0, rank 1 has 0.9": differing(model={"momentum": 0.9}, system="ddp"),
        "number 7: rank 0 has parameter first.weight, rank 1 has parameter second.weight": differing(
            model={"swapped": True}
        ),
    }
    for told in run_launched(2, fit_all, list(cases.values())):
        for said, text in zip(cases, told, strict=True):
            assert said in text
            assert "different settings" in text


def test_what_says_the_same_or_may_differ_is_no_difference() -> None:
    same = {"find_unused_parameters": False, "gradient_as_bucket_view": False}
    cases = [differing(same), differing(model={"lr": 0.2}, system="easgd")]
    assert run_launched(2, fit_all, cases) == [["trained", "trained"]] * 2


def test_objects_of_a_process_are_not_compared() -> None:
    assert ddp_options({"process_group": object(), "device_ids": [1]}) == ddp_options({})
