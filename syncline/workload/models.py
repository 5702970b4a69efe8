"""Models by name, or a user's own as module:callable."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from syncline.errors import PlanError

VGG11_CHANNELS = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")


class VGG11(nn.Module):
    """VGG-11 for 32x32 images: eight 3x3 convolutions with batch norm, one linear layer; 9,231,114 parameters."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(*_vgg_layers())
        self.classifier = nn.Linear(512, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.features(images)
        logits: Tensor = self.classifier(features.flatten(1))
        return logits


def _vgg_layers() -> list[nn.Module]:
    layers: list[nn.Module] = []
    channels = 3
    for item in VGG11_CHANNELS:
        if isinstance(item, int):
            layers += [nn.Conv2d(channels, item, 3, padding=1), nn.BatchNorm2d(item), nn.ReLU(inplace=True)]
            channels = item
        else:
            layers.append(nn.MaxPool2d(2))
    return layers


def cnn(num_classes: int = 10) -> nn.Module:
    """Two convolutions and a linear layer, no batch norm: its gradient does not depend on how a batch is split."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 8 * 8, num_classes),
    )


def mlp(num_classes: int = 10) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 64), nn.ReLU(), nn.Linear(64, num_classes))


BUILDERS: dict[str, Callable[[], nn.Module]] = {"vgg11": VGG11, "cnn": cnn, "mlp": mlp}


def build_model(name: str, *, seed: int, channels_last: bool = False) -> nn.Module:
    """A model with weights from the seed: the same on every rank. Leaves torch's random state as it was."""
    builder = BUILDERS.get(name) or _user_builder(name)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = builder()
    if not isinstance(model, nn.Module):
        raise PlanError(f"model {name!r} gave a {type(model).__name__}, not a torch.nn.Module.")
    return model.to(memory_format=torch.channels_last) if channels_last else model  # type: ignore[call-overload]


def _user_builder(name: str) -> Callable[[], nn.Module]:
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python script.py` would: people keep the model where they stand
    try:
        builder = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise PlanError(
            f"cannot load model {name!r}: {error}.",
            action="Give module:callable, with the module in this folder or on PYTHONPATH.",
        ) from error
    if not callable(builder):
        raise PlanError(f"model {name!r} is not callable.", action="Give a class or a function.")
    return builder  # type: ignore[no-any-return]
