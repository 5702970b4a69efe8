"""Models: the course's VGG-11 to the parameter, the same weights for a seed, and a user's own by module:callable."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from syncline.errors import PlanError
from syncline.plan import MODELS, Plan
from syncline.workload.models import BUILDERS, build_model
from syncline.workload.recipes import make_model, make_optimizer


def test_vgg11_has_the_parameters_of_the_course() -> None:
    assert sum(p.numel() for p in build_model("vgg11", seed=0).parameters()) == 9_231_114


def test_vgg11_has_the_layers_of_the_course() -> None:
    model = build_model("vgg11", seed=0)
    block = [nn.Conv2d, nn.BatchNorm2d, nn.ReLU]
    one, two = [*block, nn.MaxPool2d], [*block, *block, nn.MaxPool2d]
    leaves = [layer for layer in model.modules() if not list(layer.children())]
    assert [type(layer) for layer in leaves] == [*one, *one, *two, *two, *two, nn.Linear]
    convolutions = [layer for layer in leaves if isinstance(layer, nn.Conv2d)]
    assert [layer.out_channels for layer in convolutions] == [64, 128, 256, 256, 512, 512, 512, 512]
    assert {(layer.kernel_size, layer.padding, layer.stride) for layer in convolutions} == {((3, 3), (1, 1), (1, 1))}
    assert (leaves[-1].in_features, leaves[-1].out_features) == (512, 10)


@pytest.mark.parametrize("name", BUILDERS)
def test_models_classify_images_into_ten(name: str) -> None:
    assert build_model(name, seed=0)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_cnn_and_mlp_have_no_layer_that_looks_at_two_samples() -> None:
    for name in ("cnn", "mlp"):
        kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
        assert not any(isinstance(layer, kinds) for layer in build_model(name, seed=0).modules())


def test_line_on_vgg11_is_true() -> None:
    assert "9,231,114" in MODELS["vgg11"]


def test_seed_decides_the_weights_and_the_generator_is_left_alone() -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = build_model("cnn", seed=5).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12)
    again = build_model("cnn", seed=5).state_dict()
    other = build_model("cnn", seed=6).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["0.weight"], other["0.weight"])


def test_channels_last_changes_the_layout_and_no_value() -> None:
    plain, last = build_model("cnn", seed=5), build_model("cnn", seed=5, channels_last=True)
    assert last[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), last.parameters(), strict=True))


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"user_models_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Linear):\n    def __init__(self): super().__init__(3, 4)\n"
        "def build(): return nn.Linear(5, 6)\n"
        "def wrong(): return 'a model'\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.mark.parametrize(("attribute", "features"), [("Net", 3), ("build", 5)])
def test_own_model_by_module_and_callable(attribute: str, features: int, user_module: str) -> None:
    first, again = (build_model(f"{user_module}:{attribute}", seed=2) for _ in range(2))
    assert first.in_features == features
    assert torch.equal(first.weight, again.weight)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("{module}:missing", "missing"),
        ("{module}:", "cannot load"),
        ("{module}:number", "not callable"),
        ("{module}:wrong", "gave a str"),
        ("no_such_module_anywhere:build", "no_such_module_anywhere"),
        (":build", "cannot load"),
        (".relative:build", "cannot load"),
    ],
)
def test_wrong_model_is_a_plan_error(name: str, words: str, user_module: str) -> None:
    with pytest.raises(PlanError, match=words) as error:
        build_model(name.format(module=user_module), seed=0)
    assert name.format(module=user_module) in str(error.value)


def test_recipe_is_the_plans_and_skips_frozen_parameters() -> None:
    plan = Plan(model="cnn", seed=4, optimizer={"learning_rate": 0.2, "momentum": 0.5, "weight_decay": 0.01})
    model = make_model(plan, torch.device("cpu"))
    assert model.training
    model[0].requires_grad_(False)
    (group,) = make_optimizer(plan, model).param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"], group["nesterov"]) == (0.2, 0.5, 0.01, False)
    assert len(group["params"]) == 4


def test_recipe_of_the_course_is_the_default() -> None:
    plan = Plan()
    assert (plan.optimizer.learning_rate, plan.optimizer.momentum, plan.optimizer.weight_decay) == (0.1, 0.9, 1e-4)
    assert (plan.model, plan.global_batch, plan.seed, plan.log_every) == ("vgg11", 256, 5000, 20)
