"""The two smallest models, and the weights that networks of rectifiers start from."""

from __future__ import annotations

import math

from torch import nn


def start_weights(model: nn.Module) -> None:
    """Convolutions: normal with variance 2 / fan-out, so that gradients keep their size. Linear layers: small normal
    numbers. Biases 0. Norms start at 1 and 0 as torch makes them."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.01)
        if isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None:
            nn.init.zeros_(layer.bias)


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
