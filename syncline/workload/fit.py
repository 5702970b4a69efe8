"""Does a model take what a run will give it? Asked before training, on shapes alone: nothing is computed.

Batch norm needs more than one value per channel, which a layer without rows and columns only has with two samples.
The shards of a batch may differ by one sample and the last batch of an epoch is smaller, so a run could fail hours
after its start.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.func import functional_call

from syncline.errors import PlanError
from syncline.plan import Plan
from syncline.workload.models import BUILDERS
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
            raise PlanError(f"model {name} cannot take inputs of {size}: {cause}.", action=_larger(task))
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
            return f"Take a global batch of {batch}."
    return f"Take fewer workers: {sharding.num_samples} samples are too few for so many."


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
