"""Updates that were asked for earlier: an optimiser's step, applied to a few parameters at a time, as it was meant.

`optimizer.step()` freezes every option of every group (a scheduler writes the next rate right after it). A *view* of
the optimiser, of its own class and with its own state, then steps any of the parameters with those options. For the
optimisers of torch.optim, which treat each parameter by itself, that equals one whole step to the bit.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from syncline.sync.sparse import sparse_weights

NOT_BY_PARAMETER = ("LBFGS",)
"""Optimisers of torch that look at all gradients at once."""


class LateUpdates:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        # A copy of an optimiser is made of its options, state and groups alone. What schedulers and profilers put on
        # the original, a wrapped `step` among it, is not part of it; its hooks must not run again either.
        self._view = copy.copy(optimizer)
        self._view._optimizer_step_pre_hooks = OrderedDict()
        self._view._optimizer_step_post_hooks = OrderedDict()
        self._frozen: list[dict[str, Any]] = []

    def group_of(self) -> dict[int, int]:
        """By id of the parameter, the number of its group."""
        groups = enumerate(self._optimizer.param_groups)
        return {id(parameter): number for number, group in groups for parameter in group["params"]}

    def freeze(self) -> None:
        """The options of this moment are those of the step; tensors among them are copied."""
        self._groups = self.group_of()
        self._frozen = [
            {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in self._optimizer.param_groups
        ]
        self._view.state = self._optimizer.state  # loading a checkpoint replaces it

    def apply(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        """Step these parameters. Their own `.grad` is left as it was: it may belong to a later backward."""
        before = [parameter.grad for parameter in parameters]
        by_group: dict[int, list[nn.Parameter]] = {}
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
            by_group.setdefault(self._groups[id(parameter)], []).append(parameter)
        self._view.param_groups = [{**self._frozen[group], "params": own} for group, own in by_group.items()]
        # State that is born in an evaluation would be an inference tensor, and autocast changes what some compute.
        with torch.inference_mode(False), torch.autocast(parameters[0].device.type, enabled=False):
            self._view.step()
        for parameter, own in zip(parameters, before, strict=True):
            parameter.grad = own
        if torch.is_autocast_enabled(parameters[0].device.type):
            torch.clear_autocast_cache()  # it may hold a weight as it was before its update


def why_not(
    optimizer: torch.optim.Optimizer, model: nn.Module, trained: Sequence[tuple[str, nn.Parameter]]
) -> str | None:
    """What keeps updates of these parameters of the model from being applied late; None if nothing does."""
    if any(_is_compiled(module) for module in model.modules()):
        return "a module is compiled, so its calls cannot be seen"
    sparse = sparse_weights(model)
    kind = type(optimizer)
    by_parameter = kind.__module__.startswith("torch.optim") and kind.__name__ not in NOT_BY_PARAMETER
    if not getattr(optimizer, "per_parameter", by_parameter):
        return f"{kind.__name__} may look at all gradients at once"
    groups = LateUpdates(optimizer).group_of()
    for name, parameter in trained:
        if id(parameter) not in groups:
            return f"parameter {name} is not in the optimizer"
        if id(parameter) in sparse:
            return f"the gradient of {name} is sparse"
    return None


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
