"""What each model is known to be trained on: taken where the data leaves it open. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from syncline.errors import PlanError
from syncline.plan import Plan


@dataclass(frozen=True)
class Usual:
    """A model's usual input and the width of its answer."""

    unit: Literal["images", "tokens"]
    size: int
    """Rows and columns of an image, or tokens of a text."""
    num_classes: int
    """Labels, or the vocabulary."""


CIFAR = Usual("images", 32, 10)
IMAGENET = Usual("images", 224, 1000)
TEXT = Usual("tokens", 128, 30_522)

USUAL = {
    "vgg11": CIFAR,
    "vgg11-quarter": CIFAR,
    "vgg16": IMAGENET,
    "resnet18": CIFAR,
    "resnet18-imagenet": IMAGENET,
    "resnet50": IMAGENET,
    "inception-v3": Usual("images", 299, 1000),
    "bert-base": TEXT,
    "bert-small": TEXT,
    "cnn": CIFAR,
    "mlp": CIFAR,
}


def usual_input(model: str) -> Usual:
    """CIFAR-10's for a user's own model."""
    return USUAL.get(model, CIFAR)


def image_size(plan: Plan) -> int:
    """The plan's, or that of its model."""
    return plan.image_size or usual_input(plan.model).size


def sequence_length(plan: Plan) -> int:
    """The plan's, or that of its model; 128 for a user's own."""
    usual = usual_input(plan.model)
    return plan.sequence_length or (usual.size if usual.unit == "tokens" else TEXT.size)


def is_cifar_shaped(plan: Plan) -> bool:
    """Whether made data for the model is like CIFAR-10: small images in ten classes."""
    usual = usual_input(plan.model)
    classes = plan.num_classes or usual.num_classes
    return plan.data != "synthetic-ages" and Usual(usual.unit, image_size(plan), classes) == CIFAR


def check_input(plan: Plan) -> None:
    """Refuse data that the model cannot read, and keys that the data has no use for."""
    usual = usual_input(plan.model)
    own = plan.has_own_data
    texts = plan.data == "text" or (plan.data in ("auto", "synthetic") and usual.unit == "tokens")
    if plan.model in USUAL and not own and texts != (usual.unit == "tokens"):
        kind = "texts" if usual.unit == "tokens" else "images"
        fitting = "text or synthetic" if usual.unit == "tokens" else "cifar10 or synthetic"
        raise PlanError(
            f"model {plan.model} reads {kind}, but data {plan.data} is not {kind}.", action=f"Use data {fitting}."
        )
    if plan.data == "text" and plan.data_dir is None:
        raise PlanError("data text needs a text.", action="Give the file, or a folder of .txt files, as data_dir.")
    useless = {
        "image_size": texts or own,
        "sequence_length": not texts,
        "num_classes": plan.data not in ("synthetic", "auto"),
    }
    for key, is_useless in useless.items():
        value = getattr(plan, key)
        if is_useless and value is not None:
            raise PlanError(f"{key} {value} cannot be had with data {plan.data}.", action=f"Leave {key} out.")
