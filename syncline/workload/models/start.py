"""Weights to start from, as He et al. 2015 give them for networks of rectifiers."""

from __future__ import annotations

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
