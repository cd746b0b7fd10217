"""A pairwise cover of what a Trainer can be asked for: at density 1 every case trains as ``ddp`` does.

Every pair of values of two options occurs in some case. All cases run in one pair of worker processes, as started by a
launcher.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_safusion import SAFusionStrategy
from tests.models import distance, fit
from tests.process_group import run_launched

OPTIONS: dict[str, list[Any]] = {
    "precision": ["32-true", "bf16-mixed", "scaled"],
    "accumulate": [1, 3],
    "clip": [None, "norm", "value"],
    "mode": ["automatic", "manual", "toggled pair", "pair"],
    "ddp": ["default", "find_unused_parameters", "static_graph"],
    "checkpoint": ["none", "reentrant", "non-reentrant"],
    "layers": ["plain", "channels_last", "tied"],
}


def possible(case: dict[str, Any]) -> bool:
    manual = case["mode"] != "automatic"
    if manual and (case["accumulate"] != 1 or case["clip"] is not None):
        return False  # Lightning refuses both with manual optimization
    if "pair" in case["mode"] and (case["ddp"] != "find_unused_parameters" or case["checkpoint"] == "reentrant"):
        return False  # parameters of the other optimizer are unused
    if case["mode"] == "manual" and case["ddp"] == "static_graph":
        return False  # this version of Lightning finishes DDP's first static backward twice
    if case["accumulate"] != 1 and case["ddp"] == "static_graph":
        return False  # the reducer asserts when the first backward is not synchronised
    return not (case["checkpoint"] == "reentrant" and case["ddp"] == "find_unused_parameters")


def pairwise() -> list[dict[str, Any]]:
    names = list(OPTIONS)
    cases = [dict(zip(names, values, strict=True)) for values in itertools.product(*OPTIONS.values())]
    cases = [case for case in cases if possible(case)]
    pairs = [set(itertools.combinations(case.items(), 2)) for case in cases]
    missing, chosen = set().union(*pairs), []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(pairs[i] & missing))
        chosen.append(cases[best])
        missing -= pairs[best]
    return chosen


class Everything(LightningModule):
    """A small network that does what the case says."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.case = case
        self.automatic_optimization = case["mode"] == "automatic"
        self.conv = nn.Conv2d(2, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.body = nn.Sequential(nn.Linear(128, 32), nn.GELU(), nn.Linear(32, 32))
        self.head = nn.Linear(32, 32)
        self.scale = nn.Parameter(torch.ones(()))
        if case["layers"] == "channels_last":
            self.conv = self.conv.to(memory_format=torch.channels_last)
        if case["layers"] == "tied":
            self.head.weight = self.body[2].weight

    def features(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x.view(-1, 2, 4, 4))).flatten(1)
        if self.case["checkpoint"] == "none":
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.case["checkpoint"] == "reentrant")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return self.loss(batch)
        optimizers = self.optimizers()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            if self.case["mode"] == "toggled pair":
                self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            if self.case["mode"] == "toggled pair":
                self.untoggle_optimizer(optimizer)
        return None

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.features(batch[0])) * self.scale, batch[1])

    def configure_optimizers(self) -> Any:
        if "pair" not in self.case["mode"]:
            return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        first = [*self.conv.parameters(), *self.norm.parameters(), *self.body.parameters()]
        seen = {id(p) for p in first}
        second = [p for p in self.parameters() if id(p) not in seen]
        return [torch.optim.SGD(first, 0.05), torch.optim.SGD(second, 0.05)]


def train(case: dict[str, Any], ours: bool) -> list[Tensor]:
    options: dict[str, Any] = {} if case["ddp"] == "default" else {case["ddp"]: True}
    strategy = SAFusionStrategy(density=1.0, collective="allgather", **options) if ours else DDPStrategy(**options)
    settings: dict[str, Any] = {"precision": case["precision"]}
    if case["precision"] == "scaled":
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        settings = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    if case["clip"] is not None:
        settings |= {"gradient_clip_val": 0.05, "gradient_clip_algorithm": case["clip"]}
    settings |= {"accumulate_grad_batches": case["accumulate"], "limit_train_batches": 6}
    return fit(strategy, Everything(case), **settings).weights


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_pair_of_options_trains_as_ddp_does() -> None:
    cases = pairwise()
    assert len(cases) >= 12

    def compare(rank: int) -> list[str]:
        wrong = []
        for case in cases:
            difference = distance(train(case, True), train(case, False))
            if not difference <= 2e-6:
                wrong.append(f"{case}: {difference}")
        return wrong

    assert run_launched(2, compare, timeout=240) == [[], []]
