"""What a model costs: parameters, bytes of gradients, floating-point operations per sample. Computes nothing real:
the model is built and run on torch's meta device, which knows shapes only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from syncline.workload.models import build_model, usual_task
from syncline.workload.tasks import Task

SAMPLES = 2
"""Batch norm takes no fewer."""


@dataclass(frozen=True)
class Profile:
    name: str
    parameters: int
    gradient_bytes: int
    """What one worker has to send or share in each step, before any compression."""
    forward_flops: int
    """Per sample; a multiplication and an addition count as two. Convolutions and matrix products only."""
    training_flops: int
    """Per sample, forward and backward."""
    activation_bytes: int
    """Per sample: what forward keeps for backward."""
    unit: str
    input_shape: tuple[int, ...]
    num_classes: int


def profile(name: str, task: Task | None = None) -> Profile:
    """Of a built-in model, by name."""
    task = task or usual_task(name)
    with torch.device("meta"):
        model = build_model(name, seed=0, task=task).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    forward, training, kept = _run(model, task)
    return Profile(
        name=name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        gradient_bytes=sum(parameter.numel() * parameter.element_size() for parameter in trained),
        forward_flops=forward // SAMPLES,
        training_flops=training // SAMPLES,
        activation_bytes=kept // SAMPLES,
        unit=task.unit,
        input_shape=task.input_shape,
        num_classes=task.num_classes,
    )


def _run(model: nn.Module, task: Task) -> tuple[int, int, int]:
    """Operations of forward and of both ways, and the bytes that wait for backward."""
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage  # several layers may keep the same memory
        return tensor

    with (
        torch.device("meta"),
        FlopCounterMode(display=False) as counter,
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        places = (SAMPLES,) if task.unit == "images" else (SAMPLES, *task.input_shape)
        loss = task.loss(model(task.example(SAMPLES)), torch.zeros(places, dtype=torch.int64))
        forward = counter.get_total_flops()
        loss.backward()
        total = counter.get_total_flops()
    return int(forward), int(total), sum(storage.nbytes() for storage in kept.values())
