"""Recipes: what each name stands for, the learning rate as a pure function of the step, decay, first weights."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from syncline.errors import PlanError
from syncline.optimizers import Optimizer
from syncline.plan import Plan, load_plan, parse_plan
from syncline.study.file import load_study
from syncline.study.lab_code import built_in_labs
from syncline.words import MODELS, RECIPES
from syncline.workload.data.made import text_batches
from syncline.workload.inputs import USUAL
from syncline.workload.models import build_model
from syncline.workload.models.bert import Bert
from syncline.workload.recipes import kaiming_fan_out, learning_rate, make_model, make_optimizer, set_learning_rate
from syncline.workload.sharding import Sharding


def rates(total: int = 100, batch: int = 256, per_epoch: int = 10, **settings: Any) -> list[float]:
    return [learning_rate(Optimizer(**settings), step, total, batch, per_epoch) for step in range(total)]


def test_course_is_what_it_was() -> None:
    plan = Plan(recipe="course")
    assert plan.optimizer == Optimizer() == Optimizer(**RECIPES["course"])
    assert set(rates(batch=8192)) == {0.1}
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    (group,) = make_optimizer(plan, model).param_groups
    assert (group["momentum"], group["weight_decay"], group["nesterov"], len(group["params"])) == (
        0.9,
        1e-4,
        False,
        4,
    )
    kept = make_model(Plan(model="cnn", recipe="course"), torch.device("cpu"))
    assert torch.equal(kept[0].weight, build_model("cnn", seed=5000)[0].weight)


def test_recipe_gives_the_settings_that_are_not_given() -> None:
    fast = parse_plan({"recipe": "fast", "optimizer": {"momentum": 0.8}}).optimizer
    assert (fast.momentum, fast.learning_rate, fast.weight_decay, fast.nesterov) == (0.8, 0.02, 5e-4, True)
    assert (fast.schedule, fast.peak_at, fast.label_smoothing, fast.decay_all) == ("one-cycle", 0.25, 0.1, False)
    assert load_plan(None, {"recipe": "fast", "optimizer.learning_rate": 0.01}).optimizer.learning_rate == 0.01
    assert Plan(recipe="fast").replace(seed=1).optimizer == Plan(recipe="fast").optimizer
    assert Plan().replace(recipe="fast").optimizer == Plan(recipe="fast").optimizer


def test_default_suits_what_the_model_reads() -> None:
    images = Plan().optimizer
    assert (images.name, images.learning_rate, images.linear_scaling, images.decay_all) == ("sgd", 0.02, True, False)
    texts = Plan(model="bert-small").optimizer
    assert (texts.name, texts.schedule, texts.linear_scaling, texts.decay_all) == ("adamw", "one-cycle", False, False)
    own = Plan(model="my.module:build", data="text", data_dir="x")
    assert own.optimizer == texts
    assert [plan.global_batch for plan in (Plan(), Plan(model="bert-base"), own)] == [256, 8, 8]
    assert Plan(model="bert-base", global_batch=256).global_batch == 256
    assert {name for name, model in MODELS.items() if model.texts} == {
        name for name, usual in USUAL.items() if usual.unit == "tokens"
    }
    given = Plan(optimizer={"learning_rate": 0.5})
    assert given.replace(data="synthetic").optimizer == given.optimizer, "settings that were given stay"
    assert given.replace(model="bert-base").optimizer == texts
    assert load_plan(given, {"model": "bert-base", "optimizer.eps": 1e-6}).optimizer.eps == 1e-6


def losses_of_bert(recipe: str, book: Path) -> list[float]:
    """One layer as wide as those of bert-small learns a text of few words."""
    plan = Plan(model="bert-small", data="text", data_dir=str(book), sequence_length=16, recipe=recipe, steps=40)
    batches = text_batches(plan)
    torch.manual_seed(0)
    model = Bert(batches.task.num_classes, num_layers=1, width=512, num_heads=8)
    optimizer, losses = make_optimizer(plan, model), []
    for step, shard in zip(range(40), Sharding(batches.num_train, 8, 1).epoch(0), strict=False):
        set_learning_rate(optimizer, learning_rate(plan.optimizer, step, 40, 8, 40))
        optimizer.zero_grad()
        inputs, targets = batches.train(shard)
        loss = batches.task.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_bert_learns_by_default_and_diverges_with_course(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    nouns, draw = ("cat", "dog", "man", "bird", "fish", "tree"), random.Random(0)
    book.write_text(". ".join(f"the {draw.choice(nouns)} saw a {draw.choice(nouns)}" for _ in range(2000)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on busy cores, threads that wait for each other take a minute
    try:
        learnt, diverged = losses_of_bert("default", book), losses_of_bert("course", book)
    finally:
        torch.set_num_threads(threads)
    assert learnt[0] > 5
    assert max(learnt[-10:]) < 3.5
    assert min(diverged[-10:]) > 10


@pytest.mark.parametrize("lab", built_in_labs())
def test_every_stage_of_a_lab_says_its_recipe(lab: str) -> None:
    """What a lab trains with does not change with the defaults."""
    _, study = load_study(lab)
    for stage in study.stage:
        recipe = {**study.plan, **stage.plan}.get("recipe")
        assert recipe == "course", stage.name


def test_peak_of_fast_is_higher_where_the_ramp_is_slow() -> None:
    peaks = [parse_plan({"recipe": "fast", "epochs": epochs}).optimizer.learning_rate for epochs in (1, 9, 10, 30)]
    assert peaks == [0.02, 0.02, 0.05, 0.05]
    assert parse_plan({"recipe": "fast", "steps": 9999}).optimizer.learning_rate == 0.02
    given = parse_plan({"recipe": "fast", "epochs": 10, "optimizer": {"learning_rate": 0.01}})
    assert given.optimizer.learning_rate == 0.01
    assert parse_plan({"recipe": "course", "epochs": 10}).optimizer == Optimizer()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"recipe": "slow"}, ["recipe", "'slow'", "course", "fast", "large-batch"]),
        ({"recipe": "fast", "optimizer": {"warmup": "gradual"}}, ["one-cycle", "warmup"]),
        ({"recipe": "fast", "optimizer": {"momentum": 0}}, ["nesterov", "momentum"]),
        ({"optimizer": {"schedule": "step"}}, ["optimizer.schedule", "'step'", "cosine"]),
        ({"optimizer": {"label_smoothing": 1}}, ["optimizer.label_smoothing", "1"]),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(PlanError) as error:
        parse_plan(settings)
    assert [word for word in words if word not in str(error.value)] == []


def test_linear_scaling_is_in_proportion_to_the_batch() -> None:
    assert rates(batch=1024, linear_scaling=True)[0] == pytest.approx(0.4)
    assert rates(batch=128, linear_scaling=True)[0] == pytest.approx(0.05)


def test_gradual_warmup_is_a_ramp_from_the_rate_of_batch_256() -> None:
    found = rates(batch=1024, linear_scaling=True, warmup="gradual", warmup_epochs=2.0)
    assert found[0] == pytest.approx(0.1)
    assert found[10] == pytest.approx(0.25)
    rises = [after - before for before, after in itertools.pairwise(found[:21])]
    assert rises == pytest.approx([0.3 / 20] * 20)
    assert found[20:] == pytest.approx([0.4] * 80)


def test_constant_warmup_jumps() -> None:
    found = rates(batch=1024, linear_scaling=True, warmup="constant", warmup_epochs=2.0)
    assert found == pytest.approx([0.1] * 20 + [0.4] * 80)


def test_cosine_goes_from_the_peak_to_nearly_nothing_after_the_warmup() -> None:
    found = rates(batch=512, linear_scaling=True, warmup="gradual", warmup_epochs=2.0, schedule="cosine")
    assert found[20] == max(found) == pytest.approx(0.2)
    assert found[60] == pytest.approx(0.1)
    assert 0 < found[-1] < 0.001
    plain = [0.05 * (1 + math.cos(math.pi * step / 100)) for step in range(100)]
    assert rates(schedule="cosine") == pytest.approx(plain)


def test_one_cycle_is_that_of_torch() -> None:
    """torch puts its last step on the bottom and counts phases from there; ours has one step more below it."""
    found = rates(total=101, schedule="one-cycle", learning_rate=0.04, peak_at=0.25)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    settings: dict[str, Any] = {"pct_start": 0.25, "div_factor": 25.0, "final_div_factor": 1e9}
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.04, total_steps=102, **settings)
    theirs = []
    for _ in range(101):
        theirs.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert found[0] == pytest.approx(0.04 / 25)
    assert max(found) == pytest.approx(0.04, rel=1e-3)
    assert found.index(max(found)) in (25, 26)
    # Peaks lie within a step of each other, and a step is at most a 16th of the rise.
    assert max(abs(one - other) for one, other in zip(found, theirs, strict=True)) < 0.04 / 16


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("total", [1, 2, 3, 7])
def test_short_runs_have_a_rate_for_every_step(name: str, total: int) -> None:
    settings = Plan(recipe=name).optimizer
    found = [learning_rate(settings, step, total, 256, 3) for step in range(total)]
    assert all(0 < rate <= settings.learning_rate for rate in found)


def test_biases_and_norms_are_not_decayed() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2))
    optimizer = make_optimizer(Plan(recipe="fast"), model)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    expected = {"0.weight": 5e-4, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0, "2.weight": 5e-4, "2.bias": 0.0}
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == expected
    set_learning_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_kaiming_fan_out_has_its_variance_whatever_the_layout() -> None:
    plain, last = (build_model("vgg11", seed=1, channels_last=layout) for layout in (False, True))
    state = torch.get_rng_state()
    for model in (plain, last):
        kaiming_fan_out(model, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), last.parameters(), strict=True))
    wide = plain.features[8]
    assert wide.weight.std().item() == pytest.approx(math.sqrt(2 / (256 * 9)), rel=0.02)
    assert wide.bias.abs().max() == 0
    assert not torch.equal(plain.classifier.weight, torch.zeros_like(plain.classifier.weight))
