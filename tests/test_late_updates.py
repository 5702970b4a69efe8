"""Updates applied later, a few parameters at a time, equal one whole step to the bit, whatever torch's optimiser."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from syncline.sync.late_updates import LateUpdates, why_not

STEPS = 20
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd foreach": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=True),
    "sgd tensor rate": lambda groups: torch.optim.SGD(groups, lr=torch.tensor(0.1), momentum=0.9),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, weight_decay=0.01),
    "adamw amsgrad": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1, lr_decay=0.01),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
    "radam": lambda groups: torch.optim.RAdam(groups, lr=0.01),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.01),
    "adamax": lambda groups: torch.optim.Adamax(groups, lr=0.01),
    "adadelta": lambda groups: torch.optim.Adadelta(groups),
    "asgd": lambda groups: torch.optim.ASGD(groups, lr=0.1),
    "rprop": lambda groups: torch.optim.Rprop(groups, lr=0.01),
}


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    return [
        {"params": weights},
        {"params": [parameter for parameter in model.parameters() if parameter.dim() == 1], "lr": 0.05},
    ]


def gradients(model: nn.Module, step: int) -> list[torch.Tensor]:
    stream = torch.Generator().manual_seed(step)
    return [torch.randn(parameter.shape, generator=stream) for parameter in model.parameters()]


def rate(optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        value = 0.1 / (1 + step)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_late_updates_equal_a_whole_step_to_the_bit(name: str) -> None:
    """The rate changes between the step and its application, and the state is loaded anew in the middle."""
    whole, late = net(), net()
    first, second = OPTIMIZERS[name](groups_of(whole)), OPTIMIZERS[name](groups_of(late))
    schedule = torch.optim.lr_scheduler.LambdaLR(second, lambda _: 1.0)  # puts a wrapped step on the optimiser
    updates = LateUpdates(second)
    for step in range(STEPS):
        rate(first, step)
        rate(second, step)
        given = gradients(whole, step)
        for parameter, gradient in zip(whole.parameters(), given, strict=True):
            parameter.grad = gradient.clone()
        first.step()
        updates.freeze()
        rate(second, step + 1)
        for parameter, gradient in reversed(list(zip(late.parameters(), given, strict=True))):
            updates.apply([parameter], [gradient.clone()])
            assert parameter.grad is None
        if step == STEPS // 2:
            second.load_state_dict(copy.deepcopy(first.state_dict()))
    for expected, parameter in zip(whole.parameters(), late.parameters(), strict=True):
        assert torch.equal(parameter, expected), schedule


def test_rate_that_is_read_late_does_not_equal() -> None:
    """The negative control of the test above."""
    whole, late = net(), net()
    first, second = OPTIMIZERS["sgd"](groups_of(whole)), OPTIMIZERS["sgd"](groups_of(late))
    updates = LateUpdates(second)
    for parameter, gradient in zip(whole.parameters(), gradients(whole, 0), strict=True):
        parameter.grad = gradient
    first.step()
    rate(second, 5)
    updates.freeze()
    updates.apply(list(late.parameters()), gradients(late, 0))
    assert not torch.equal(whole[0].weight, late[0].weight)


def test_gradient_of_a_later_backward_is_left_alone() -> None:
    model = net()
    updates = LateUpdates(torch.optim.SGD(model.parameters(), lr=0.1))
    updates.freeze()
    parameter = model[0].weight
    parameter.grad = later = torch.ones_like(parameter)
    updates.apply([parameter], [torch.zeros_like(parameter)])
    assert parameter.grad is later


def test_what_looks_at_all_gradients_at_once_or_at_none_of_ours_is_refused_with_its_reason() -> None:
    class Own(torch.optim.SGD):
        pass

    model = net()
    trained = list(model.named_parameters())
    assert why_not(torch.optim.AdamW(model.parameters()), model, trained) is None
    assert "LBFGS" in str(why_not(torch.optim.LBFGS(model.parameters()), model, trained))
    own = Own(model.parameters())
    assert "Own" in str(why_not(own, model, trained))
    own.per_parameter = True  # type: ignore[attr-defined]
    assert why_not(own, model, trained) is None
    assert "parameter 2.bias is not in" in str(why_not(torch.optim.SGD([*model.parameters()][:-1]), model, trained))
