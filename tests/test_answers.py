"""Answers obey their warnings: made-up rows with other load, shared cores, few steps and unequal baselines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from syncline.accounting.doubts import compared, doubted
from syncline.accounting.ranking import describe, rank_times
from syncline.accounting.statistics import paired_ratio, ratio_of_medians, spreads_overlap
from syncline.marks import STRETCHED
from syncline.study.answering import ANSWERS, answered, read, step_time
from syncline.study.file import load_study
from syncline.study.lab_code import LABS, load_answers
from syncline.study.rows import Row
from syncline.study.runner import main_answer, study_contents

ALL = {**ANSWERS, **load_answers(LABS / "cs744"), **load_answers(LABS / "ddp-paper")}
SLOW, QUICK = (1.6, 1.7, 1.6, 1.7, 1.6), (1.0, 1.1, 1.0, 1.1, 1.0)


def row(method: str, workers: int, *seconds: float, **more: Any) -> Row:
    point = {"method": method, "workers": workers, "global_batch": 8 * workers, "batch_per_worker": 8, "threads": 1}
    return Row("weak", {**point, **more.pop("point", {})}, seconds=seconds, **more)


def say(name: str, *rows: Row) -> str:
    return answered(ALL[name], rows, {})


def loaded(share: float) -> list[Row]:
    figures = {"other_load": share}
    rivals = [row("ddp", 2, *QUICK, figures=figures), row("all-reduce", 2, *SLOW, figures=figures)]
    return [row("single", 1, *QUICK, figures=figures), *rivals]


# Who is fastest.


def test_the_paired_ratio_decides_and_not_the_median() -> None:
    """Three rounds were noisy: `a` won four rounds of five, although its median is larger."""
    times = {"a": [1.0, 1.0, 3.0, 3.0, 3.0], "b": [1.1, 1.1, 3.3, 3.3, 2.0]}
    assert rank_times(times).fastest == ["a"]
    times = {"a": [1.0, 2.0, 2.9, 1.0, 2.0], "b": [1.1, 1.9, 2.9, 1.2, 1.9]}
    assert rank_times(times).fastest == ["a", "b"]


def test_all_within_the_spread_are_named_together() -> None:
    times = {"a": [1.0, 1.0, 1.1, 1.2], "b": [1.1, 1.0, 1.0, 1.2], "c": [2.0, 2.0, 2.2, 2.4]}
    ranking = rank_times(times)
    assert describe(ranking, str) == (
        "a and b are fastest, with no difference between them; c takes 2.00 ±0.00 times as long as a"
    )
    assert describe(rank_times({"a": times["a"], "b": times["b"]}), str) == (
        "no difference between a and b: their times differ by less than the spread"
    )
    assert describe(rank_times({"a": [1.0]}), str) == "a is fastest"


def test_what_was_not_measured_side_by_side_differs_only_beyond_both_spreads() -> None:
    assert spreads_overlap([1.0, 1.2, 1.4], [1.2, 1.3, 1.4])
    assert not spreads_overlap([1.0, 1.01, 1.02], [2.0, 2.01, 2.02])
    found = ratio_of_medians([2.0, 2.1, 2.2], [1.0, 1.05, 1.1])
    assert (found.median, found.no_difference) == (pytest.approx(2.0), False)
    first = row("ddp", 2, 1.0, 1.1, 1.2, 1.3, 1.4, runs=(Path("one"),))
    other = row("all-reduce", 2, 1.01, 1.11, 1.21, 1.31, 1.41, runs=(Path("one"),))
    assert "ddp is fastest" in say("fastest", first, other), "side by side, each step was slower"
    apart = row("all-reduce", 2, *other.seconds, runs=(Path("two"),))
    assert "no difference between ddp and all-reduce" in say("fastest", first, apart)


def test_fastest_names_what_varies() -> None:
    rows = [row("ddp", 2, *QUICK, point={"threads": 2}), row("ddp", 2, *SLOW, point={"threads": 1})]
    assert "ddp with threads 2 is fastest; ddp with threads 1 takes" in say("fastest", *rows)
    rows = [row("ddp", 2, *QUICK, runs=(Path("runs/first"),)), row("ddp", 2, *SLOW, runs=(Path("runs/second"),))]
    assert "ddp (run first) is fastest; ddp (run second) takes" in say("fastest", *rows)


def test_fastest_never_compares_different_work() -> None:
    small, large = {"model": "cnn"}, {"model": "vgg11"}
    rows = [
        row("ddp", 2, *QUICK, point=small), row("all-reduce", 2, *SLOW, point=small),
        row("ddp", 2, *[20.0] * 5, point=large), row("all-reduce", 2, *[10.0] * 5, point=large),
    ]  # fmt: skip
    first, second = say("fastest", *rows).splitlines()
    assert first.startswith("On 2 workers with model cnn ddp is fastest; all-reduce takes 1.")
    assert second.startswith("On 2 workers with model vgg11 all-reduce is fastest; ddp takes 2.00 ±0.00 times")


def test_a_comparison_ends_in_one_sentence() -> None:
    rows = [{"label": name, "seconds": list(seconds)} for name, seconds in
            (("single", QUICK), ("ddp", QUICK), ("bucketed", QUICK), ("all-reduce", SLOW))]  # fmt: skip
    said = "ddp and bucketed are fastest, with no difference between them; "
    said += "all-reduce takes 1.60 ±0.03 times as long as ddp."
    assert compared(rows, []) == said
    assert compared(rows, [STRETCHED.text]) == f"Measured with workers that shared cores: {said}"
    assert compared(rows[:3], []).startswith("No difference between ddp and bucketed")
    assert compared(rows[:2], []) == ""
    busy = [{**row, "other_load": 0.7} for row in rows]
    assert compared(busy, []).startswith("No answer: other programs took 70% of the cores")


# What is doubtful is said in the same sentence.


def test_a_clean_measurement_is_said_without_a_word_more() -> None:
    assert say("fastest", *loaded(0.05)).startswith("On 2 workers ddp is fastest")


@pytest.mark.parametrize("name", ["fastest", "scaling", "bucketing", "weak-and-strong"])
def test_an_overloaded_run_has_no_answer(name: str) -> None:
    said = say(name, *loaded(0.83))
    assert said.startswith("No answer: other programs took 83% of the cores' time while this was measured")
    assert "fastest" not in said


def test_the_headline_of_an_overloaded_lab_refuses() -> None:
    _, study = load_study("cs744")

    def measured(share: float) -> list[Row]:
        return [replace(one, stage=study.answer_stage) for one in loaded(share)]

    contents = study_contents(study, measured(0.83), {}, answers=True)
    assert contents.answer == main_answer(study, measured(0.83))
    assert contents.answer.startswith("No answer: other programs took 83% of the cores' time")
    assert main_answer(study, measured(0.0)).startswith(
        "On 2 nodes, in times of ddp's step: slowest first, all-reduce"
    )


def test_other_load_is_said_in_the_sentence() -> None:
    said = say("fastest", *loaded(0.41))
    assert said.startswith("Measured with other programs on 41% of the cores: On 2 workers ddp is fastest")


def test_shared_cores_are_said_and_that_the_baseline_had_its_own() -> None:
    rows = [row("single", 1, *QUICK), row("ddp", 2, *SLOW, marks=(STRETCHED,))]
    assert say("scaling", *rows).startswith(
        "Measured with workers that shared cores and a baseline that did not share its cores: 2 workers take"
    )


@pytest.mark.parametrize(("steps", "said"), [(1, "a single timed step: "), (3, "only 3 timed steps: "), (5, "")])
def test_few_steps_are_said(steps: int, said: str) -> None:
    text = say("fastest", row("ddp", 2, *QUICK[:steps]), row("all-reduce", 2, *SLOW[:steps]))
    assert text.startswith(f"Measured with {said}" if said else "On 2 workers")


def test_an_unequal_baseline_is_said() -> None:
    quiet, busy = {"other_load": 0.0}, {"other_load": 0.3}
    said = say("scaling", row("single", 1, *QUICK, figures=busy), row("ddp", 2, *SLOW, figures=quiet))
    assert "a baseline under another load (30% against 0%)" in said
    said = say("scaling", row("single", 1, *SLOW), row("ddp", 2, *QUICK))
    assert "a baseline that something slowed (efficiency 160%)" in said


def test_only_what_a_sentence_read_is_held_against_it() -> None:
    """The loss of an overloaded run is as good as any other."""
    busy = row("ddp", 2, *QUICK, figures={"other_load": 0.9, "loss": 2.0})
    calm = row("ddp", 4, *QUICK)
    assert answered(lambda rows, _: f"{read('loss', rows[0]):.1f}", [busy], {}) == "2.0"
    assert answered(lambda rows, _: f"{step_time(rows[1]):.1f}", [busy, calm], {}) == "1.0"
    assert answered(lambda rows, _: f"{step_time(rows[0]):.1f}", [busy, calm], {}).startswith("No answer")
    missing = answered(lambda rows, _: f"Not answered: {step_time(rows[0])}", [busy], {})
    assert missing.startswith("Not answered")


def test_nothing_timed_is_nothing_doubtful() -> None:
    assert doubted("said", []) == "said"
    assert doubted("said", [row("ddp", 2, figures={"other_load": 0.9})]) == "said"


def test_a_ratio_whose_printed_spread_holds_1_is_no_difference() -> None:
    """Quartiles need not lie evenly around the median: 0.99 ±0.03 must not be called faster."""
    ratio = paired_ratio([0.90, 0.93, 0.99, 0.995, 0.999], [1.0] * 5)
    assert str(ratio) == "0.99 ±0.03"
    assert ratio.no_difference
    assert not paired_ratio([0.90, 0.91, 0.92, 0.93, 0.94], [1.0] * 5).no_difference
