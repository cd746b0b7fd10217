"""All workers in one pass: their gradients are those of a pass each, and their plain mean trains as the whole batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lab.tasks import Task
from lab.tasks.deep import BytePredictor, Shape
from lab.tasks.sources import Sources
from lab.virtual.batched import BatchedTraining
from lab.virtual.chunks import DeMo
from lab.virtual.powersgd import PowerSGD
from lab.virtual.workers import Dense
from lightning_safusion.fusion.layout import specs_from_parameters

WORKERS, SHAPE = 4, Shape(16, 2, 2, 8)
TASK = Task(
    "bytes", partial(BytePredictor, SHAPE), Sources, "loss", "adamw", lr=1e-2, steps=4, batch=2 * WORKERS, warmup=0.5
)


class Drawn(Sources):
    """Random bytes."""

    def texts(self) -> tuple[Tensor, Tensor]:
        first, second = torch.randint(256, (2, 500), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
        return first, second


@pytest.fixture
def training() -> BatchedTraining:
    return BatchedTraining(TASK, Drawn(1, TASK.batch, SHAPE.length, 16), WORKERS, torch.device("cpu"))


def plain_loss(model: BytePredictor, inputs: Tensor, classes: Tensor) -> Tensor:
    return functional.cross_entropy(model(inputs).flatten(0, 1), classes.flatten())


def test_gradients_are_those_of_a_pass_for_each_worker(training: BatchedTraining) -> None:
    losses = training.backward(0)
    shards = Drawn(1, TASK.batch, SHAPE.length).shards(0, WORKERS)
    for rank, (inputs, classes) in enumerate(shards):
        loss = plain_loss(training.model, inputs, classes)
        torch.testing.assert_close(losses[rank], loss.detach())
        alone = [gradient.flatten() for gradient in torch.autograd.grad(loss, training.params)]
        torch.testing.assert_close(list(training._own[rank]), alone, rtol=1e-4, atol=1e-6)


def test_the_plain_mean_of_workers_trains_as_the_whole_batch(training: BatchedTraining) -> None:
    torch.manual_seed(1)
    model, text = BytePredictor(SHAPE), Drawn(1, TASK.batch, SHAPE.length, 16)
    averager = Dense(specs_from_parameters(model.named_parameters()))
    pairs = [TASK.make_optimizers(of.parameters(), TASK.lr) for of in (training.model, model)]
    for step in range(TASK.steps):
        mean = training.step(step, averager, pairs[0], TASK.lr)
        loss = plain_loss(model, *text.samples(step))
        torch.testing.assert_close(mean, loss.detach())
        loss.backward()
        (optimizer,) = pairs[1]
        optimizer.param_groups[0]["lr"] = TASK.lr * TASK.rate(step)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(list(training.params), list(model.parameters()), rtol=1e-3, atol=1e-5)
    held_out = plain_loss(model, *text.validation()).detach()
    assert training.evaluate() == pytest.approx(float(held_out), rel=1e-4)


def test_products_are_rounded_as_under_autocast() -> None:
    model = BytePredictor(SHAPE, torch.bfloat16)
    leaves = model.leaves(WORKERS)
    kinds = {name: leaf.dtype for (name, _), leaf in zip(model.named_parameters(), leaves, strict=True)}
    plain = {name for name, kind in kinds.items() if kind == torch.float32}
    assert {name.rpartition(".")[2] for name in plain} == {
        "bytes", "places", "norm", "before_attention", "before_perceptron"
    }  # fmt: skip
    assert all(leaf.untyped_storage().nbytes() == leaf[0].nbytes for leaf in leaves)  # no worker has a copy
    assert model.scores(torch.zeros(WORKERS, 1, 3, dtype=torch.int64), leaves).dtype == torch.bfloat16


class Unread(TorchDispatchMode):
    """Refuses what makes a host wait for a device: numbers that it reads, and shapes that depend on them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero):
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


def test_a_step_reads_nothing_from_the_device(training: BatchedTraining) -> None:
    specs = specs_from_parameters(training.model.named_parameters())
    power = PowerSGD(specs, training.order, WORKERS, 4, start=0)
    with Unread():
        for averager in (Dense(specs), power, DeMo(specs, 0.1)):
            training.backward(0)
            averager.average(training._own)
        with pytest.raises(AssertionError, match="_local_scalar_dense"):
            training.evaluate()
