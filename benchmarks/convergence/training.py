"""One run: a task, a scheme and a seed make a result."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.convergence.adaptive import FrozenSecondMoment, PreconditionedTopK
from benchmarks.convergence.data import Data
from benchmarks.convergence.powersgd import PowerSGD
from benchmarks.convergence.scheme import POWERSGD_START, Scheme
from benchmarks.convergence.tasks import Task, evaluate, loss
from benchmarks.convergence.workers import Averager, Dense, Engines
from lightning_safusion.fusion.layout import TensorSpec, specs_from_parameters
from lightning_safusion.metrics import AchievedDensity, CompressionError, TensorMissingRate

# Points of the curve of the training loss, and samples of what was sent of every tensor.
_POINTS = 40


@dataclass(frozen=True)
class Result:
    """What a run came to; plain numbers.

    Args:
        metric: On held-out data after the last step; None if the training diverged (a loss that is not finite).
        curve: Training loss, mean over workers, averaged over equal parts of the run.
        missing: Share of the gradients of which nothing was sent; None where the engine has no part.
        density: Share of the elements that was sent.
        error: Share of the energy that stayed behind, of tensors that travel sparse.
        bytes_mean: Bytes that a worker sends in a step, mean over all steps.
        bytes_median: The same, of a usual step: without warm-up.
        dense_bytes: What the gradients have in float32.
        tensors: Gradient tensors.
        seconds: Of the run.
    """

    metric: float | None
    curve: list[float]
    missing: float | None
    density: float | None
    error: float | None
    bytes_mean: float
    bytes_median: float
    dense_bytes: int
    tensors: int
    seconds: float


@dataclass
class _Statistics:
    """What the callbacks of training measure, with the same metrics.

    Args:
        specs: The tensors.
    """

    specs: Sequence[TensorSpec]
    losses: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.specs]
        self._metrics = [kind(names) for kind in (TensorMissingRate, AchievedDensity, CompressionError)]
        self._sampled = False

    def sample(self, engines: Engines) -> None:
        figures = engines.figures()
        for metric in self._metrics:
            metric.update(figures)
        self._sampled = True

    def shares(self) -> dict[str, float | None]:
        values = [float(metric.compute()) if self._sampled else math.nan for metric in self._metrics]
        return {
            name: value if math.isfinite(value) else None
            for name, value in zip(("missing", "density", "error"), values, strict=True)
        }

    def curve(self) -> list[float]:
        size = max(1, math.ceil(len(self.losses) / _POINTS))
        return [round(fmean(self.losses[i : i + size]), 5) for i in range(0, len(self.losses), size)]


def one_thread() -> None:
    """Prepares a process: one thread, since runs share the cores, and no denormals, which slow small nets down."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


def train(task: Task, scheme: Scheme, seed: int) -> Result:
    """Trains once. Data and initial weights depend on the task and the seed only.

    All workers hold the same weights, so that one copy of them serves all. (Batch norms' running statistics therefore
    see the batches of all workers; plain DDP keeps those of the first.)

    Args:
        task: What is trained.
        scheme: How gradients are averaged.
        seed: Of the weights and the batches.
    """
    begin = time.perf_counter()
    torch.manual_seed(seed)
    model, data = task.model(), task.data(seed, task.batch)
    params = [param for param in model.parameters() if param.requires_grad]
    specs = specs_from_parameters(model.named_parameters(), dense_below=scheme.dense_below if scheme.sparse else 0)
    averager = _averager(task, scheme, specs, ready_order(model, params, data))
    statistics = _Statistics(specs)
    try:
        _steps(task, scheme, model, params, data, averager, statistics)
    finally:
        if isinstance(averager, Engines):
            averager.close()
    metric = evaluate(task, model, data) if math.isfinite(statistics.losses[-1]) else math.nan
    return Result(
        metric=metric if math.isfinite(metric) else None,
        curve=[point for point in statistics.curve() if math.isfinite(point)],
        **statistics.shares(),
        bytes_mean=fmean(statistics.sent),
        bytes_median=median(statistics.sent),
        dense_bytes=sum(spec.numel * spec.dtype.itemsize for spec in specs),
        tensors=len(specs),
        seconds=round(time.perf_counter() - begin, 2),
    )


def _averager(task: Task, scheme: Scheme, specs: Sequence[TensorSpec], order: Sequence[int]) -> Averager:
    if scheme.method == "dense":
        return Dense(specs)
    if scheme.method == "powersgd":
        return PowerSGD(specs, order, scheme.workers, scheme.rank, POWERSGD_START)
    return Engines(lambda: scheme.settings(task.steps), specs, order, scheme.workers)


def _steps(
    task: Task,
    scheme: Scheme,
    model: nn.Module,
    params: list[nn.Parameter],
    data: Data,
    averager: Averager,
    statistics: _Statistics,
) -> None:
    """Trains until the last step, or until the loss is not finite."""
    optimizer = make_optimizer(task, scheme, params)
    frozen = FrozenSecondMoment(optimizer, round(scheme.frozen * task.steps))
    sampled_every = max(1, task.steps // _POINTS)
    for step in range(task.steps):
        gradients, losses = [], []
        for inputs, classes in data.shards(step, scheme.workers):
            worker_loss = loss(model, inputs, classes)
            worker_loss.backward()
            gradients.append(taken_gradients(params))
            losses.append(float(worker_loss.detach()))
        statistics.losses.append(fmean(losses))
        if not math.isfinite(statistics.losses[-1]):
            return
        means = averager.average(gradients)
        statistics.sent.append(averager.bytes_sent)
        if isinstance(averager, Engines) and (step + 1) % sampled_every == 0:
            statistics.sample(averager)
        for param, mean in zip(params, means, strict=True):
            param.grad = mean.view_as(param)
        if task.clip is not None:
            nn.utils.clip_grad_norm_(params, task.clip)
        for group in optimizer.param_groups:
            group["lr"] = task.lr * scheme.lr_scale * task.rate(step)
        optimizer.step()
        frozen.after_step(step)
        for sparsifier in averager.sparsifiers if isinstance(averager, Engines) else ():
            if isinstance(sparsifier, PreconditionedTopK):
                sparsifier.weigh(optimizer, params)
        for param in params:
            param.grad = None


def taken_gradients(params: Sequence[nn.Parameter]) -> list[Tensor]:
    """The gradients, flat, and taken away from the parameters."""
    flat = []
    for param in params:
        assert param.grad is not None
        flat.append(param.grad.contiguous().view(-1))
        param.grad = None
    return flat


def make_optimizer(task: Task, scheme: Scheme, params: Sequence[Tensor]) -> torch.optim.Optimizer:
    """The task's optimizer with what the scheme changes of it."""
    momentum = task.momentum if scheme.momentum is None else scheme.momentum
    options: dict[str, Any] = {"lr": task.lr * scheme.lr_scale, "weight_decay": task.weight_decay, "foreach": True}
    if task.optimizer == "sgd":
        return torch.optim.SGD(params, momentum=momentum, **options)
    beta2 = task.beta2 if scheme.beta2 is None else scheme.beta2
    return torch.optim.AdamW(params, betas=(momentum, beta2), **options)


def ready_order(model: nn.Module, params: Sequence[nn.Parameter], data: Data) -> list[int]:
    """Indices of the parameters in the order in which a backward pass finishes their gradients; changes no weight."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}  # batch norms count
    order: list[int] = []
    handles = [
        param.register_post_accumulate_grad_hook(lambda _, index=index: order.append(index))
        for index, param in enumerate(params)
    ]
    loss(model, *data.shards(0, 1)[0]).backward()
    for handle in handles:
        handle.remove()
    for param in params:
        param.grad = None
    model.load_state_dict(state)
    return order
