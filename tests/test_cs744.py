"""The lab cs744: the order of the methods, why losses differ, scalability, losses from step 0, accuracy by rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import syncline
from syncline.study.cell_rows import losses_of
from syncline.study.file import Table, load_study
from syncline.study.lab_code import LABS, load_answers
from syncline.study.rows import Row
from syncline.study.tables import build_table

ANSWERS = load_answers(LABS / "cs744")


def timed(method: str, workers: int, *seconds: float, **parts: float) -> Row:
    point = {"method": method, "workers": workers, "nodes": workers, "global_batch": 256, "threads": 1}
    return Row("nodes", point, seconds=seconds, parts=parts)


def methods() -> list[Row]:
    return [
        timed("single", 1, 2.0, 2.0, 2.0),
        timed("gather-scatter", 4, 3.0, 3.1, 2.9, forward=1.0, wire=2.0),
        timed("all-reduce", 4, 1.4, 1.41, 1.39, forward=1.0, wire=0.4),
        timed("ddp", 4, 1.0, 1.01, 0.99, forward=0.9, wire=0.1, hidden=0.3),
        timed("bucketed", 4, 0.99, 1.02, 0.985, forward=0.9, wire=0.1, hidden=0.3),
    ]


def test_methods_are_ranked_by_their_time_over_ddp_s_turn_by_turn() -> None:
    ours = [timed("ddp", 4, 1.0, 1.0, 1.0), timed("ahead", 4, 0.8, 0.81, 0.79)]
    said = ANSWERS["ranking"](methods(), {"ours": ours})
    assert "slowest first, gather-scatter 3.00 ±" in said
    assert said.index("gather-scatter") < said.index("all-reduce 1.40") < said.index("ddp takes")
    assert "no measurable difference from it: bucketed" in said
    assert "faster than it: ahead 0.80 ±" in said
    assert "a root's link carries the gradients 6 times" in said
    assert "ddp hides 75% of its transfers" in said
    assert ANSWERS["ranking"](methods()[:2], {}).startswith("Not answered")


def test_methods_scale_for_a_reason_each() -> None:
    first, *lines = ANSWERS["scalability"](methods(), {}).splitlines()
    assert first == "On 4 nodes, best first:"
    assert [line.split()[0] for line in lines] == ["bucketed", "ddp", "all-reduce", "gather-scatter"]
    assert "no measurable difference from bucketed" in lines[1]
    assert "1.5 times the gradients, at most 2 times on any number of nodes, but only after backward" in lines[2]
    assert "slower than one node" in lines[3]
    assert "the root's link carries 6 times the gradients, and more with every node; 67% of its step" in lines[3]


def trained(method: str, workers: int, first: float) -> Row:
    losses = [{"step": 0, "loss": first}, {"step": 20, "loss": 2.0}]
    return Row("train", {"method": method, "workers": workers}, figures={"losses": losses})


@pytest.mark.parametrize(
    ("synced", "said"),
    [
        (2.4000001, "The proof: with statistics of the whole batch (batch_norm = sync) 4 workers have one worker's"),
        (2.43, "Batch norm alone does not explain it"),
    ],
)
def test_one_worker_differs_by_batch_norm_only_if_the_proof_holds(synced: float, said: str) -> None:
    rows = [trained("single", 1, 2.4), trained("ddp", 4, 2.45), trained("all-reduce", 4, 2.45)]
    text = ANSWERS["losses-differ"](rows, {"synced": [trained("all-reduce", 4, synced)]})
    assert "differ already at step 0" in text
    assert said in text
    assert "not tested" in ANSWERS["losses-differ"](rows, {})
    same = [trained("single", 1, 2.4), trained("ddp", 4, 2.4), trained("all-reduce", 4, 2.4)]
    assert "no layer depends on the share" in ANSWERS["losses-differ"](same, {})


def test_accuracies_have_a_line_for_each_rank() -> None:
    last: dict[str, Any] = {
        "train_per_rank": [{"loss": 2.0, "accuracy": 0.25}, {"loss": None, "accuracy": None}],
        "test_per_rank": [{"loss": 2.1, "accuracy": 0.2}],
    }
    row = Row("s", {"method": "ddp"}, figures={"epochs": [last]})
    table = build_table(Table(title="t", kind="accuracies", stage="s"), [row])
    assert table.rows == [["ddp", "0", "2.0000", "25.00%", "2.1000", "20.00%"], ["ddp", "1", "-", "-", "-", "-"]]
    assert table.num_keys == 2


def test_the_assignment_s_settings_are_the_lab_s() -> None:
    _, study = load_study("cs744")
    by_name = {stage.name: {**study.plan, **stage.plan} for stage in study.stage}
    assert by_name["train"]["global_batch"] == by_name["nodes"]["global_batch"] == 256
    assert by_name["train"]["log_every"] == 20
    assert (by_name["nodes"]["measure.warmup"], by_name["nodes"]["steps"]) == (1, 9), "iterations 2 to 10 of 10"
    assert next(stage for stage in study.stage if stage.name == "nodes").grid == {"nodes": [1, 2, 4]}
    assert study.link is not None


@pytest.mark.processes
def test_losses_are_told_from_step_0_and_accuracy_by_rank(tmp_path: Path) -> None:
    run = syncline.train(
        model="cnn", data="synthetic", method="all-reduce", workers=2, threads=1, global_batch=8, steps=5,
        settings={"log_every": 2, "eval_per_rank": True, "test_samples": 30}, run_dir=tmp_path / "run",
    )  # fmt: skip
    lines = losses_of(run)
    assert [line["step"] for line in lines] == [0, 2, 4]
    assert all(line["loss"] == pytest.approx(sum(line["by_rank"]) / 2) for line in lines)
    assert lines[1]["loss"] != run.summary["losses"][0]["loss"], "the log counts from 0, loss lines from 1"
    last = run.summary["epochs"][-1]
    assert last["train_loss"] == pytest.approx(sum(own["loss"] for own in last["train_per_rank"]) / 2)
    assert last["test_images"] == last["test_per_rank"][1]["images"] == 30
