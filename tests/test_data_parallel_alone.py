"""DataParallel in one process: a world of one, options, what is refused, state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Never, get_type_hints

import pytest
import torch
from helpers import MANY_WORKERS, assert_same, expected_mean, gradients, integer_loss, integer_model
from torch import nn

import syncline
from syncline.errors import PlanError, UsageError
from syncline.plan import Options
from syncline.sync.flat import FlatSync


def test_process_that_nobody_launched_is_a_world_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    model = integer_model("mlp")
    wrapped = syncline.DataParallel(model)
    assert (wrapped.rank, wrapped.world_size, wrapped.method) == (0, 1, "single")
    assert capsys.readouterr().err == "syncline: method single: there is one worker\n"
    integer_loss(wrapped, 0).backward()
    assert_same(gradients(model), expected_mean("mlp", 1))
    assert wrapped.describe() == "method single: there is one worker"
    wrapped.close()


@pytest.mark.parametrize("method", [method for method in MANY_WORKERS if method != "ddp"])
def test_every_method_runs_alone(method: str) -> None:
    model = integer_model("mlp")
    wrapped = syncline.DataParallel(model, method, optimizer=torch.optim.SGD(model.parameters()))
    with wrapped.no_sync():
        integer_loss(wrapped, 0, 0).backward()
    with wrapped.join():
        integer_loss(wrapped, 0, 1).backward()
    assert_same(gradients(model), expected_mean("mlp", 1, turns=2))
    wrapped.close()


def test_every_option_of_a_plan_is_a_keyword_with_the_same_type() -> None:
    spelled_out = get_type_hints(syncline.DataParallel.__init__)
    for name, field in Options.model_fields.items():
        assert spelled_out[name] == field.annotation, name
    assert spelled_out["refused"] is Never, "a type checker must flag what is neither"


def test_scripts_that_find_unused_parameters_run_alone_too() -> None:
    assert syncline.DataParallel(nn.Linear(2, 2), find_unused_parameters=True).method == "single"
    assert syncline.DataParallel(nn.Linear(2, 2), unused="zero").method == "single"


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("rign", {}, "unknown value 'rign'. Did you mean 'ring'?"),
        ("bucketed", {"bucket_cap": 3}, "unknown key 'options.bucket_cap'"),
        ("bucketed", {"bucket_cap_mb": -1}, "bucket_cap_mb"),
        ("all-reduce", {"bucket_cap_mb": 3}, "method all-reduce has no option bucket_cap_mb"),
        ("ring", {"collective": "tree"}, "method ring has no option collective"),
        ("auto", {"transfer_dtype": "bf16"}, "method auto has no option transfer_dtype"),
        ("bucketed", {"transfer_dtype": "bf16", "collective": "native"}, "native"),
        ("bucketed", {"device_ids": [0, 1]}, "one device per process"),
        ("ddp", {}, "ddp needs torch.distributed"),
    ],
)
def test_wrong_method_or_option_is_refused_by_name(method: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError) as error:
        syncline.DataParallel(nn.Linear(2, 2), method, **options)
    assert words in str(error.value)


def test_group_without_torch_distributed_is_refused() -> None:
    with pytest.raises(PlanError, match="not initialised"):
        syncline.DataParallel(nn.Linear(2, 2), process_group=object())


def test_half_of_a_launcher_s_variables_without_a_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="WORLD_SIZE"):
        syncline.DataParallel(nn.Linear(2, 2))


# State.


class HasModule(nn.Module):
    """All its own keys begin like those of torch's wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(3), HasModule, lambda: nn.Sequential(nn.Linear(2, 2))])
def test_state_has_the_module_s_keys_and_loads_both_kinds(make: Callable[[], nn.Module], prefix: str) -> None:
    source, target = make(), make()
    with torch.no_grad():
        for number, parameter in enumerate(source.parameters()):
            parameter.fill_(number + 7)
    state = {prefix + key: value for key, value in source.state_dict().items()}
    wrapped = syncline.DataParallel(target, "bucketed")
    wrapped.load_state_dict(state)
    assert wrapped.module is target
    assert list(wrapped.state_dict()) == list(source.state_dict())
    assert_same(dict(wrapped.state_dict()), dict(source.state_dict()))


def test_wrong_state_is_refused() -> None:
    wrapped = syncline.DataParallel(nn.Linear(2, 2), "bucketed")
    with pytest.raises(RuntimeError, match="other"):
        wrapped.load_state_dict({"other": torch.ones(1)})
    assert isinstance(wrapped.sync, FlatSync)


def test_wrapped_model_can_be_copied_and_evaluated() -> None:
    wrapped = syncline.DataParallel(nn.Sequential(nn.Dropout(), nn.Linear(2, 2)), "bucketed")
    assert not wrapped.eval().module[0].training
    twin = copy.deepcopy(wrapped.module)
    assert_same(dict(twin.state_dict()), dict(wrapped.state_dict()))
    with torch.no_grad():
        assert not wrapped(torch.ones(1, 2)).requires_grad
