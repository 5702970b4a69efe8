"""Recipes: what a plan's names mean in torch."""

from __future__ import annotations

import torch
from torch import nn

from syncline.plan import Plan
from syncline.workload.models import build_model


def make_model(plan: Plan, device: torch.device) -> nn.Module:
    """The plan's model with the seed's weights, in training mode."""
    model = build_model(plan.model, seed=plan.seed, channels_last=plan.channels_last)
    return model.to(device).train()


def make_optimizer(plan: Plan, model: nn.Module) -> torch.optim.Optimizer:
    """course: plain SGD with momentum at a constant rate."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(
        trained,
        lr=plan.optimizer.learning_rate,
        momentum=plan.optimizer.momentum,
        weight_decay=plan.optimizer.weight_decay,
    )
