"""Convolutional networks with normalisation, for 8x8 images: what people train with AdamW."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

Norm = Callable[[int], nn.Module]


def grouped(channels: int) -> nn.Module:
    """Group normalisation (Wu and He, ECCV 2018) in four groups."""
    return nn.GroupNorm(4, channels)


class _Residual(nn.Module):
    """Two convolutions beside a shortcut (He et al., CVPR 2016).

    Args:
        channels: Of its input.
        width: Of its output.
        stride: Of the first convolution.
        norm: Makes a normalisation of so many channels.
    """

    def __init__(self, channels: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
            norm(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            norm(width),
        )
        same = channels == width and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, width, 1, stride, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


class ResidualNet(nn.Module):
    """A residual network; 0.08 M parameters as it is.

    Args:
        norm: Makes a normalisation of so many channels.
        widths: Channels of the blocks; all but the first halve the image.
    """

    def __init__(self, norm: Norm = nn.BatchNorm2d, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        blocks: list[nn.Module] = [nn.Conv2d(1, widths[0], 3, padding=1, bias=False), norm(widths[0]), nn.ReLU()]
        channels = widths[0]
        for place, width in enumerate(widths):
            blocks.append(_Residual(channels, width, 1 + (place > 0), norm))
            channels = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, 10)

    @override
    def forward(self, x: Tensor) -> Tensor:
        classes: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return classes


class UNet(nn.Module):
    """An encoder and a decoder with skips (Ronneberger et al., MICCAI 2015); 0.04 M parameters as it is.

    Args:
        width: Channels at full size; twice as many at half of it, and at a quarter.
    """

    def __init__(self, width: int = 12) -> None:
        super().__init__()

        def block(channels: int, wide: int) -> nn.Sequential:
            steps = (nn.Conv2d(channels, wide, 3, padding=1), grouped(wide), nn.SiLU())
            return nn.Sequential(*steps, nn.Conv2d(wide, wide, 3, padding=1), grouped(wide), nn.SiLU())

        self.down = nn.ModuleList([block(1, width), block(width, 2 * width), block(2 * width, 2 * width)])
        self.up = nn.ModuleList([block(4 * width, width), block(2 * width, width)])
        self.out = nn.Conv2d(width, 1, 1)

    @override
    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for place, block in enumerate(self.down):
            x = block(functional.avg_pool2d(x, 2) if place else x)
            skips.append(x)
        x = skips.pop()
        for block in self.up:
            x = block(torch.cat([functional.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        noise: Tensor = self.out(x)
        return noise
