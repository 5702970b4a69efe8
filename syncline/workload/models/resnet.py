"""Residual networks (He et al. 2015): 18 layers for small and for large images, 50 layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from syncline.workload.models.basics import start_weights

Block = Callable[[int, int, int], list[nn.Module]]
"""block(channels, width, stride): the layers of a residual branch."""


class Residual(nn.Module):
    """The input, and what a few layers add to it. Where the shape changes, the input is projected."""

    def __init__(self, layers: list[nn.Module], channels: tuple[int, int], stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        same = stride == 1 and channels[0] == channels[1]
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(*channels, 1, stride))

    def forward(self, values: Tensor) -> Tensor:
        return torch.relu(self.layers(values) + self.shortcut(values))


class ResNet(nn.Module):
    def __init__(self, stem: list[nn.Module], stages: list[list[nn.Module]], width: int, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(*stem)
        self.stages = nn.Sequential(*[nn.Sequential(*blocks) for blocks in stages])
        self.classifier = nn.Linear(width, num_classes)
        start_weights(self)

    def forward(self, images: Tensor) -> Tensor:
        features = self.stages(self.stem(images)).mean((2, 3))
        logits: Tensor = self.classifier(features)
        return logits


def resnet18(num_classes: int = 10) -> nn.Module:
    """For small images: the first layer keeps rows and columns; 11,173,962 parameters."""
    stem = [*_convolution(3, 64, 3), nn.ReLU(inplace=True)]
    return ResNet(stem, _stages(_basic, (2, 2, 2, 2), 1), 512, num_classes)


def resnet18_imagenet(num_classes: int = 1000) -> nn.Module:
    """For large images: the first layers divide rows and columns by four; 11,689,512 parameters."""
    return ResNet(_large_stem(), _stages(_basic, (2, 2, 2, 2), 1), 512, num_classes)


def resnet50(num_classes: int = 1000) -> nn.Module:
    """Three layers a block, the middle one strided; 25,557,032 parameters."""
    return ResNet(_large_stem(), _stages(_bottleneck, (3, 4, 6, 3), 4), 2048, num_classes)


def _large_stem() -> list[nn.Module]:
    return [*_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]


def _stages(block: Block, lengths: tuple[int, ...], expansion: int) -> list[list[nn.Module]]:
    stages, channels = [], 64
    for stage, length in enumerate(lengths):
        width = 64 * 2**stage
        blocks: list[nn.Module] = []
        for index in range(length):
            stride = 2 if stage and index == 0 else 1
            blocks.append(Residual(block(channels, width, stride), (channels, width * expansion), stride))
            channels = width * expansion
        stages.append(blocks)
    return stages


def _basic(channels: int, width: int, stride: int) -> list[nn.Module]:
    return [*_convolution(channels, width, 3, stride), nn.ReLU(inplace=True), *_convolution(width, width, 3)]


def _bottleneck(channels: int, width: int, stride: int) -> list[nn.Module]:
    return [
        *(*_convolution(channels, width, 1), nn.ReLU(inplace=True)),
        *(*_convolution(width, width, 3, stride), nn.ReLU(inplace=True)),
        *_convolution(width, 4 * width, 1),
    ]


def _convolution(channels: int, width: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(width),
    ]
