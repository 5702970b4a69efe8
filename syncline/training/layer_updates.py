"""What part of an update each layer has: the step of an optimiser once more, layer by layer, each part timed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from syncline.sync.late_updates import LateUpdates
from syncline.workload.recipes import set_learning_rate


def parameters_by_layer(model: nn.Module) -> list[dict[str, nn.Parameter]]:
    """What each module holds itself; a tied parameter belongs to the first."""
    by_layer: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            by_layer.setdefault(name.rpartition(".")[0], {})[name] = parameter
    return list(by_layer.values())


def timed_updates(optimizer: torch.optim.Optimizer, layers: Sequence[Mapping[str, nn.Parameter]]) -> dict[str, float]:
    """Seconds by parameter: each layer is timed as a whole, and its parameters share that by size. The rate is 0:
    weights stay as the step left them."""
    rates = [group["lr"] for group in optimizer.param_groups]
    late = LateUpdates(optimizer)
    set_learning_rate(optimizer, 0.0)
    late.freeze()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    seconds: dict[str, float] = {}
    for layer in layers:
        held = {name: own for name, own in layer.items() if own.grad is not None}
        if not held:
            continue
        start_ns = time.monotonic_ns()
        late.apply(list(held.values()), [own.grad for own in held.values() if own.grad is not None])
        took_s, size = (time.monotonic_ns() - start_ns) / 1e9, sum(own.numel() for own in held.values())
        seconds |= {name: took_s * own.numel() / size for name, own in held.items()}
    return seconds
