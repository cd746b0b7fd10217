"""What the workers of a benchmark train: three kinds of networks on random data, and paced ones."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from typing_extensions import override

from lightning_safusion.lookup import check_name
from lightning_safusion.profiling.trace import Trace

#: Inputs and their classes.
Batch = tuple[Tensor, Tensor]

_CLASSES = 10
_WORDS, _LENGTH = 2000, 32  # of the vocabulary, and in a sentence


def conv_net(width: int) -> nn.Module:
    """Three stages of 3 x 3 convolutions with batch norms, on 32 x 32 images; the first has ``width`` channels."""
    channels = [3, width, width, 2 * width, 2 * width, 4 * width, 4 * width, 4 * width]
    strides = [2, 1, 2, 1, 2, 1, 1]
    layers: list[nn.Module] = []
    for inputs, outputs, stride in zip(channels, channels[1:], strides, strict=False):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, _CLASSES))


class Transformer(nn.Module):
    """A causal language model of six blocks with tied embeddings; ``width`` is a multiple of 32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, width)
        self.places = nn.Parameter(torch.zeros(_LENGTH, width))
        block = nn.TransformerEncoderLayer(width, width // 32, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 6, nn.LayerNorm(width), enable_nested_tensor=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(_LENGTH)
        hidden = self.blocks(self.words(x) + self.places, mask, is_causal=True)
        return nn.functional.linear(hidden, self.words.weight).flatten(0, 1)


class LSTM(nn.Module):
    """A two-layer LSTM language model with hidden states of ``width``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, _WORDS)

    @override
    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.lstm(self.words(x))[0])
        return scores.flatten(0, 1)


def _images(batch_size: int) -> Batch:
    return torch.randn(batch_size, 3, 32, 32), torch.randint(_CLASSES, (batch_size,))


def _sentences(batch_size: int) -> Batch:
    words = torch.randint(_WORDS, (batch_size, _LENGTH + 1))
    return words[:, :-1], words[:, 1:].flatten()


class _Kind(NamedTuple):
    build: Callable[[int], nn.Module]
    sample: Callable[[int], Batch]
    widths: dict[str, int]  # by size


_KINDS = {
    "conv": _Kind(conv_net, _images, {"tiny": 8, "small": 40, "base": 104}),
    "transformer": _Kind(Transformer, _sentences, {"tiny": 32, "small": 256, "base": 544}),
    "lstm": _Kind(LSTM, _sentences, {"tiny": 32, "small": 256, "base": 512}),
}
#: Kinds of networks, and sizes of each: at ``"base"`` 4.6, 22.5 and 6.3 million parameters.
MODELS = tuple(_KINDS)
SIZES = ("tiny", "small", "base")
#: Optimizers by name.
OPTIMIZERS: Mapping[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.001),
}


class Workload(LightningModule):
    """A module that is trained on one batch, again and again."""

    def batch(self) -> Any:
        """The batch of one worker."""
        raise NotImplementedError(f"{type(self).__name__} has no batch: a workload must make one")


class Classifier(Workload):
    """A network trained on one random batch; every worker has another one.

    Args:
        kind: One of :data:`MODELS`.
        size: One of :data:`SIZES`.
        batch_size: Images or sentences of one worker.
        optimizer: One of :data:`OPTIMIZERS`.

    Raises:
        ValueError: If there is no such kind, size or optimizer, or no sample in a batch.
    """

    def __init__(self, kind: str, size: str, batch_size: int, optimizer: str = "sgd") -> None:
        super().__init__()
        check_name("model", kind, _KINDS)
        check_name("size", size, SIZES)
        check_name("optimizer", optimizer, OPTIMIZERS)
        if batch_size < 1:
            raise ValueError(f"a batch needs a sample or more, got batch_size={batch_size}")
        self.kind, self.batch_size, self.optimizer = kind, batch_size, optimizer
        self.net = _KINDS[kind].build(_KINDS[kind].widths[size])

    @override
    def batch(self) -> Batch:
        """Random inputs and classes."""
        return _KINDS[self.kind].sample(self.batch_size)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs, classes = batch
        return nn.functional.cross_entropy(self.net(inputs), classes)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())


class Paced(Workload):
    """Sleeps through the forward and backward pass of a trace; its gradients are random, and of the trace's shapes.

    So that more workers than cores can be studied: the computation of an accelerator costs no processor time, and what
    selects, packs, exchanges and decodes is real.

    Args:
        trace: What to sleep through.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace
        self._debt = 0.0
        # in the order of the forward pass
        self.tensors = nn.ParameterList(nn.Parameter(torch.zeros(t.shape)) for t in reversed(trace.tensors))
        self._grads = [torch.randn(t.shape) * 1e-3 for t in reversed(trace.tensors)]

    @override
    def batch(self) -> Tensor:
        """A batch that makes no difference."""
        return torch.ones(1)

    def sleep(self, seconds: float) -> None:
        """Sleeps, less what the sleeps before took too long: their sum is exact."""
        if seconds <= 0:
            return
        due = seconds - self._debt
        begin = time.perf_counter()
        if due > 0:
            time.sleep(due)
        self._debt = time.perf_counter() - begin - due

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch.detach().requires_grad_()
        for tensor, param, grad in zip(reversed(self.trace.tensors), self.tensors, self._grads, strict=True):
            self.sleep(tensor.forward)
            x = _Pace.apply(x, param, grad, partial(self.sleep, tensor.backward))
        return x.sum()

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.sleep(self.trace.optimizer)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


class _Pace(torch.autograd.Function):
    """The identity; in backward it sleeps before it hands a given gradient to a parameter."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, param: Tensor, grad: Tensor, sleep: Callable[[], None]) -> Tensor:
        ctx.grad, ctx.sleep = grad, sleep
        return x.view_as(x)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        ctx.sleep()
        return grads[0], ctx.grad, None, None


def scaled(trace: Trace, factor: float, slow_motion: float = 1.0) -> Trace:
    """The trace with a share of its elements, and the same times or longer ones.

    Matrices become smaller in both of their first two dimensions, by the root of the factor each. On a link whose rate
    is scaled by the same factor an exchange takes as long as before, while selection takes that much less.

    Args:
        trace: The trace.
        factor: Share of the elements, in (0, 1].
        slow_motion: All of its times become so many times as long; at least 1.

    Raises:
        ValueError: If a number is out of range.
    """
    if not 0 < factor <= 1:
        raise ValueError(f"a trace is scaled by a factor in (0, 1], got {factor}")
    if not 1 <= slow_motion < math.inf:
        raise ValueError(f"slow motion makes times 1 or more times as long, got {slow_motion:g}")
    if factor == slow_motion == 1:
        return trace
    tensors = []
    for tensor in trace.tensors:
        sides = list(tensor.shape)
        for side in range(min(2, len(sides))):
            sides[side] = max(1, round(sides[side] * factor ** (1 / min(2, len(sides)))))
        forward, backward = tensor.forward * slow_motion, tensor.backward * slow_motion
        tensors.append(replace(tensor, shape=tuple(sides), forward=forward, backward=backward))
    change = f"sizes x {factor:g}" + ("" if slow_motion == 1 else f", times x {slow_motion:g}")
    name, source = f"{trace.name} x {factor:g}", f"{trace.source}; {change}"
    return Trace(name, tuple(tensors), trace.optimizer * slow_motion, source)
