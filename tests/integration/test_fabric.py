"""The exchange below Fabric."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_safusion import SAFusionFabricStrategy
from tests.integration.test_attach import SPARSE, Steps, adamw, batches, by_loop
from tests.models import TinyClassifier, equal
from tests.process_group import run_launched


class FabricLoop(Steps):
    """A training whose environment a launcher has made."""

    def __init__(self, strategy: Any, apart: bool = False, **options: Any) -> None:
        torch.use_deterministic_algorithms(True)
        self.fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, **options)
        self.fabric.launch()
        model = TinyClassifier()
        optimizer = adamw(model.parameters())
        if apart:
            self.model: Any = self.fabric.setup_module(model)
            self.optimizer: Any = self.fabric.setup_optimizers(optimizer)
        else:
            self.model, self.optimizer = self.fabric.setup(model, optimizer)

    def step(self, *parts: tuple[Tensor, Tensor], clip: bool = False) -> None:
        self.optimizer.zero_grad()
        for number, (x, y) in enumerate(parts):
            with self.fabric.no_backward_sync(self.model, enabled=number < len(parts) - 1):
                self.fabric.backward(nn.functional.cross_entropy(self.model(x), y) / len(parts))
        if clip:
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=0.1)
        self.optimizer.step()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "step": 8}

    @property
    def windows(self) -> Any:
        strategy: Any = self.fabric.strategy
        return strategy.attached[0].figures()["windows"]


@pytest.mark.parametrize("together", [1, 2])
def test_fabric_ends_with_the_parameters_of_a_plain_loop(together: int) -> None:
    def by_fabric(rank: int) -> list[Tensor]:
        loop, mine = FabricLoop(SAFusionFabricStrategy(**SPARSE)), batches(rank)
        loop.train(mine, together)
        assert loop.windows == len(mine) // together
        return loop.weights

    expected = by_loop(together)
    assert all(equal(each, expected) for each in run_launched(2, by_fabric))


def test_what_is_set_up_apart_begins_with_the_second_step() -> None:
    def run(rank: int) -> tuple[list[Tensor], Any]:
        loop = FabricLoop("safusion_find_unused_parameters_true", apart=True)
        loop.train(batches(rank)[:6])
        return loop.weights, loop.windows

    (first, windows), (second, _) = run_launched(2, run)
    assert windows == 5
    assert equal(first, second)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed"])
def test_replicas_are_equal_in_other_precisions(precision: Any) -> None:
    def run(rank: int) -> tuple[list[Tensor], Any]:
        loop = FabricLoop(SAFusionFabricStrategy(**SPARSE), precision=precision)
        for x, y in batches(rank)[:6]:
            loop.step((x.to(next(loop.model.parameters()).dtype), y), clip=precision != "bf16-true")
        return loop.weights, loop.windows

    (first, windows), (second, _) = run_launched(2, run)
    assert windows == 6
    assert equal(first, second)


@pytest.mark.parametrize("apart", [False, True])
def test_a_checkpoint_resumes_bit_for_bit(tmp_path: Path, apart: bool) -> None:
    def run(rank: int) -> tuple[bool, list[str]]:
        loop, mine = FabricLoop(SAFusionFabricStrategy(**SPARSE)), batches(rank)
        loop.train(mine[:8])
        loop.fabric.save(tmp_path / "whole.ckpt", loop.state)
        again = FabricLoop(SAFusionFabricStrategy(**SPARSE), apart)
        rest = again.fabric.load(tmp_path / "whole.ckpt", again.state)
        for batch in mine[8:]:
            loop.step(batch)
            again.step(batch)
        return equal(loop.weights, again.weights) or apart, [*rest]

    assert run_launched(2, run) == [(True, [])] * 2
    whole = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    assert len(whole["safusion"][0]["parts"]) == 2


def test_other_checkpoints_load(tmp_path: Path) -> None:
    def run(rank: int) -> list[list[str]]:
        dense, sparse = FabricLoop("ddp"), FabricLoop(SAFusionFabricStrategy(**SPARSE))
        for loop in (dense, sparse):
            loop.step(batches(rank)[0])
        dense.fabric.save(tmp_path / "dense.ckpt", dense.state)
        sparse.fabric.save(tmp_path / "weights.ckpt", {"model": sparse.model})
        sparse.fabric.save(tmp_path / "sparse.ckpt", sparse.state)
        sparse.fabric.load(tmp_path / "dense.ckpt", sparse.state)
        sparse.step(batches(rank)[1])
        return [
            [*torch.load(tmp_path / "weights.ckpt", weights_only=True)],
            [*dense.fabric.load(tmp_path / "sparse.ckpt", dense.state)],
        ]

    assert run_launched(2, run) == [[["model"], ["safusion"]]] * 2


def test_another_number_of_models_is_said(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        loop = FabricLoop(SAFusionFabricStrategy(**SPARSE))
        loop.fabric.save(tmp_path / "one.ckpt", loop.state)
        loop.fabric.setup_module(TinyClassifier())
        with pytest.warns(match="has residuals of 1 models, 2 were set up") if rank == 0 else nullcontext():
            loop.fabric.load(tmp_path / "one.ckpt", loop.state)

    run_launched(2, run)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"densty": 0.1}, r"SAFusionFabricStrategy has no argument 'densty'.* Did you mean 'density'"),
        ({"system": "powersgd"}, "system='powersgd' works without the engine"),
        ({"mixed_precision": True}, "SAFusionFabricStrategy does not take mixed_precision"),
    ],
)
def test_what_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said):
        SAFusionFabricStrategy(**options)
