"""The words that users type besides methods: models, data, recipes.

They are here so that a wrong word fails in milliseconds, before torch is loaded. A test keeps these tables
equal to what the stages implement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Model:
    """A built-in model; `workload/models` builds it."""

    description: str
    num_parameters: int
    texts: bool = False
    """It reads texts, not images."""

    @property
    def about(self) -> str:
        return f"{self.description}, {self.num_parameters:,} parameters"


MODELS = {
    "vgg11": Model("VGG-11 for 32x32 images with batch norm", 9_231_114),
    "vgg11-quarter": Model("VGG-11 with a quarter of the channels", 579_786),
    "vgg16": Model("VGG-16 for 224x224 images", 138_357_544),
    "resnet18": Model("ResNet-18 for 32x32 images", 11_173_962),
    "resnet18-imagenet": Model("ResNet-18 for 224x224 images", 11_689_512),
    "resnet50": Model("ResNet-50 for 224x224 images", 25_557_032),
    "inception-v3": Model("Inception-v3 for 299x299 images with its auxiliary head", 27_161_264),
    "bert-base": Model("BERT that guesses masked tokens, 12 layers", 109_514_298, texts=True),
    "bert-small": Model("BERT that guesses masked tokens, 4 layers", 28_795_194, texts=True),
    "cnn": Model("a small convolutional network without batch norm, where every method equals one worker", 25_578),
    "mlp": Model("two linear layers: the smallest thing that learns", 197_322),
}
DATA = {
    "auto": "CIFAR-10 if it is here or quick to download and suits the model, otherwise synthetic",
    "cifar10": "CIFAR-10, 32x32 colour images in 10 classes",
    "synthetic": "made up to fit the model: images of its size and classes, or texts",
    "synthetic-ages": "made-up images with ages 0 to 100",
    "imdb-wiki": "faces and ages, from the folder with wiki.mat or imdb.mat (data_dir)",
    "folder": "images in one folder per class (data_dir), like ImageNet, Imagenette and Tiny-ImageNet",
    "text": "a text file or a folder of them (data_dir): guess masked tokens",
}
IN_FILES = ("imdb-wiki", "folder")
"""Data whose images stay in their files until a batch needs them."""

BATCH_OF_TEXTS = 8
"""Default global batch of texts: each holds over a hundred tokens, and a small file is to give hundreds of steps."""

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9, "nesterov": False, "weight_decay": 1e-4},
    "adamw": {"learning_rate": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    "adam": {"learning_rate": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
}
"""Optimisers by name, with the options that each has and their defaults."""

RECIPES: dict[str, dict[str, Any]] = {
    "default": {},
    "course": {"learning_rate": 0.1, "momentum": 0.9, "weight_decay": 1e-4},
    "fast": {
        "learning_rate": 0.02, "linear_scaling": True, "schedule": "one-cycle", "peak_at": 0.25,
        "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4, "decay_all": False,
        "label_smoothing": 0.1, "init": "kaiming-fan-out",
    },
    "large-batch": {
        "learning_rate": 0.02, "linear_scaling": True, "schedule": "cosine", "warmup": "gradual",
        "warmup_epochs": 2.0, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4, "decay_all": False,
        "label_smoothing": 0.1, "init": "kaiming-fan-out",
    },
}  # fmt: skip
"""Optimiser settings by name; other settings have Optimizer's defaults. docs/recipes.md gives the reasons."""
DEFAULT_RECIPES: dict[str, dict[str, Any]] = {
    "images": {
        "learning_rate": 0.02, "linear_scaling": True, "schedule": "one-cycle", "peak_at": 0.25,
        "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4, "decay_all": False,
    },
    "texts": {
        "name": "adamw", "learning_rate": 2.5e-4, "schedule": "one-cycle", "peak_at": 0.1,
        "betas": (0.9, 0.98), "weight_decay": 0.01, "decay_all": False,
    },
}  # fmt: skip
"""Recipe `default`, by what the model reads."""
RECIPES_OF_TEN_EPOCHS: dict[str, dict[str, Any]] = {"fast": {"learning_rate": 0.05}}
"""Changes for runs of ten epochs or more, whose slower ramp tolerates a higher peak."""
