"""Optimisers and clipping: options by name, the same step at any world size, resumed to the bit, decay."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import on_threads, small_batches
from test_step import shard_of, state, template
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import syncline
from syncline.comm import Communicator
from syncline.errors import PlanError
from syncline.folders import LocalFolder
from syncline.optimizers import Optimizer
from syncline.plan import Plan, load_plan, parse_plan, stored_plan
from syncline.spans import EventLog
from syncline.study.cells import Cell
from syncline.sync import make_sync
from syncline.training import checkpoint
from syncline.training.checkpoint import Progress
from syncline.training.settings import step_settings
from syncline.training.step import Worker, train_step
from syncline.words import OPTIMIZERS
from syncline.workload.recipes import CLASSES, make_optimizer
from syncline.workload.sharding import Sharding

SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
    "adamw": {"learning_rate": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    "adam": {"learning_rate": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
}
"""None of them the default."""
CLIP_NORM = 0.05
"""Below the norm of every gradient here, so that it tells."""


def plan_of(name: str, **settings: Any) -> Plan:
    return Plan(model="cnn", optimizer={"name": name, "decay_all": False, **SETTINGS[name], **settings})


OPTIONS: dict[str, dict[str, Any]] = {"ahead": {"barrier": False, "chunk_mb": 0.01}}
"""So that updates happen in the next forward, as they do where the link is slow."""


def make_worker(plan: Plan, method: str, comm: Communicator, log: EventLog) -> Worker:
    model = copy.deepcopy(template("cnn"))
    sync = make_sync(method, comm, **OPTIONS.get(method, {}))
    batches = small_batches().in_dtype(torch.float64)
    module = sync.attach(model)
    return Worker(model, module, sync, make_optimizer(plan, model), batches, log, **step_settings(plan))


def one_worker(name: str, steps: int, clip_norm: float | None) -> dict[str, Tensor]:
    """In plain PyTorch on the whole batch."""
    model, batches = copy.deepcopy(template("cnn")), small_batches().in_dtype(torch.float64)
    given = SETTINGS[name]
    options = {key: value for key, value in given.items() if key not in ("learning_rate", "weight_decay")}
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": given["weight_decay"]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    torch_name = {"sgd": "SGD", "adamw": "AdamW", "adam": "Adam"}[name]
    optimizer = getattr(torch.optim, torch_name)(groups, lr=given["learning_rate"], **options)
    for step in range(steps):
        images, labels = batches.train(next(Sharding(200, 7, 7).epoch(0, step)))
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    return state(model)


def test_every_optimiser_has_a_class_and_settings_here() -> None:
    assert set(OPTIMIZERS) == set(CLASSES) == set(SETTINGS)


@pytest.mark.parametrize("clip_norm", [None, CLIP_NORM])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("method", ["all-reduce", "bucketed", "shared-memory", "ahead"])
def test_any_world_takes_the_steps_of_one_worker(name: str, method: str, clip_norm: float | None) -> None:
    def live(comm: Communicator, log: EventLog) -> dict[str, Tensor]:
        worker = make_worker(plan_of(name, clip_norm=clip_norm), method, comm, log)
        for step in range(3):
            train_step(worker, shard_of(comm, 7, step))
        worker.sync.synchronize()
        return state(worker.model)

    expected = one_worker(name, 3, clip_norm)
    found = on_threads(3, live)
    for own in found:
        for key, tensor in expected.items():
            torch.testing.assert_close(own[key], tensor, rtol=0, atol=1e-9)
            assert torch.equal(own[key], found[0][key]), key


def test_clipping_comes_after_averaging() -> None:
    """Clipped on each rank first, the mean would be shorter than the limit: the ranks' gradients differ."""

    def live(comm: Communicator, log: EventLog) -> Tensor:
        plan = Plan(
            recipe="course", optimizer={"learning_rate": 1.0, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": 0.05}
        )
        worker = make_worker(plan, "all-reduce", comm, log)
        before = state(worker.model)
        train_step(worker, shard_of(comm, 7, 0))
        return torch.cat([(before[key] - tensor).flatten() for key, tensor in state(worker.model).items()])

    for moved in on_threads(3, live):
        assert float(moved.norm()) == pytest.approx(0.05, rel=1e-4)


def test_short_gradient_is_left_alone() -> None:
    assert all(
        torch.equal(one_worker("sgd", 2, 1e9)[key], value) for key, value in one_worker("sgd", 2, None).items()
    )


@pytest.mark.parametrize("clip_norm", [None, CLIP_NORM])
@pytest.mark.parametrize("method", ["all-reduce", "bucketed", "ahead"])
@pytest.mark.parametrize("name", SETTINGS)
def test_run_continues_from_a_checkpoint_to_the_bit(
    name: str, method: str, clip_norm: float | None, tmp_path: Path
) -> None:
    plan = plan_of(name, clip_norm=clip_norm)

    def steps(worker: Worker, comm: Communicator, first: int, last: int) -> None:
        for step in range(first, last):
            train_step(worker, shard_of(comm, 7, step))

    def live(comm: Communicator, log: EventLog) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        whole = make_worker(plan, method, comm, log)
        steps(whole, comm, 0, 2)
        checkpoint.save(LocalFolder(tmp_path), plan, whole, Progress(step=2), comm)
        steps(whole, comm, 2, 5)
        again = make_worker(plan, method, comm, log)
        assert checkpoint.load(LocalFolder(tmp_path), plan, again, comm).step == 2
        steps(again, comm, 2, 5)
        for worker in (whole, again):
            worker.sync.synchronize()
        return state(whole.model), state(again.model)

    for whole, again in on_threads(2, live):
        assert all(torch.equal(whole[key], again[key]) for key in whole)
        assert not torch.equal(whole["0.weight"], template("cnn").state_dict()["0.weight"])


@pytest.mark.parametrize("name", SETTINGS)
def test_biases_and_norms_are_not_decayed(name: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    before = state(model)
    optimizer = make_optimizer(plan_of(name), model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moved = {key for key, value in state(model).items() if not torch.equal(value, before[key])}
    assert moved == {"0.weight"}


def test_options_reach_torch() -> None:
    for name, given in SETTINGS.items():
        (group, _) = make_optimizer(plan_of(name), nn.Linear(2, 2)).param_groups
        expected = {("lr" if key == "learning_rate" else key): value for key, value in given.items()}
        assert {key: group[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "adam", "momentum": 0.5}, ["adam has no option momentum", "have it: sgd"]),
        ({"name": "adamw", "nesterov": True}, ["adamw has no option nesterov"]),
        ({"betas": [0.9, 0.99]}, ["sgd has no option betas", "adamw, adam"]),
        ({"eps": 1e-6}, ["sgd has no option eps"]),
        ({"name": "adamw", "betas": [0.9, 1.0]}, ["betas 0.9, 1", "below 1"]),
        ({"name": "adamw", "betas": [0.9]}, ["optimizer.betas"]),
        ({"name": "rmsprop"}, ["optimizer.name", "'rmsprop'", "sgd, adamw, adam"]),
        ({"name": "adamw", "amsgrad": True}, ["'optimizer.amsgrad'"]),
        ({"clip_norm": 0}, ["optimizer.clip_norm", "greater than 0"]),
    ],
)
def test_unsuitable_options_are_refused_by_name(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(PlanError) as error:
        parse_plan({"optimizer": settings})
    assert [word for word in words if word not in str(error.value)] == []
    assert error.value.exit_code == 2


def test_another_optimiser_takes_the_schedule_of_a_recipe_and_its_own_rate() -> None:
    given = load_plan(None, {"recipe": "fast", "optimizer.name": "adamw"}).optimizer
    assert (given.schedule, given.label_smoothing, given.decay_all) == ("one-cycle", 0.1, False)
    assert (given.learning_rate, given.weight_decay, given.linear_scaling, given.momentum) == (
        1e-3,
        0.01,
        False,
        None,
    )
    assert load_plan(Plan(recipe="fast"), {"optimizer.name": "adamw"}).optimizer == given
    assert Plan(recipe="fast", optimizer={"name": "adamw"}).replace(seed=3).optimizer == given
    assert Optimizer(name="adam").weight_decay == 0


@pytest.mark.parametrize("name", SETTINGS)
def test_plan_survives_toml(name: str, tmp_path: Path) -> None:
    plan = plan_of(name, clip_norm=0.5)
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    assert load_plan(tmp_path / "plan.toml", {}) == plan


def test_plans_of_earlier_versions_are_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(
        'method = "ddp"\nsteps = 3\n[optimizer]\nlearning_rate = 0.1\nmomentum = 0.9\nweight_decay = 0.0001\n'
    )
    assert stored_plan(path).optimizer == Optimizer() == Optimizer(name="sgd", clip_norm=None)


def test_cells_of_earlier_versions_are_found() -> None:
    """The name under which a version without these keys stored this cell."""
    plan = Plan(model="mlp", data="synthetic", recipe="course", steps=2)
    cell = Cell("weak", "compare", plan, ("single", "ddp"), {"nodes": 1}, 1)
    assert cell.name == "weak-nodes=1-round=1-a94ce765"
    other = Cell("weak", "compare", plan.replace(optimizer={"clip_norm": 1.0}), ("single", "ddp"), {"nodes": 1}, 1)
    assert other.name != cell.name


def test_keywords_of_train_and_compare(tmp_path: Path) -> None:
    small: dict[str, Any] = {"model": "mlp", "data": "synthetic", "global_batch": 8, "workers": 1, "threads": 1}
    run = syncline.train(
        **small, steps=2, method="single", optimizer="adamw", clip_norm=1.0, run_dir=tmp_path / "train"
    )
    assert (run.plan.optimizer.name, run.plan.optimizer.clip_norm) == ("adamw", 1.0)
    compared = syncline.compare(
        **small, methods=["single"], steps=1, warmup=0, optimizer="adam", clip_norm=2.0, run_dir=tmp_path / "compare"
    )
    assert (compared.run.plan.optimizer.name, compared.run.plan.optimizer.clip_norm) == ("adam", 2.0)
