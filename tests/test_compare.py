"""The comparison: its arithmetic on made-up numbers, and a real one whose losses agree over methods."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import ON_THREADS, on_threads, small_batches

from syncline.accounting.statistics import spread, timing
from syncline.comm import Communicator
from syncline.jobs import in_blocks
from syncline.measure import comparison
from syncline.measure.comparison import Comparison, Contender, compare_rows, contenders
from syncline.plan import Plan
from syncline.report.terminal import comparison_table
from syncline.spans import EventLog
from syncline.workload.models import build_model, usual_task

PLAN = Plan(workers=4, global_batch=64, steps=4)  # one warm-up round
SECONDS = {
    "single": [9.0, 4.0, 4.0, 8.0, 4.0],
    "all-reduce": [9.0, 2.0, 2.0, 4.0, 2.0],
    "ddp": [9.0, 1.0, 1.0, 2.0, 1.0],
}


def rows_of(seconds: dict[str, list[float]], plan: Plan = PLAN) -> dict[str, dict[str, object]]:
    entries = [Contender(label, label, threads=1) for label in seconds]
    rows = compare_rows(plan, entries, list(seconds.values()), [1.5] * len(entries), usual_task("cnn"), 10_000)
    return {row["label"]: row for row in rows}


def test_single_is_shown_with_one_workers_threads_and_with_all_cores() -> None:
    found = contenders(["single", "ddp"], threads=1, cores=4)
    assert [(one.label, one.method, one.threads) for one in found] == [
        ("single", "single", 1),
        ("single, all cores", "single", 4),
        ("ddp", "ddp", 1),
    ]
    assert [one.alone for one in found] == [True, True, False]


def test_single_is_shown_once_where_a_worker_has_all_cores() -> None:
    assert [one.label for one in contenders(["ddp", "single"], threads=4, cores=4)] == ["ddp", "single"]


def test_method_may_take_part_with_several_settings() -> None:
    words = ["ddp", "ddp:bucket_cap_mb=5.0", 'ahead:barrier=false:transfer_dtype="bf16"']
    found = contenders(words, threads=1, cores=1)
    assert [(one.label, one.method, one.options) for one in found] == [
        ("ddp", "ddp", {}),
        ("ddp, bucket_cap_mb=5.0", "ddp", {"bucket_cap_mb": 5.0}),
        ("ahead, barrier=false, transfer_dtype=bf16", "ahead", {"barrier": False, "transfer_dtype": "bf16"}),
    ]


@pytest.mark.usefixtures("_one_model_for_all")
def test_prediction_of_a_method_that_plans_its_transfers_is_in_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan(model="cnn", workers=2, global_batch=4, steps=4, measure={"warmup": 12, "block": 4})

    def live(comm: Communicator, log: EventLog) -> list[dict[str, Any]]:
        entries = contenders(["bucketed", "ahead", "ahead:barrier=true"], threads=1, cores=1)
        return Comparison(plan, entries, comm, small_batches(), torch.device("cpu"), log, Watching()).run()

    bucketed, planned, barrier = on_threads(2, live)[0]
    assert "predicted" not in bucketed
    assert "predicted" not in barrier  # it was asked for: there is nothing to plan
    assert planned["predicted"]["step_s"] > 0
    comparison_table([planned], title="", steps=4, warmup=12, block=4)
    assert "ahead: predicted" in capsys.readouterr().out


def test_warm_up_is_cut_and_the_median_counts() -> None:
    row = rows_of(SECONDS)["single"]
    assert row["step"] == {"median_s": 4.0, "mean_s": 5.0, "spread_s": 1.0, "counted": 4, "warmup": 1}
    assert row["images_per_s"] == 16.0
    assert row["loss"] == 1.5


def test_ratio_is_taken_round_by_round() -> None:
    rows = rows_of(SECONDS)
    assert [row["speedup"]["median"] for row in rows.values()] == [1.0, 2.0, 4.0]
    assert [row["ratio_to_ddp"]["median"] for row in rows.values()] == [4.0, 2.0, 1.0]
    # The noise of round 3 hit all alike, so it leaves no spread in a ratio.
    assert {row["ratio_to_ddp"]["spread"] for row in rows.values()} == {0.0}
    assert [row["workers"] for row in rows.values()] == [1, 4, 4]


def test_ratio_of_medians_is_another_and_is_the_speed_up() -> None:
    rows = rows_of({"single": [0, 1, 2, 9, 9], "ddp": [0, 1, 1, 3, 9]}, PLAN)
    assert rows["single"]["ratio_to_ddp"]["median"] == 1.5
    assert rows["ddp"]["speedup"]["median"] == 5.5 / 2
    assert rows["ddp"]["speedup"]["spread"] == rows["single"]["ratio_to_ddp"]["spread"]


@pytest.mark.parametrize(
    ("seconds", "no_difference"),
    [
        ([0, 1.1, 0.9, 1.2, 0.8], True),
        ([0, 1.0, 1.0, 1.0, 1.0], True),
        ([0, 1.1, 1.2, 1.1, 1.2], False),
        ([0, 0.9, 0.8, 0.9, 0.8], False),
    ],
)
def test_difference_inside_the_spread_is_none(seconds: list[float], no_difference: bool) -> None:
    rows = rows_of({"all-reduce": seconds, "ddp": [0, 1.0, 1.0, 1.0, 1.0]})
    assert rows["all-reduce"]["ratio_to_ddp"]["no_difference"] is no_difference


def test_baseline_and_control_are_left_out_where_they_did_not_run() -> None:
    (row,) = rows_of({"all-reduce": [9.0, 2.0]}, Plan(workers=2, steps=1)).values()
    assert "speedup" not in row
    assert "ratio_to_ddp" not in row


def test_timing_of_nothing_is_nothing_and_a_window_counts_the_first() -> None:
    assert timing([1.0, 2.0], warmup=2) is None
    cut = timing([9.0, 1.0, 2.0, 30.0], warmup=1, window=2)
    assert cut is not None
    assert (cut.median_s, cut.mean_s, cut.counted) == (1.5, 1.5, 2)
    assert spread([3.0]) == 0.0
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.0


def test_turns_of_several_steps_are_whole_and_long_enough_to_plan_transfers() -> None:
    plan = Plan(workers=2, steps=10, measure={"warmup": 2})
    assert in_blocks(plan, ["ddp", "bucketed"]) == plan
    longer = in_blocks(plan, ["ddp", "ahead"])
    assert (longer.measure.block, longer.measure.warmup, longer.steps) == (8, 16, 24)
    asked = in_blocks(plan.replace(measure={"warmup": 2, "block": 3}), ["ddp"])
    assert (asked.measure.block, asked.measure.warmup, asked.steps) == (3, 3, 12)


def test_what_is_left_after_a_turn_is_shared_among_its_steps() -> None:
    plan = Plan(workers=2, steps=6, measure={"warmup": 3, "block": 3})
    rows = list(rows_of({"ahead": [9.0, 1.0, 1.0], "ddp": [9.0, 2.0, 2.0]}, plan).values())
    ahead, ddp = comparison._with_left_over(plan, rows, [[9.0, 0.4, 0.4], [9.0, 0.0, 0.0]])
    assert ahead["ratio_to_ddp"]["median"] == 0.5
    assert ahead["left_s"] == 0.4
    assert ahead["ratio_to_ddp_with_left"]["median"] == pytest.approx(0.6)  # (1 + 0.4 / 2) / 2
    assert ddp["ratio_to_ddp_with_left"]["median"] == 1.0


# A real comparison on threads.


class Watching:
    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def step(self, step: int, total: int, loss: float, images_per_s: float) -> None:
        self.steps.append((step, total))

    def line(self, text: str) -> None:
        raise AssertionError(text)


@pytest.fixture
def _one_model_for_all(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Copies of one model, because threads share torch's generator; and torch's threads are put back."""
    model = build_model("cnn", seed=1)
    monkeypatch.setattr(comparison, "make_model", lambda plan, device, task: copy.deepcopy(model))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_one_model_for_all")
def test_losses_agree_over_methods_and_every_rank_has_the_same_rows() -> None:
    methods = ["single", *ON_THREADS]
    plan = Plan(model="cnn", workers=3, global_batch=16, steps=2, optimizer={"learning_rate": 0.01})
    observers = [Watching() for _ in range(3)]

    def live(comm: Communicator, log: EventLog) -> tuple[list[dict[str, object]], EventLog]:
        entries = contenders(methods, threads=1, cores=2)
        device = torch.device("cpu")
        parts = (comm, small_batches(), device, log, observers[comm.rank])
        return Comparison(plan, entries, *parts).run(), log

    results = on_threads(3, live)
    rows = results[0][0]
    assert all(other == rows for other, _ in results)
    assert [row["label"] for row in rows] == ["single", "single, all cores", *ON_THREADS]
    losses = [row["loss"] for row in rows]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)
    assert all(row["step"]["counted"] == 2 for row in rows)
    turns = 3 * len(rows)
    assert observers[0].steps == [(turn + 1, turns) for turn in range(turns)]
    # Taking turns: in the log every round has each contender once, in the same order.
    order = [record["method"] for record in results[0][1].records if record["kind"] == "step"]
    assert order == [row["label"] for row in rows] * 3
