"""The papers' image networks: modules that turn pixels (float32 [batch, 3, height, width]) into scores of classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification
from typing_extensions import override

from examples.workloads.pretrained import build


def _names(classes: int) -> dict[int, str]:
    return {number: str(number) for number in range(classes)}


class ResNet(nn.Module):
    """ResNet of ``transformers`` with bottleneck blocks (He et al., 2016); ResNet-152 by default.

    Args:
        classes: Number of classes.
        depths: Blocks in each stage.
        widths: Channels that each stage ends with.
        stem_width: Channels of the first convolution.
        small_images: For 32x32 pixels: the first convolution is 3x3 and keeps the size, and nothing is pooled before
            the first stage (He et al., 2016, section 4.2); otherwise the stem makes images four times smaller.
    """

    def __init__(
        self,
        classes: int,
        depths: Sequence[int] = (3, 8, 36, 3),
        widths: Sequence[int] = (256, 512, 1024, 2048),
        stem_width: int = 64,
        small_images: bool = False,
    ) -> None:
        super().__init__()
        self.net = ResNetForImageClassification(
            ResNetConfig(
                depths=list(depths),
                hidden_sizes=list(widths),
                embedding_size=stem_width,
                id2label=_names(classes),
            )
        )
        if small_images:
            stem = self.net.resnet.embedder
            stem.embedder.convolution = nn.Conv2d(3, stem_width, kernel_size=3, padding=1, bias=False)
            stem.register_module("pooler", nn.Identity())

    @override
    def forward(self, pixels: Tensor) -> Tensor:
        return self.net(pixel_values=pixels).logits


class VGG(nn.Module):
    """VGG with batch normalization; VGG-19 by default (Simonyan and Zisserman, 2015, configuration E).

    Args:
        classes: Number of classes.
        depths: Convolutions in each stage; a stage ends with a pooling that halves the image.
        widths: Channels of each stage.
        pooled: Height and width that the features are averaged to; 7 for 224x224 pixels, 1 for 32x32.
        hidden: Width of the two fully connected layers.
        dropout: Share of their outputs that is dropped.
    """

    def __init__(
        self,
        classes: int,
        depths: Sequence[int] = (2, 2, 4, 4, 4),
        widths: Sequence[int] = (64, 128, 256, 512, 512),
        pooled: int = 7,
        hidden: int = 4096,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        if len(depths) != len(widths):
            raise ValueError(f"depths={list(depths)} and widths={list(widths)} must have one entry for each stage")
        layers: list[nn.Module] = []
        channels = 3
        for depth, width in zip(depths, widths, strict=True):
            for _ in range(depth):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(pooled), nn.Flatten())
        self.classifier = nn.Sequential(
            *(nn.Linear(channels * pooled**2, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout)),
            *(nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout)),
            nn.Linear(hidden, classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    @override
    def forward(self, pixels: Tensor) -> Tensor:
        return self.classifier(self.features(pixels))


class ViT(nn.Module):
    """Vision transformer of ``transformers`` (Dosovitskiy et al., 2021); ViT-large with 16x16 patches by default.

    Args:
        classes: Number of classes.
        hidden: Width.
        layers: Number of blocks.
        heads: Attention heads.
        intermediate: Width of the layer inside each block's feed-forward part.
        image_size: Height and width of the images in pixels.
        patch_size: Height and width of a patch in pixels.
        pretrained: Folder with ``config.json`` and ``model.safetensors`` of the same sizes; a head for another number
            of classes is replaced. Nothing: random weights.
    """

    def __init__(
        self,
        classes: int,
        hidden: int = 1024,
        layers: int = 24,
        heads: int = 16,
        intermediate: int = 4096,
        image_size: int = 224,
        patch_size: int = 16,
        pretrained: Path | None = None,
    ) -> None:
        super().__init__()
        config = ViTConfig(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=intermediate,
            image_size=image_size,
            patch_size=patch_size,
            id2label=_names(classes),
        )
        self.net = build(
            ViTForImageClassification, config, pretrained, "google", "model.network.pretrained", new="classifier"
        )

    @override
    def forward(self, pixels: Tensor) -> Tensor:
        return self.net(pixel_values=pixels).logits
