"""The plan: refuses what is wrong by name, survives TOML, and its tables are what the stages implement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import MANY_WORKERS
from pydantic import ValidationError

from syncline import sync
from syncline.comm.threads import ThreadCommunicator, ThreadWorld
from syncline.errors import PlanError
from syncline.methods import METHODS
from syncline.plan import load_plan, parse_plan
from syncline.words import DATA, MODELS
from syncline.workload.data.made import SHAPES
from syncline.workload.data.sources import DATA_NAMES
from syncline.workload.models import BUILDERS


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"methd": "ddp"}, ["'methd'", "'method'", "global_batch"]),
        ({"optimizer": {"learning_rat": 1}}, ["'optimizer.learning_rat'", "'optimizer.learning_rate'", "momentum"]),
        ({"zzzzzz": 1}, ["'zzzzzz'", "Choose one of model, data"]),
        ({"method": "al-reduce"}, ["method", "'al-reduce'", "'all-reduce'", *METHODS]),
        ({"data": "cifar"}, ["data", "'cifar10'", *DATA]),
        ({"model": "vg11"}, ["model", "'vg11'", "'vgg11'", *MODELS, "module:callable"]),
        ({"device": "tpu"}, ["device", "'tpu'", "cpu", "cuda"]),
        ({"workers": 0}, ["workers", "greater than or equal to 1", "0"]),
        ({"workers": "many"}, ["workers", "integer", "'many'"]),
        ({"optimizer": {"momentum": 1.0}}, ["optimizer.momentum", "1.0"]),
        ({"optimizer": 3}, ["optimizer", "3"]),
        ({"steps": 0}, ["steps", "0"]),
    ],
)
def test_wrong_key_or_value_is_named_with_what_is_allowed(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(PlanError) as error:
        parse_plan(values)
    assert [word for word in words if word not in str(error.value)] == []
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 2


def test_no_nearest_match_is_made_up() -> None:
    with pytest.raises(PlanError) as error:
        parse_plan({"zzzzzz": 1})
    assert "Did you mean" not in str(error.value)


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(PlanError, match=r"'methd'.*'worker'"):
        parse_plan({"methd": "ddp", "worker": 2})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"steps": 5, "epochs": 1}, ["steps", "epochs"]),
        ({"method": "single", "workers": 2}, ["single", "workers", "2"]),
        ({"global_batch": 3, "workers": 4}, ["global_batch 3", "workers 4"]),
        ({"backend": "nccl"}, ["nccl", "cuda"]),
        ({"data": "folder"}, ["data folder", "data_dir"]),
        ({"data": "imdb-wiki"}, ["data imdb-wiki", "--data-dir"]),
        ({"data": "cifar10", "image_size": 64}, ["image_size", "cifar10"]),
        ({"hosts": 2, "workers": 3}, ["workers 3", "hosts 2"]),
        ({"link": "1gbit"}, ["link", "hosts"]),
        ({"hosts": 2, "method": "shared-memory"}, ["shared-memory", "hosts is 2"]),
        ({"method": "mpi", "max_restarts": 1}, ["mpi", "max_restarts"]),
        ({"method": "gather-scatter", "options": {"bucket_cap_mb": 1}}, ["bucket_cap_mb", "gather-scatter"]),
    ],
)
def test_contradictions_are_refused_with_both_keys(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(PlanError) as error:
        parse_plan(values)
    assert [word for word in words if word not in str(error.value)] == []


def test_what_is_left_out_is_filled_in() -> None:
    plan = parse_plan({})
    assert (plan.epochs, plan.steps, plan.backend) == (1, None, "gloo")
    assert parse_plan({"steps": 7}).epochs is None
    assert parse_plan({"method": "single"}).workers == 1
    assert parse_plan({"hosts": 4}).workers == 4
    assert parse_plan({"hosts": 4, "workers": 8}).workers == 8
    assert parse_plan({"device": "cuda"}).backend == "nccl"


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"method": "single", "steps": 3},
        {"method": "ddp", "workers": 4, "options": {"bucket_cap_mb": 2.5}, "threads": 1},
        {"model": "my.module:build", "data": "synthetic", "data_dir": 'C:\\a "quoted" path', "seed": 2**62},
        {"measure": {"warmup": 0, "window": 3}, "checkpoint": {"every": 10}, "optimizer": {"weight_decay": 0.0}},
        *({"method": method} for method in MANY_WORKERS),
    ],
)
def test_toml_round_trip(values: dict[str, Any], tmp_path: Path) -> None:
    plan = parse_plan(values)
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    assert load_plan(tmp_path / "plan.toml", {}) == plan


def test_flags_override_the_file_key_by_key(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("workers = 4\nglobal_batch = 64\n[optimizer]\nlearning_rate = 0.5\nmomentum = 0.1\n")
    plan = load_plan(path, {"workers": 2, "seed": None, "optimizer.momentum": 0.2})
    assert (plan.workers, plan.global_batch, plan.seed) == (2, 64, 5000)
    assert (plan.optimizer.learning_rate, plan.optimizer.momentum) == (0.5, 0.2)


@pytest.mark.parametrize(("flag", "other"), [("steps", "epochs"), ("epochs", "steps")])
def test_flag_for_one_length_replaces_the_other_length_of_the_file(flag: str, other: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(f"{other} = 4\n")
    plan = load_plan(path, {flag: 9})
    assert (getattr(plan, flag), getattr(plan, other)) == (9, None)
    with pytest.raises(PlanError, match="contradict"):
        load_plan(path, {flag: 9, other: 4})


def test_section_that_is_no_section_is_refused_also_under_a_flag(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("optimizer = 3\n")
    with pytest.raises(PlanError, match="optimizer"):
        load_plan(path, {"optimizer.momentum": 0.2})


@pytest.mark.parametrize("content", [b"workers = = 2", b"\xff\xfe", b"workers = 2\nworkers = 3"])
def test_file_that_is_not_toml_is_refused_by_its_path(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=r"broken\.toml"):
        load_plan(path, {})


@pytest.mark.parametrize("name", ["missing.toml", "."])
def test_missing_file_is_refused_by_its_path(name: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read the plan"):
        load_plan(tmp_path / name, {})


def test_plan_is_frozen_and_replace_gives_a_checked_one() -> None:
    plan = parse_plan({"workers": 2})
    with pytest.raises(ValidationError, match="frozen"):
        plan.workers = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        plan.optimizer.momentum = 0.0  # type: ignore[misc]
    assert plan.replace(workers=4).workers == 4
    assert plan.workers == 2
    with pytest.raises(PlanError, match="workers"):
        plan.replace(workers=0)


OPTIONS = {
    "bucket_cap_mb": 2.0,
    "collective": "ring",
    "transfer_dtype": "bf16",
    "groups": 2,
    "overlap": False,
    "unused": "zero",
    "chunk_mb": 1.0,
    "order": "ready",
    "barrier": False,
    "strict": True,
    "ahead": True,
}
"""A right value for every option that some method takes."""


def test_every_option_has_an_example_here() -> None:
    assert {option for row in METHODS.values() for option in row.options} == set(OPTIONS)


@pytest.mark.parametrize("method", METHODS)
def test_method_is_taken_with_its_options_and_no_other(method: str) -> None:
    assert parse_plan({"method": method}).method == method
    for option, value in OPTIONS.items():
        values = {"method": method, "options": {option: value}}
        if option in METHODS[method].options:
            assert parse_plan(values).options_for(method) == {option: value}
        else:
            with pytest.raises(PlanError, match=option):
                parse_plan(values)


def test_tables_are_what_the_stages_implement() -> None:
    assert set(DATA) == {*DATA_NAMES, *SHAPES}
    assert set(BUILDERS) == set(MODELS)


@pytest.mark.parametrize("method", [name for name, row in METHODS.items() if not row.is_choice])
def test_method_can_be_made_by_its_name_and_takes_its_options(method: str) -> None:
    """On one thread, or else it says what it needs instead."""
    one_thread = ThreadCommunicator(ThreadWorld(1), 0)
    try:
        made = [sync.make_sync(method, one_thread)]
        made += [sync.make_sync(method, one_thread, **{name: OPTIONS[name]}) for name in METHODS[method].options]
    except PlanError as error:
        assert method in str(error)  # noqa: PT017
        assert method == "ddp"
    else:
        assert all(isinstance(one, sync.GradientSync) for one in made)
