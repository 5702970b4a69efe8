"""Recipes: what a plan's optimiser settings mean in torch. The named ones stand in words.RECIPES.

The learning rate of a step follows from its number alone: nothing to advance, nothing to checkpoint.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from syncline.optimizers import Optimizer
from syncline.plan import Plan
from syncline.workload.models import build_model
from syncline.workload.recorded import load_times
from syncline.workload.replay import ReplayedModel, ReplayedOptimizer
from syncline.workload.tasks import Task

CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
}
REFERENCE_BATCH = 256
START_OF_CYCLE = 1 / 25
"""Of the peak, as in torch's OneCycleLR."""


def make_model(plan: Plan, device: torch.device, task: Task | None = None) -> nn.Module:
    """The plan's model with the seed's weights, for the task's inputs and classes, in training mode."""
    if plan.replayed:
        return ReplayedModel(load_times(plan.compute))
    model = build_model(plan.model, seed=plan.seed, channels_last=plan.channels_last, task=task)
    if plan.optimizer.init == "kaiming-fan-out":
        kaiming_fan_out(model, seed=plan.seed)
    return model.to(device).train()


def kaiming_fan_out(model: nn.Module, *, seed: int) -> None:
    """Variance 2 / fan-out for every convolution, so that gradients keep their size on the way back; bias 0."""
    stream = torch.Generator().manual_seed(seed)
    for layer in model.modules():
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            # Drawn aside: in place, the layout of the weight in memory would decide which number goes where.
            drawn = torch.empty(layer.weight.shape)
            nn.init.kaiming_normal_(drawn, mode="fan_out", nonlinearity="relu", generator=stream)
            layer.weight.data.copy_(drawn)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def make_optimizer(plan: Plan, model: nn.Module) -> torch.optim.Optimizer:
    """The plan's. Its rate is set before every step."""
    if isinstance(model, ReplayedModel):
        return ReplayedOptimizer(model)
    settings = plan.optimizer
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = trained if settings.decay_all else _with_and_without_decay(trained)
    options = {"lr" if name == "learning_rate" else name: value for name, value in settings.options.items()}
    # One pass over the weights instead of four. It reads gradients as they lie in memory, so they must have the
    # parameters' strides, as those of all methods have.
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in trained)
    return CLASSES[settings.name](groups, **options, fused=fused or None)  # type: ignore[call-arg]


def _with_and_without_decay(trained: list[nn.Parameter]) -> list[dict[str, object]]:
    """A penalty on biases and on the scale of a norm holds the model back and regularises nothing."""
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    vectors = [parameter for parameter in trained if parameter.dim() <= 1]
    groups: list[dict[str, object]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def learning_rate(settings: Optimizer, step: int, total_steps: int, global_batch: int, steps_per_epoch: int) -> float:
    """The rate of one step, the first being 0. Pure."""
    base = settings.learning_rate
    peak = base * global_batch / REFERENCE_BATCH if settings.linear_scaling else base
    if settings.schedule == "one-cycle":
        return _one_cycle(peak, step, total_steps, settings.peak_at)
    warm = round(settings.warmup_epochs * steps_per_epoch) if settings.warmup != "none" else 0
    low = min(base, peak)
    if step < warm:
        return low + (peak - low) * step / warm if settings.warmup == "gradual" else low
    if settings.schedule == "cosine":
        return _half_cosine(peak, 0.0, (step - warm) / max(1, total_steps - warm))
    return peak


def _one_cycle(peak: float, step: int, total_steps: int, peak_at: float) -> float:
    """Up to the peak and down to 0, each as a half cosine; the last step is the one before 0."""
    top = peak_at * total_steps
    if step < top:
        return _half_cosine(START_OF_CYCLE * peak, peak, step / top)
    return _half_cosine(peak, 0.0, (step - top) / (total_steps - top))


def _half_cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2
