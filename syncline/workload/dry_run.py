"""What a model takes and what it costs, from shapes alone: nothing is computed.

Batch norm needs more than one value per channel, which a layer without rows and columns only has with two samples.
The shards of a batch may differ by one sample and the last batch of an epoch is smaller, so a run could fail hours
after its start; `check_fit` refuses it before training. `profile` counts parameters, gradients and operations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from syncline.errors import PlanError
from syncline.plan import Plan
from syncline.workload.models import BUILDERS, build_model, usual_task
from syncline.workload.sharding import Sharding
from syncline.workload.tasks import Task

ENOUGH = 2
"""Samples that satisfy batch norm, whatever the layer."""


def check_fit(plan: Plan, model: nn.Module, task: Task, sharding: Sharding, num_steps: int) -> None:
    """Refuse inputs that a built-in model cannot take, and a batch that is too small for a model's batch norm."""
    name = plan.model
    if name in BUILDERS:
        cause = _refusal(model, task, ENOUGH)
        if cause:
            size = "x".join(map(str, task.input_shape))
            raise PlanError(f"model {name} cannot process inputs of {size}: {cause}.", action=_larger(task))
    given = f"global batch {sharding.global_batch} on {sharding.world_size} workers"
    if plan.accumulate > 1:
        given += f" in {plan.accumulate} parts"
    # What batch norm sees at a time: a part of a shard; with statistics over the global batch, a part of that.
    ranks = 1 if plan.batch_norm == "sync" else sharding.world_size
    sharding = replace(sharding, rank=0, world_size=ranks * plan.accumulate)
    if smallest_shard(sharding, num_steps) >= ENOUGH or not _has_batch_norm(model) or not _refusal(model, task, 1):
        return
    full = min(size for size in sharding.shard_sizes(0) if size) < ENOUGH
    where = "leaves a worker" if full else f"leaves a worker, in the last step of an epoch of {sharding.num_samples},"
    raise PlanError(
        f"{given} {where} with 1 sample, and batch norm in model {name} needs at least {ENOUGH} per worker.",
        action=_next_that_fits(sharding, num_steps),
    )


def smallest_shard(sharding: Sharding, num_steps: int) -> int:
    """Samples of the smallest shard that a run of so many steps meets; ranks without any get stand-ins."""
    steps = {0, min(num_steps, sharding.steps_per_epoch) - 1}
    return min(size for step in steps for size in sharding.shard_sizes(step) if size)


def _next_that_fits(sharding: Sharding, num_steps: int) -> str:
    """The next larger global batch that leaves no worker with one sample; the run is taken to be as long."""
    for batch in range(sharding.global_batch + 1, sharding.num_samples + 1):
        if smallest_shard(replace(sharding, global_batch=batch), num_steps) >= ENOUGH:
            return f"Use a global batch of {batch}."
    return f"Use fewer workers: {sharding.num_samples} samples are too few for this many."


def _has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in model.modules())


def _refusal(model: nn.Module, task: Task, count: int) -> str:
    """Why the model does not take so many samples; empty if it does. Leaves no trace in the model.

    A user's model may fail on the meta device for reasons of its own, so only batch norm's own words count there.
    """
    shapes = {name: tensor.to("meta") for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    with torch.random.fork_rng(), torch.no_grad():
        try:
            functional_call(model, shapes, (task.example(count).to("meta"),))
        except Exception as error:
            words = str(error).partition("\n")[0].rstrip(".")
            return words if count == ENOUGH or "more than 1 value per channel" in words else ""
    return ""


def _larger(task: Task) -> str:
    return (
        "Set a larger image_size, or take data of larger images." if task.unit == "images" else "Take shorter texts."
    )


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
    forward, training, stored_bytes = _run(model, task)
    return Profile(
        name=name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        gradient_bytes=sum(parameter.numel() * parameter.element_size() for parameter in trained),
        forward_flops=forward // SAMPLES,
        training_flops=training // SAMPLES,
        activation_bytes=stored_bytes // SAMPLES,
        unit=task.unit,
        input_shape=task.input_shape,
        num_classes=task.num_classes,
    )


def _run(model: nn.Module, task: Task) -> tuple[int, int, int]:
    """Operations of forward and of both ways, and the bytes that wait for backward."""
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            storages[storage._cdata] = storage  # several layers may keep the same memory
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
    return int(forward), int(total), sum(storage.nbytes() for storage in storages.values())
