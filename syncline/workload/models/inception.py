"""Inception-v3 (Szegedy et al. 2015) for images of 299x299, with the auxiliary head; 27,161,264 parameters.

In training forward returns (answer, auxiliary answer); the task adds the auxiliary loss with weight 0.4. In
evaluation it returns the answer alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, avg_pool2d, max_pool2d

from syncline.workload.models.basics import start_weights

Size = int | tuple[int, int]


class Convolution(nn.Sequential):
    """Convolution, batch norm, rectifier. `kernel` may be flat, as (1, 7); `same` keeps rows and columns."""

    def __init__(self, channels: int, width: int, kernel: Size, *, stride: int = 1, same: bool = True) -> None:
        rows, columns = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (rows // 2, columns // 2) if same else 0
        super().__init__(
            nn.Conv2d(channels, width, (rows, columns), stride, padding, bias=False),
            nn.BatchNorm2d(width, eps=0.001),
            nn.ReLU(inplace=True),
        )


def chain(channels: int, *steps: tuple[int, Size]) -> nn.Sequential:
    """Convolutions one after the other, each given as (width, kernel)."""
    layers = []
    for width, kernel in steps:
        layers.append(Convolution(channels, width, kernel))
        channels = width
    return nn.Sequential(*layers)


class Pooled(nn.Module):
    """Average of the neighbours, then one convolution."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.convolution = Convolution(channels, width, 1)

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.convolution(avg_pool2d(values, 3, stride=1, padding=1))
        return result


class Fork(nn.Module):
    """Two last convolutions side by side on what came before."""

    def __init__(self, before: nn.Module, channels: int) -> None:
        super().__init__()
        self.before = before
        self.flat = Convolution(channels, 384, (1, 3))
        self.tall = Convolution(channels, 384, (3, 1))

    def forward(self, values: Tensor) -> Tensor:
        values = self.before(values)
        return torch.cat([self.flat(values), self.tall(values)], 1)


class Strided(nn.Module):
    """A branch that ends in a 3x3 convolution of stride 2."""

    def __init__(self, before: nn.Module, channels: int, width: int) -> None:
        super().__init__()
        self.before = before
        self.last = Convolution(channels, width, 3, stride=2, same=False)

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.last(self.before(values))
        return result


class Branches(nn.Module):
    """Every branch on the same input, their channels one after the other."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, values: Tensor) -> Tensor:
        return torch.cat([branch(values) for branch in self.branches], 1)


def block_35(channels: int, pooled: int) -> nn.Module:
    """For 35x35 positions: 1x1, 5x5, two 3x3, and a pool."""
    return Branches(
        chain(channels, (64, 1)),
        chain(channels, (48, 1), (64, 5)),
        chain(channels, (64, 1), (96, 3), (96, 3)),
        Pooled(channels, pooled),
    )


def block_17(width: int) -> nn.Module:
    """For 17x17 positions: 7x7 convolutions taken apart into flat and tall ones."""
    flat, tall = (1, 7), (7, 1)
    return Branches(
        chain(768, (192, 1)),
        chain(768, (width, 1), (width, flat), (192, tall)),
        chain(768, (width, 1), (width, tall), (width, flat), (width, tall), (192, flat)),
        Pooled(768, 192),
    )


def block_8(channels: int) -> nn.Module:
    """For 8x8 positions: branches that fork at their end."""
    return Branches(
        chain(channels, (320, 1)),
        Fork(chain(channels, (384, 1)), 384),
        Fork(chain(channels, (448, 1), (384, 3)), 384),
        Pooled(channels, 192),
    )


def reduce_to_17() -> nn.Module:
    return Branches(
        Strided(nn.Identity(), 288, 384),
        Strided(chain(288, (64, 1), (96, 3)), 96, 96),
        nn.MaxPool2d(3, 2),
    )


def reduce_to_8() -> nn.Module:
    return Branches(
        Strided(chain(768, (192, 1)), 192, 320),
        Strided(chain(768, (192, 1), (192, (1, 7)), (192, (7, 1))), 192, 192),
        nn.MaxPool2d(3, 2),
    )


class AuxiliaryHead(nn.Module):
    """A second answer from the middle of the network, so that gradients reach its first layers; training only."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.narrow = Convolution(768, 128, 1)
        self.whole = Convolution(128, 768, 5, same=False)
        self.classifier = nn.Linear(768, num_classes)

    def forward(self, values: Tensor) -> Tensor:
        values = self.whole(self.narrow(avg_pool2d(values, 5, stride=3)))
        logits: Tensor = self.classifier(adaptive_avg_pool2d(values, 1).flatten(1))
        return logits


class InceptionV3(nn.Module):
    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.first = nn.Sequential(
            Convolution(3, 32, 3, stride=2, same=False), Convolution(32, 32, 3, same=False), Convolution(32, 64, 3)
        )
        self.second = nn.Sequential(Convolution(64, 80, 1), Convolution(80, 192, 3, same=False))
        self.to_17 = nn.Sequential(block_35(192, 32), block_35(256, 64), block_35(288, 64), reduce_to_17())
        self.at_17 = nn.Sequential(block_17(128), block_17(160), block_17(160), block_17(192))
        self.auxiliary = AuxiliaryHead(num_classes)
        self.at_8 = nn.Sequential(reduce_to_8(), block_8(1280), block_8(2048))
        self.dropout = nn.Dropout()
        self.classifier = nn.Linear(2048, num_classes)
        start_weights(self)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        values = max_pool2d(self.first(images), 3, 2)
        values = max_pool2d(self.second(values), 3, 2)
        values = self.at_17(self.to_17(values))
        auxiliary = self.auxiliary(values) if self.training else None
        values = adaptive_avg_pool2d(self.at_8(values), 1).flatten(1)
        answer: Tensor = self.classifier(self.dropout(values))
        return answer if auxiliary is None else (answer, auxiliary)
