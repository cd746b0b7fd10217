"""Networks as lists of layers in forward order, and the traces of them that the package ships.

Written from the descriptions in the papers; names follow torchvision and Hugging Face. Work is counted for one sample
(an image, or a sequence) in floating-point operations of the forward pass, two per multiply-accumulate.

    $ python -m lab traces --output lightning_safusion/tools/plan/traces
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from lightning_safusion.profiling.trace import Trace, TraceTensor

# Norms and activations move memory instead of computing: operations that take as long as one element read and written,
# on a device with 100 operations per byte.
_OPS_PER_ELEMENT = 200.0


@dataclass(frozen=True)
class Layer:
    """One operation.

    Args:
        name: As in the module tree.
        parameters: ``(suffix, shape)`` in registration order; none for attention, pooling and the like.
        work: Operations of the forward pass of one sample.
    """

    name: str
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    work: float


def linear(name: str, inputs: int, outputs: int, rows: int, bias: bool = True) -> Layer:
    """A fully connected layer applied to ``rows`` positions."""
    parameters: list[tuple[str, tuple[int, ...]]] = [("weight", (outputs, inputs))]
    if bias:
        parameters.append(("bias", (outputs,)))
    return Layer(name, tuple(parameters), 2.0 * rows * inputs * outputs)


def conv(name: str, inputs: int, outputs: int, kernel: int, size: int, bias: bool = False) -> Layer:
    """A convolution with an output of ``size`` x ``size``."""
    parameters: list[tuple[str, tuple[int, ...]]] = [("weight", (outputs, inputs, kernel, kernel))]
    if bias:
        parameters.append(("bias", (outputs,)))
    return Layer(name, tuple(parameters), 2.0 * size * size * inputs * outputs * kernel * kernel)


def norm(name: str, width: int, positions: int) -> Layer:
    """A layer or batch norm over ``positions`` of ``width`` channels."""
    return Layer(name, (("weight", (width,)), ("bias", (width,))), _OPS_PER_ELEMENT * width * positions)


def embedding(name: str, rows: int, width: int, positions: int) -> Layer:
    """A table; all of its dense gradient is written."""
    return Layer(name, (("weight", (rows, width)),), _OPS_PER_ELEMENT * width * (positions + rows / 64))


def free(name: str, shape: tuple[int, ...]) -> Layer:
    """A parameter that belongs to no layer, such as a class token."""
    return Layer(name, (("", shape),), _OPS_PER_ELEMENT * prod(shape))


def attention(name: str, width: int, length: int) -> Layer:
    """Scores and weighted sum of one self-attention; no parameters."""
    return Layer(name, (), 4.0 * length * length * width)


def resnet(blocks: Sequence[int], size: int = 224, classes: int = 1000) -> list[Layer]:
    """A bottleneck ResNet (He et al., CVPR 2016), the stride in the 3 x 3 convolution."""
    return list(_resnet(blocks, size, classes))


def _resnet(blocks: Sequence[int], size: int, classes: int) -> Iterator[Layer]:
    size //= 2
    yield conv("conv1", 3, 64, 7, size)
    yield norm("bn1", 64, size * size)
    size //= 2
    inputs = 64
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        for block in range(count):
            name = f"layer{stage + 1}.{block}"
            stride = 2 if stage > 0 and block == 0 else 1
            yield conv(f"{name}.conv1", inputs, width, 1, size)
            yield norm(f"{name}.bn1", width, size * size)
            size //= stride
            yield conv(f"{name}.conv2", width, width, 3, size)
            yield norm(f"{name}.bn2", width, size * size)
            yield conv(f"{name}.conv3", width, 4 * width, 1, size)
            yield norm(f"{name}.bn3", 4 * width, size * size)
            if block == 0:
                yield conv(f"{name}.downsample.0", inputs, 4 * width, 1, size)
                yield norm(f"{name}.downsample.1", 4 * width, size * size)
            inputs = 4 * width
    yield linear("fc", inputs, classes, 1)


def vgg19(size: int = 224, classes: int = 1000) -> list[Layer]:
    """VGG-19 without batch norm (Simonyan and Zisserman, ICLR 2015)."""
    layers: list[Layer] = []
    inputs, index = 3, 0
    for width, count in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(count):
            layers.append(conv(f"features.{index}", inputs, width, 3, size, bias=True))
            inputs, index = width, index + 2
        size, index = size // 2, index + 1
    layers.append(linear("classifier.0", inputs * size * size, 4096, 1))
    layers.append(linear("classifier.3", 4096, 4096, 1))
    layers.append(linear("classifier.6", 4096, classes, 1))
    return layers


def vit(width: int, depth: int, patch: int = 16, size: int = 224, classes: int = 1000) -> list[Layer]:
    """A vision transformer (Dosovitskiy et al., ICLR 2021) with separate query, key and value."""
    length = (size // patch) ** 2 + 1
    layers = [
        free("embeddings.cls_token", (1, 1, width)),
        free("embeddings.position_embeddings", (1, length, width)),
        conv("embeddings.patch_embeddings.projection", 3, width, patch, size // patch, bias=True),
    ]
    for index in range(depth):
        name = f"encoder.layer.{index}"
        layers.append(norm(f"{name}.layernorm_before", width, length))
        layers += _self_attention(f"{name}.attention", width, length)
        layers.append(norm(f"{name}.layernorm_after", width, length))
        layers.append(linear(f"{name}.intermediate.dense", width, 4 * width, length))
        layers.append(linear(f"{name}.output.dense", 4 * width, width, length))
    return [*layers, norm("layernorm", width, length), linear("classifier", width, classes, 1)]


def bert(width: int, depth: int, length: int, vocabulary: int = 30522, positions: int = 512) -> list[Layer]:
    """BERT for question answering, with the pooler (Devlin et al., NAACL 2019)."""
    layers = [
        embedding("embeddings.word_embeddings", vocabulary, width, length),
        embedding("embeddings.position_embeddings", positions, width, length),
        embedding("embeddings.token_type_embeddings", 2, width, length),
        norm("embeddings.LayerNorm", width, length),
    ]
    for index in range(depth):
        name = f"encoder.layer.{index}"
        layers += _self_attention(f"{name}.attention", width, length)
        layers.append(norm(f"{name}.attention.output.LayerNorm", width, length))
        layers.append(linear(f"{name}.intermediate.dense", width, 4 * width, length))
        layers.append(linear(f"{name}.output.dense", 4 * width, width, length))
        layers.append(norm(f"{name}.output.LayerNorm", width, length))
    return [*layers, linear("pooler.dense", width, width, 1), linear("qa_outputs", width, 2, length)]


def _self_attention(name: str, width: int, length: int) -> list[Layer]:
    parts = [linear(f"{name}.attention.{part}", width, width, length) for part in ("query", "key", "value")]
    return [*parts, attention(f"{name}.core", width, length), linear(f"{name}.output.dense", width, width, length)]


def gpt2(width: int, depth: int, length: int, vocabulary: int = 50257) -> list[Layer]:
    """GPT-2 (Radford et al., 2019). The head shares the token table: its work comes first in backward, the gradient of
    the table last."""
    layers = [
        embedding("wte", vocabulary, width, length),
        embedding("wpe", 1024, width, length),
    ]
    for index in range(depth):
        name = f"h.{index}"
        layers.append(norm(f"{name}.ln_1", width, length))
        layers.append(linear(f"{name}.attn.c_attn", width, 3 * width, length))
        layers.append(attention(f"{name}.attn.core", width, length))
        layers.append(linear(f"{name}.attn.c_proj", width, width, length))
        layers.append(norm(f"{name}.ln_2", width, length))
        layers.append(linear(f"{name}.mlp.c_fc", width, 4 * width, length))
        layers.append(linear(f"{name}.mlp.c_proj", 4 * width, width, length))
    head = Layer("lm_head", (), 2.0 * length * width * vocabulary)
    return [*layers, norm("ln_f", width, length), head]


def lstm(vocabulary: int, width: int, depth: int, length: int) -> list[Layer]:
    """A word-level language model of stacked LSTMs, tables not shared (Zaremba et al., 2014)."""
    layers = [embedding("encoder", vocabulary, width, length)]
    for index in range(depth):
        shape = (4 * width, width)
        parameters = (
            (f"weight_ih_l{index}", shape),
            (f"weight_hh_l{index}", shape),
            (f"bias_ih_l{index}", (4 * width,)),
            (f"bias_hh_l{index}", (4 * width,)),
        )
        layers.append(Layer("rnn", parameters, 2.0 * length * 2 * prod(shape)))
    return [*layers, linear("decoder", width, vocabulary, length)]


def model_trace(
    name: str, layers: Sequence[Layer], forward: float, backward: float, optimizer: float = 0.0, source: str = ""
) -> Trace:
    """A trace with times in proportion to the work of each layer.

    Gradients get ready in the reverse order of registration. The work of a layer is charged to its weight; the
    gradient of a bias is there as soon as that of its output is. Layers without parameters delay the gradients after
    them.

    Args:
        name: Of the job.
        layers: In forward order.
        forward: Seconds of the whole forward pass.
        backward: Seconds of the whole backward pass.
        optimizer: Seconds of the optimizer's step.
        source: Where the times come from, in words.
    """
    work = sum(layer.work for layer in layers)
    tensors: list[TraceTensor] = []
    waiting = 0.0  # work of layers without parameters, in backward before the next gradient
    for layer in reversed(layers):
        waiting += layer.work
        if not layer.parameters:
            continue
        weight = max(range(len(layer.parameters)), key=lambda index: prod(layer.parameters[index][1]))
        for index in reversed(range(len(layer.parameters))):
            suffix, shape = layer.parameters[index]
            share = waiting / work if index == weight else 0.0
            full = f"{layer.name}.{suffix}" if suffix else layer.name
            tensors.append(TraceTensor(full, shape, share * backward, share * forward))
        waiting = 0.0
    return Trace(name, tuple(tensors), optimizer, source)


class _Model(NamedTuple):
    layers: Callable[[], list[Layer]]
    batch: int
    sample: str
    rate: float  # operations per second
    forward: float | None = None  # seconds, in place of those at that rate


# Rates that these networks reach on an A100 with mixed precision. BERT-large at 50 + 100 ms and ResNet-50 at 20 + 40 ms
# are the times of the published comparison that tests/tools/plan/test_published.py repeats.
_TRANSFORMER, _RESNET, _VGG, _LSTM = 110e12, 26e12, 60e12, 20e12
_IMAGE = "images of 224 x 224"
MODELS: Mapping[str, _Model] = MappingProxyType(
    {
        "resnet-50": _Model(lambda: resnet((3, 4, 6, 3)), 64, _IMAGE, _RESNET, 20e-3),
        "resnet-152": _Model(lambda: resnet((3, 8, 36, 3)), 32, _IMAGE, _RESNET),
        "vgg-19": _Model(vgg19, 32, _IMAGE, _VGG),
        "vit-large": _Model(lambda: vit(1024, 24), 32, _IMAGE, _TRANSFORMER),
        "bert-base": _Model(lambda: bert(768, 12, 384), 24, "sequences of 384 tokens", _TRANSFORMER),
        "bert-large": _Model(lambda: bert(1024, 24, 384), 24, "sequences of 384 tokens", _TRANSFORMER, 50e-3),
        "gpt2-large": _Model(lambda: gpt2(1280, 36, 1024), 4, "sequences of 1024 tokens", _TRANSFORMER),
        "lstm": _Model(lambda: lstm(33278, 500, 2, 35), 128, "sequences of 35 words of WikiText-2", _LSTM),
    }
)


def modelled(name: str) -> Trace:
    """The trace of one of :data:`MODELS`."""
    model = MODELS[name]
    layers = model.layers()
    forward = model.forward
    how = "a forward pass as published comparisons take it"
    if forward is None:
        forward = model.batch * sum(layer.work for layer in layers) / model.rate
        how = f"a forward pass at {model.rate / 1e12:.0f} TFLOP/s"
    source = f"modelled, not measured: {how}, backward twice that, batches of {model.batch} {model.sample}"
    return model_trace(name, layers, forward, 2 * forward, source=source)


def traces(output: Path = Path("lightning_safusion/tools/plan/traces")) -> None:
    """Writes the traces that the package ships.

    Args:
        output: Folder.
    """
    for name in MODELS:
        modelled(name).save(output / f"{name}.json")
