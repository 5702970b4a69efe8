"""Small models without batch norm or dropout: a gradient does not depend on how a batch is split."""

from __future__ import annotations

import math

from torch import nn

CIFAR_SHAPE = (3, 32, 32)


def cnn(num_classes: int = 10, input_shape: tuple[int, ...] = CIFAR_SHAPE) -> nn.Module:
    """Two convolutions, each halving rows and columns, and a linear layer."""
    channels, *sides = input_shape
    positions = math.prod(-(-side // 4) for side in sides)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * positions, num_classes),
    )


def mlp(num_classes: int = 10, input_shape: tuple[int, ...] = CIFAR_SHAPE) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), 64), nn.ReLU(), nn.Linear(64, num_classes))
