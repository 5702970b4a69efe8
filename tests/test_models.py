"""Models: the course's VGG-11 to the parameter, the same weights for a seed, and a user's own by module:callable."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from syncline.errors import PlanError
from syncline.plan import Plan
from syncline.words import MODELS
from syncline.workload.dry_run import profile
from syncline.workload.models import BUILDERS, build_model, usual_task
from syncline.workload.recipes import make_model, make_optimizer
from syncline.workload.tasks import classification, masked_language


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


PARAMETERS = {
    "vgg11": 9_231_114,
    "vgg11-quarter": 579_786,
    "vgg16": 138_357_544,
    "resnet18": 11_173_962,
    "resnet18-imagenet": 11_689_512,
    "resnet50": 25_557_032,
    "inception-v3": 27_161_264,
    "bert-base": 109_514_298,
    "bert-small": 28_795_194,
    "cnn": 25_578,
    "mlp": 197_322,
}


@pytest.mark.parametrize("name", BUILDERS)
def test_number_of_parameters_is_the_published_one(name: str) -> None:
    found = profile(name)
    assert found.parameters == PARAMETERS[name]
    assert found.gradient_bytes == 4 * PARAMETERS[name]
    assert MODELS[name].num_parameters == PARAMETERS[name]


# Multiply-adds of the forward pass, in thousand millions, as torchvision documents them for its models.
@pytest.mark.parametrize(
    ("name", "multiply_adds"), [("vgg16", 15.47), ("resnet18-imagenet", 1.81), ("resnet50", 4.09), ("vgg11", 0.153)]
)
def test_operations_are_the_published_ones(name: str, multiply_adds: float) -> None:
    found = profile(name)
    assert found.forward_flops / 2e9 == pytest.approx(multiply_adds, rel=0.01)
    # Backward makes two products for each of forward, but for the gradient of the images, which nobody needs.
    assert 2.8 < found.training_flops / found.forward_flops <= 3.0


def test_operations_of_a_linear_model_are_counted_by_hand() -> None:
    found = profile("mlp")
    assert found.forward_flops == 2 * (3072 * 64 + 64 * 10)
    assert found.training_flops == found.forward_flops + 2 * (3072 * 64 + 2 * 64 * 10)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("classes", [None, 101])
def test_answers_are_as_wide_as_the_task(name: str, classes: int | None) -> None:
    task = usual_task(name)
    task = replace(task, num_classes=classes) if classes else task
    with torch.device("meta"):
        model = build_model(name, seed=0, task=task)
        inputs = task.example(2)
        trained, tested = model(inputs), model.eval()(inputs)
    places = () if task.unit == "images" else task.input_shape
    assert tested.shape == (2, *places, task.num_classes)
    heads = trained if isinstance(trained, tuple) else (trained,)
    assert [head.shape for head in heads] == [tested.shape] * (2 if name == "inception-v3" else 1)


@pytest.mark.parametrize("name", ["vgg11", "vgg16", "resnet18", "resnet50", "cnn", "mlp"])
def test_size_of_the_images_is_the_datas(name: str) -> None:
    task = classification(7, (3, 64, 64))
    with torch.device("meta"):
        assert build_model(name, seed=0, task=task)(task.example(2)).shape == (2, 7)


@pytest.mark.parametrize("name", ["resnet18", "bert-small"])
def test_weights_follow_from_the_seed_and_keep_the_size_of_what_passes(name: str) -> None:
    model, again, other = (build_model(name, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), again.parameters(), strict=True))
    first, another = (max(one.parameters(), key=torch.numel) for one in (model, other))
    assert not torch.equal(first, another)
    inputs = torch.randn(4, 3, 32, 32) if name == "resnet18" else torch.randint(100, (2, 32))
    answers = model(inputs)
    assert answers.isfinite().all()
    assert 0.01 < float(answers.detach().std()) < 2, answers.detach().std()


def test_tokens_and_answers_of_bert_share_their_matrix_and_places_count() -> None:
    model = build_model("bert-small", seed=1, task=masked_language(50, 16, 2)).eval()
    tokens = torch.randint(50, (1, 16))
    shuffled = tokens.flip(1)
    assert not torch.allclose(model(tokens), model(shuffled).flip(1), atol=1e-3)
    model(tokens).sum().backward()
    assert sum(parameter.shape == (50, 512) for parameter in model.parameters()) == 1
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_cnn_and_mlp_have_no_layer_that_looks_at_two_samples() -> None:
    for name in ("cnn", "mlp"):
        kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
        assert not any(isinstance(layer, kinds) for layer in build_model(name, seed=0).modules())


def test_line_on_vgg11_is_true() -> None:
    assert MODELS["vgg11"].about.endswith("batch norm, 9,231,114 parameters")


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
        "def wide(num_classes=3): return nn.Linear(5, num_classes)\n"
        "def through(**options): return nn.Linear(5, **{'out_features': options['num_classes']})\n"
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


@pytest.mark.parametrize(("attribute", "width"), [("build", 6), ("wide", 101), ("through", 101)])
def test_own_model_gets_the_number_of_classes_if_it_takes_it(attribute: str, width: int, user_module: str) -> None:
    task = classification(101, (3, 8, 8))
    assert build_model(f"{user_module}:{attribute}", seed=2, task=task).out_features == width


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
    settings = {"learning_rate": 0.2, "momentum": 0.5, "weight_decay": 0.01}
    plan = Plan(model="cnn", seed=4, recipe="course", optimizer=settings)  # type: ignore[arg-type]
    model = make_model(plan, torch.device("cpu"))
    assert model.training
    model[0].requires_grad_(False)
    (group,) = make_optimizer(plan, model).param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"], group["nesterov"]) == (0.2, 0.5, 0.01, False)
    assert len(group["params"]) == 4


def test_plan_of_defaults() -> None:
    plan = Plan()
    assert (plan.recipe, plan.optimizer.learning_rate, plan.optimizer.momentum) == ("default", 0.02, 0.9)
    assert (plan.model, plan.global_batch, plan.seed, plan.log_every) == ("vgg11", 256, 5000, 20)
