"""Virtual workers on a device: the gradients of all of them in one forward and one backward pass.

All workers hold the same weights. Each weight is given to the passes as one tensor of all workers, [workers, ...],
whose slices share their memory; every product is a batch over workers, so that the slices of its gradient are the
workers' own. A pass per worker would be as much work of the device and eight times as many launches.

Counted for one step of 8 workers, 8 sequences of 256 bytes each (16,384 bytes), 25.4 million parameters, width 512, 8
blocks, bf16-mixed; a device of 350 TFLOP/s in such products, 2.5 TB/s, 5 µs of the host per launch:

- products: 6 · 25.3e6 · 16,384 = 2.5 TFLOP, and 0.1 of attention: 7 ms;
- what is between them: 380 bytes for each of 512 · 16,384 numbers in each block, forward and backward: 25 GB, 10 ms;
- gradients of 8 workers written in bfloat16 and copied to float32: 2 + 6 bytes · 203e6 = 1.6 GB, 0.7 ms;
- their plain mean: 7 · 12 bytes · 25.4e6 = 2.1 GB, 0.9 ms; AdamW: 2 GB, 0.8 ms;
- dense in all: 20 ms, 40 s for 2,000 steps; launches: 8 · 90 + 300, 5 ms, behind the device;
- in place of the mean, 8 windows of the engine at 0.9 ms (its counted instructions, 8 messages each): 7 ms; of the
  host 3 ms (processor time with launches stubbed) and 72 launches; 2 % in all: 26 ms, 52 s for 2,000 steps;
- PowerSGD, rank 4: 32 bytes · 203e6 = 6.5 GB, 3 ms; DeMo: 100 GFLOP in float32, 15 passes over 203e6 numbers, and
  its choice of the largest: 40 ms.

Eight passes one after the other would be 7 · 720 launches more, 25 ms of the host: dense 45 ms, 2 % 55 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer

from lab.tasks import Task
from lab.tasks.data import Text
from lab.tasks.deep import BytePredictor
from lab.virtual.training import descend, ready_order, set_rate
from lab.virtual.workers import Averager


class BatchedTraining:
    """A transformer over bytes that virtual workers train on a device. The host reads nothing from it in a step.

    Data and initial weights depend on the task and the seed only.

    Args:
        task: What is trained; its network is a :class:`BytePredictor`.
        text: Its data.
        workers: Virtual workers; they share the global batch.
        device: Where all of it lives.

    Attributes:
        model: The network.
        params: Its parameters.
        order: Their indices in the order in which a backward pass finishes their gradients.
    """

    def __init__(self, task: Task, text: Text, workers: int, device: torch.device) -> None:
        torch.manual_seed(text.seed)
        self.task, self.workers, self._text = task, workers, text.to(device)
        self.model = cast(BytePredictor, task.model()).to(device)
        self.params = list(self.model.parameters())
        self.order = ready_order(self.model, self.params, self._text)
        # gradients stay where they are, so that kernels need no new addresses
        self._gradients = [torch.zeros(workers, *param.shape, device=device) for param in self.params]
        self._own = [[every[rank].view(-1) for every in self._gradients] for rank in range(workers)]

    def step(self, number: int, averager: Averager, optimizers: Sequence[Optimizer], lr: float) -> Tensor:
        """Trains for one step.

        Args:
            number: Of the step, from 0; decides its batch and its share of the learning rate.
            averager: Makes the mean of the workers' gradients.
            optimizers: Of ``params``.
            lr: Largest learning rate of the whole training.

        Returns:
            The loss before the step, mean over workers, on the device.
        """
        set_rate(self.task, optimizers, lr, number)
        losses = self.backward(number)
        descend(self.task, self.params, averager.average(self._own), optimizers)
        return losses.mean()

    def backward(self, number: int) -> Tensor:
        """Makes the gradients of all workers; their losses, float32 [workers]."""
        x, y = (each.unflatten(0, (self.workers, -1)) for each in self._text.samples(number))
        leaves = self.model.leaves(self.workers)
        losses = _losses(self.model.scores(x, leaves), y).mean((1, 2))
        losses.sum().backward()
        torch._foreach_copy_(self._gradients, [cast(Tensor, leaf.grad) for leaf in leaves])
        return losses.detach()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean cross entropy of the held-out bytes in nats; reads one number of the device."""
        leaves, total = self.model.leaves(1), torch.zeros((), device=self.params[0].device)
        inputs, classes = self._text.validation()
        for x, y in zip(inputs.split(self.task.batch), classes.split(self.task.batch), strict=True):
            total += _losses(self.model.scores(x[None], leaves), y[None]).sum()
        return float(total) / classes.numel()


def _losses(scores: Tensor, classes: Tensor) -> Tensor:
    """Cross entropy of every byte in nats, float32, in the shape of ``classes``."""
    losses = functional.cross_entropy(scores.float().flatten(0, -2), classes.flatten(), reduction="none")
    return losses.view_as(classes)
