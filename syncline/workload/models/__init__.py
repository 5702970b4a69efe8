"""Models by name, or a user's own as module:callable. One small file for each family."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from syncline.errors import PlanError
from syncline.workload.inputs import usual_input
from syncline.workload.models.basics import cnn, mlp
from syncline.workload.models.bert import bert_base, bert_small
from syncline.workload.models.inception import InceptionV3
from syncline.workload.models.resnet import resnet18, resnet18_imagenet, resnet50
from syncline.workload.models.vgg import VGG11, VGG16, vgg11_quarter
from syncline.workload.tasks import Task, classification, masked_language
from syncline.workload.user_code import accepted, load_callable, parameters_of

BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "vgg11": VGG11,
    "vgg11-quarter": vgg11_quarter,
    "vgg16": VGG16,
    "resnet18": resnet18,
    "resnet18-imagenet": resnet18_imagenet,
    "resnet50": resnet50,
    "inception-v3": InceptionV3,
    "bert-base": bert_base,
    "bert-small": bert_small,
    "cnn": cnn,
    "mlp": mlp,
}
MASKED_SHARE = 0.15
"""Of the tokens of a text, those to guess; the figure of the BERT paper."""


def build_model(name: str, *, seed: int, channels_last: bool = False, task: Task | None = None) -> nn.Module:
    """A model with weights from the seed: the same on every rank. Leaves torch's random state as it was.

    Its width at the end and, where the model depends on it, its input come from the task.
    """
    builder: Callable[..., nn.Module] = BUILDERS.get(name) or load_callable(name, "model")
    task = task or usual_task(name)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = builder(**_accepted(builder, {"num_classes": task.num_classes, "input_shape": task.input_shape}))
    if not isinstance(model, nn.Module):
        raise PlanError(f"model {name!r} gave a {type(model).__name__}, not a torch.nn.Module.")
    return model.to(memory_format=torch.channels_last) if channels_last else model  # type: ignore[call-overload]


def usual_task(name: str) -> Task:
    """What a model is known for; CIFAR-10's task for a user's own."""
    usual = usual_input(name)
    if usual.unit == "images":
        return classification(usual.num_classes, (3, usual.size, usual.size))
    return masked_language(usual.num_classes, usual.size, num_masked(usual.size))


def num_masked(length: int) -> int:
    """The same for every text of this length, so that texts weigh the same."""
    return max(1, round(MASKED_SHARE * length))


def _accepted(builder: Callable[..., nn.Module], offered: dict[str, Any]) -> dict[str, Any]:
    """Of what the task says, that which the builder has a parameter for.

    A function with `**kwargs` gets num_classes: torchvision's and timm's take it that way.
    """
    kinds = {parameter.kind for parameter in parameters_of(builder).values()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds and not inspect.isclass(builder)
    return accepted(builder, offered) | ({"num_classes": offered["num_classes"]} if takes_any else {})
