"""Tasks: how they are read, that each trains, and what a step of each kind does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lab.convergence.judges import OPTIMIZERS, OPTIONS
from lab.convergence.scheme import Scheme
from lab.convergence.training import Run, train
from lab.tasks import JUDGES, TASKS, Task, parse_task
from lab.tasks.data import Headers, Names, Prose, Restored
from lab.tasks.models import NAMES
from lab.virtual.training import VirtualTraining
from lab.virtual.workers import Dense
from lightning_safusion.fusion.layout import specs_from_parameters
from tests.models import equal, weights
from tests.quick import quick_of


def test_a_task_is_read_with_its_changes() -> None:
    task = parse_task("bytes-transformer[steps=1200,optimizer=lion,lr=0.0003,clip=1.0]")
    assert (task.steps, task.optimizer, task.lr, task.clip) == (1200, "lion", 0.0003, 1.0)
    assert task.data is TASKS["bytes-transformer"].data
    assert parse_task("bytes-lstm") is not None
    for text, message in (
        ("nothing", "task"),
        ("bytes-lstm[model=3]", "unknown option 'model'"),
        ("bytes-lstm[optimizer=none]", "optimizer"),
        ("bytes-lstm[sam=0.1,accumulate=2]", "accumulate=1"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_task(text)


def test_results_of_before_are_still_those_of_a_task() -> None:
    task = TASKS["bytes-transformer"]
    assert {"clip_value", "accumulate", "precision", "sam"}.isdisjoint(task.recipe())
    assert replace(task, accumulate=2).recipe()["accumulate"] == 2
    assert Run(task, Scheme("dense"), 0).settings() != Run(replace(task, sam=0.1), Scheme("dense"), 0).settings()
    assert set(TASKS["headers-transformer"].recipe()) - set(TASKS["digits-vit"].recipe()) == {"torch"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [task.name for task in JUDGES if task.name != "prose-fine-tuning"])
def test_judges_train(name: str) -> None:
    task = replace(TASKS[name], steps=3, batch=4)
    assert train(task, Scheme("auto", density=0.05, memory="auto", wire="q4"), 0).metric is not None


def test_a_trained_start_is_that_of_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    short = {"bytes-transformer": replace(TASKS["bytes-transformer"], steps=2, batch=2)}
    monkeypatch.setattr("lab.tasks.table._FRESH", short)

    def start(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return torch.cat([param.flatten() for param in weights(TASKS["prose-fine-tuning"].model())])

    assert torch.equal(start(3), start(3))
    assert not torch.equal(start(3), start(4))


def test_shapes_of_the_data() -> None:
    inputs, classes = Headers(0, 4).samples(0)
    assert inputs.shape == classes.shape == (4, 64)
    assert torch.equal(inputs[:, 1:], classes[:, :-1])
    inputs, classes = Restored(0, 4).samples(0)
    assert inputs.shape == (4, 2, 64)
    assert torch.equal(classes, Prose(0, 4).samples(0)[1])
    assert torch.equal(inputs[:, 1, 1:], classes[:, :-1])  # nothing of what is to be predicted is shown
    assert 0.2 < float((inputs[:, 0] == 0).double().mean()) < 0.5
    kept = inputs[:, 0] != 0
    assert torch.equal(inputs[:, 0][kept], classes[kept])
    inputs, classes = Names(0, 4).samples(0)
    assert (inputs.shape, classes.shape) == ((4, 1, 8), (4, 1))
    assert int(torch.cat([inputs.flatten(), classes.flatten()]).max()) < NAMES
    for row, own in zip(inputs[:, 0].tolist(), classes.flatten().tolist(), strict=True):
        assert len({*row, own}) == 9


@pytest.mark.parametrize("changes", quick_of([*OPTIMIZERS, *OPTIONS], [*OPTIMIZERS][:1]))
def test_optimizers_and_options_train(changes: str) -> None:
    if "lion" in changes or "schedule-free" in changes:
        pytest.importorskip("lion_pytorch" if "lion" in changes else "schedulefree")
    if "muon" in changes and not hasattr(torch.optim, "Muon"):
        pytest.skip("this version of torch has no Muon")
    task = replace(parse_task(f"bytes-transformer[{changes}]"), steps=2, batch=2)
    assert train(task, Scheme("auto", density=0.1, memory="auto", wire="q4"), 0).metric is not None


def means(task: Task) -> list[Tensor]:
    training = VirtualTraining(task, 0, 2)
    caught: list[Tensor] = []

    class Noting(Dense):
        def average(self, gradients: object) -> list[Tensor]:
            caught.extend(super().average(gradients))  # type: ignore[arg-type]  # as its base class has it
            return caught

    specs = specs_from_parameters(training.model.named_parameters())
    training.step(0, Noting(specs), task.make_optimizers(training.params, 0.0), 0.0)
    return [mean.clone() for mean in caught]


def test_accumulated_batches_are_one_large_batch() -> None:
    task = replace(TASKS["bytes-transformer"], batch=4, warmup=0.0)
    twice = means(replace(task, accumulate=2))

    class Joined(task.data):  # type: ignore[name-defined,misc]  # a class of this task
        def samples(self, step: int) -> tuple[Tensor, Tensor]:
            first, second = super().samples(2 * step), super().samples(2 * step + 1)
            # each worker gets its part of both
            pairs = [torch.cat([a[:2], b[:2], a[2:], b[2:]]) for a, b in zip(first, second, strict=True)]
            return pairs[0], pairs[1]

    torch.testing.assert_close(twice, means(replace(task, data=Joined)))


def test_an_ascent_leaves_the_weights() -> None:
    task = replace(TASKS["bytes-transformer"], batch=2, sam=0.1)
    training = VirtualTraining(task, 0, 1)
    before = [param.detach().clone() for param in training.params]
    training._backward(training._data.shards(0, 1)[0])
    assert equal(training.params, before)
    assert not torch.allclose(training.params[0].grad, means(replace(task, sam=0.0))[0].view_as(before[0]))  # type: ignore[arg-type]


def test_one_cycle_is_that_of_torch() -> None:
    task = TASKS["bytes-onecycle"]
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], task.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, task.lr, total_steps=task.steps)
    for step in range(task.steps):
        (group,) = optimizer.param_groups
        assert (group["lr"], group["betas"][0]) == pytest.approx((task.lr * task.rate(step), task.beta1(step)))
        optimizer.step()
        if step + 1 < task.steps:
            schedule.step()
