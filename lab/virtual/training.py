"""One training with virtual workers, step by step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lab.tasks import Batch, Data, Task, evaluate, loss
from lab.tasks.optimizers import for_use
from lab.virtual.workers import Averager


class VirtualTraining:
    """A model that virtual workers train. Data and initial weights depend on the task and the seed only.

    All workers hold the same weights, so that one copy of them serves all. (Batch norms' running statistics therefore
    see the batches of all workers; plain DDP keeps those of the first.)

    Args:
        task: What is trained.
        seed: Of the weights and the batches.
        workers: Virtual workers; they share the global batch.
        parts: How many parts of it each gets; empty: one. Gradients are weighted by samples.

    Attributes:
        model: The network.
        params: Its trainable parameters.
        order: Their indices in the order in which a backward pass finishes their gradients.
    """

    def __init__(self, task: Task, seed: int, workers: int, parts: Sequence[int] = ()) -> None:
        torch.manual_seed(seed)
        self.task, self._parts = task, parts or [1] * workers
        self.model, self._data = task.model(), task.data(seed, task.batch)
        self.params = [param for param in self.model.parameters() if param.requires_grad]
        self.order = ready_order(self.model, self.params, self._data)
        mean = get_ema_multi_avg_fn(task.ema) if task.ema else None  # None: of all weights equally
        self._average = AveragedModel(self.model, multi_avg_fn=mean) if task.ema or task.swa else None

    def step(self, number: int, averager: Averager, optimizers: Sequence[Optimizer], lr: float) -> float:
        """Trains for one step, unless the loss is not finite.

        Args:
            number: Of the step, from 0; decides its batch and its share of the learning rate.
            averager: Makes the mean of the workers' gradients.
            optimizers: Of ``params``.
            lr: Largest learning rate of the whole training.

        Returns:
            The loss before the step, mean over workers.
        """
        set_rate(self.task, optimizers, lr, number)
        gradients, losses = [], []
        for part, batches in zip(self._parts, self._shards(number), strict=True):
            share = part * len(self._parts) / sum(self._parts)
            losses.append(sum(self._backward(batch, share) for batch in batches))
            gradients.append(taken_gradients(self.params))
        mean_loss = fmean(losses)
        if not math.isfinite(mean_loss):
            return mean_loss
        descend(self.task, self.params, averager.average(gradients), optimizers)
        if self._average is not None and (not self.task.swa or number >= (1 - self.task.swa) * self.task.steps):
            self._average.update_parameters(self.model)
        return mean_loss

    def _shards(self, number: int) -> Iterable[Sequence[Batch]]:
        """The batches of every worker in a step."""
        times = self.task.accumulate
        together = sum(self._parts)
        drawn = (self._data.shards(number * times + time, together) for time in range(times))
        return zip(*map(self._owned, drawn), strict=True)

    def _owned(self, shards: Sequence[Batch]) -> list[Batch]:
        """The batch of every worker: its parts one after another."""
        edges = [*accumulate(self._parts, initial=0)]
        inputs, targets = zip(*shards, strict=True)
        return [(torch.cat(inputs[a:b]), torch.cat(targets[a:b])) for a, b in pairwise(edges)]

    def _backward(self, batch: Batch, share: float = 1.0) -> float:
        """Adds the gradients of a batch, times its share, with SAM those beside the weights; its loss there."""
        before = [param.detach().clone() for param in self.params] if self.task.sam else []
        if before:
            self._ascend(batch)
        value = self._loss(batch) * share
        value.backward()
        with torch.no_grad():
            for param, was in zip(self.params, before, strict=False):
                param.copy_(was)
        return float(value.detach())

    def _ascend(self, batch: Batch) -> None:
        """Moves the weights along their gradient, by the task's distance."""
        self._loss(batch).backward()
        own = [param.grad for param in self.params if param.grad is not None]
        scale = self.task.sam / max(1e-12, float(torch.stack([each.norm() for each in own]).norm()))
        with torch.no_grad():
            for param in self.params:
                if param.grad is not None:
                    param.add_(param.grad, alpha=scale)
                param.grad = None

    def _loss(self, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.task.precision == "bf16"):
            return loss(self.model, *batch) / self.task.accumulate

    def evaluate(self, optimizers: Sequence[Optimizer] = ()) -> float:
        """The task's metric on the held-out samples; not finite if the weights are not.

        Args:
            optimizers: Schedule-free ones hold other weights for training than for use.
        """
        with for_use(optimizers):
            return evaluate(self.task, self._average or self.model, self._data)


def set_rate(task: Task, optimizers: Sequence[Optimizer], lr: float, step: int) -> None:
    """Sets learning rates, and momenta that have a schedule, as a scheduler does after the step before.

    Args:
        task: What is trained.
        optimizers: Of its parameters.
        lr: Largest learning rate of the whole training.
        step: The coming one, from 0.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"], group["lr"] = lr, lr * task.rate(step)
            if task.schedule == "onecycle":
                group["betas"] = task.beta1(step), group["betas"][1]


def descend(
    task: Task,
    params: Sequence[nn.Parameter],
    means: Sequence[Tensor],
    optimizers: Sequence[Optimizer],
) -> None:
    """Clips the means as the task says, and steps along them.

    Args:
        task: What is trained.
        params: Its parameters.
        means: Of the workers' gradients, flat.
        optimizers: Of the parameters.
    """
    for param, mean in zip(params, means, strict=True):
        param.grad = mean.view_as(param)
    step_along(task, params, optimizers)


def step_along(task: Task, params: Sequence[nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
    """Clips the gradients as the task says, steps along them, and removes them."""
    if task.clip is not None:
        nn.utils.clip_grad_norm_(params, task.clip)
    if task.clip_value is not None:
        nn.utils.clip_grad_value_(params, task.clip_value)
    for optimizer in optimizers:
        optimizer.step()
    for param in params:
        param.grad = None


def taken_gradients(params: Sequence[nn.Parameter]) -> list[Tensor]:
    """The gradients, flat, and taken away from the parameters.

    Raises:
        RuntimeError: If a parameter has none.
    """
    flat = []
    for place, param in enumerate(params):
        if param.grad is None:
            raise RuntimeError(f"parameter {place} of shape {tuple(param.shape)} has no gradient: all must be used")
        flat.append(param.grad.contiguous().view(-1))
        param.grad = None
    return flat


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
