"""The networks of the tasks: small, and as uneven in their tensors as large ones."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

#: Classes of a model of bytes.
BYTES = 256
#: Classes of a model of names.
NAMES = 4096


class PlainConvNet(nn.Module):
    """A deep plain network for 8x8 images, as VGG (Simonyan and Zisserman, ICLR 2015): no shortcut, no normalisation.

    Without normalisation, gradients of early and late layers differ by orders of magnitude. Weights as He et al., ICCV
    2015.

    Args:
        stages: Channels of each stage; the image is halved after each of the first three.
        depth: 3x3 convolutions in a stage.
        hidden: Width of the two fully connected layers before the last.
    """

    def __init__(self, stages: tuple[int, ...] = (32, 64, 128), depth: int = 4, hidden: int = 128) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 1
        for width in stages:
            for _ in range(depth):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.classifier = nn.Sequential(
            nn.LazyLinear(hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)
        )
        self(torch.zeros(1, 1, 8, 8))
        for layer in self.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.constant_(layer.get_parameter("bias"), 0.0)

    @override
    def forward(self, x: Tensor) -> Tensor:
        classes: Tensor = self.classifier(self.features(x))
        return classes


class TwoHeads(nn.Module):
    """Convolutions for 8x8 images with two heads of their own layers, one of which has a smaller weight in the loss.

    Where losses are added up, gradients of their heads differ in scale by the factor between them. A choice by
    magnitude across tensors leaves the lesser head out; an adaptive optimizer would not mind the factor.

    Args:
        weight: Of the second head in the loss; the first has 1.
        width: Channels of the first convolutions.
    """

    def __init__(self, weight: float = 0.1, width: int = 32) -> None:
        super().__init__()
        self.weight = weight
        self.trunk = nn.Sequential(
            *_convolution(1, width), *_convolution(width, width), nn.MaxPool2d(2), *_convolution(width, 2 * width)
        )
        self.heads = nn.ModuleList(
            nn.Sequential(
                *_convolution(2 * width, 2 * width),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(8 * width, 128),
                nn.ReLU(),
                nn.Linear(128, 10),
            )
            for _ in range(2)
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Scores [batch, 2, 10]; gradients of the second head's are multiplied by its weight."""
        features = self.trunk(x)
        first, second = (head(features) for head in self.heads)
        return torch.stack([first, torch.lerp(second.detach(), second, self.weight)], 1)


def _convolution(channels: int, width: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]


class ByteTransformer(nn.Module):
    """A causal transformer over bytes, normalised before each block, with tied embeddings (as GPT-2).

    Args:
        length: Longest sequence.
        width: Of the residual stream.
        depth: Blocks.
        heads: Attention heads.
    """

    def __init__(self, length: int = 64, width: int = 96, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, width)
        self.places = nn.Parameter(torch.empty(length, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        # GPT-2's 0.02 learns much more slowly in a few hundred steps
        nn.init.normal_(self.bytes.weight, std=0.1)
        nn.init.normal_(self.places, std=0.1)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        hidden = self.bytes(x) + self.places[:length]
        mask = self.get_buffer("mask")[:length, :length]
        for block in self.blocks:
            hidden = block(hidden, mask, is_causal=True)
        return functional.linear(self.norm(hidden), self.bytes.weight)


class DigitsViT(nn.Module):
    """A vision transformer for 8x8 images, in 16 patches (Dosovitskiy et al., ICLR 2021).

    Args:
        width: Of the residual stream.
        depth: Blocks.
        heads: Attention heads.
    """

    def __init__(self, width: int = 96, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.places = nn.Parameter(torch.empty(16, width))
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
                for _ in range(depth)
            )
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))
        nn.init.normal_(self.places, std=0.1)

    @override
    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        classes: Tensor = self.head(self.blocks(tokens).mean(1))
        return classes


class ByteLSTM(nn.Module):
    """A two-layer LSTM over bytes.

    Args:
        width: Of embeddings and hidden states.
    """

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, BYTES)

    @override
    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.lstm(self.bytes(x))[0])
        return scores


class Restorer(nn.Module):
    """An encoder and a decoder over bytes (Vaswani et al., NeurIPS 2017), normalised before each block.

    Args:
        length: Longest sequence.
        width: Of the residual stream.
        depth: Blocks of each half.
        heads: Attention heads.
    """

    def __init__(self, length: int = 64, width: int = 96, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, width)
        self.places = nn.Parameter(torch.empty(length, width))
        self.blocks = nn.Transformer(
            width, heads, depth, depth, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        nn.init.normal_(self.bytes.weight, std=0.1)
        nn.init.normal_(self.places, std=0.1)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        damaged, before = (self.bytes(part) + self.places for part in x.unbind(1))
        hidden = self.blocks(damaged, before, tgt_mask=self.get_buffer("mask"), tgt_is_causal=True)
        return functional.linear(hidden, self.bytes.weight)


class Recommender(nn.Module):
    """Predicts a name from others by the mean of their embeddings (CBOW: Mikolov et al., 2013): few rows per batch.

    Args:
        width: Of the embeddings.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.names = nn.EmbeddingBag(NAMES, width, mode="mean")
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, NAMES))
        nn.init.normal_(self.names.weight, std=0.1)

    @override
    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.names(x.flatten(0, 1)))
        return scores.unflatten(0, x.shape[:2])


class SeparableConvNet(nn.Module):
    """Depthwise separable convolutions with batch norms for 8x8 images (MobileNet: Howard et al., 2017).

    Args:
        widths: Channels of the blocks; every second one halves the image.
    """

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 128, 256)) -> None:
        super().__init__()
        layers: list[nn.Module] = [*_convolution(1, widths[0])]
        for place, (channels, width) in enumerate(pairwise(widths)):
            stride = 1 + place % 2
            layers += [nn.Conv2d(channels, channels, 3, stride, padding=1, groups=channels, bias=False)]
            layers += [nn.BatchNorm2d(channels), nn.ReLU()]
            layers += [nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(widths[-1], 10)

    @override
    def forward(self, x: Tensor) -> Tensor:
        classes: Tensor = self.classifier(self.features(x))
        return classes
