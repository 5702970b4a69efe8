"""Each sanity rule, on numbers that break it and on numbers that do not."""

from __future__ import annotations

from syncline.accounting import sanity
from syncline.marks import Mark
from syncline.study.rows import Row


def test_efficiency_above_one_is_questioned() -> None:
    found = sanity.efficiency_above_one(1.32, "ddp on 4 workers")
    assert found is not None
    assert "132% efficiency" in found.text
    assert sanity.efficiency_above_one(1.0, "x") is None


def test_ranks_that_disagree_on_one_step_are_named() -> None:
    found = sanity.ranks_disagree([0.89, 1.40, 1.40, 1.40], "vgg11")
    assert found is not None
    assert "rank 0 measured 890 ms" in found.text
    assert "1.40 s" in found.text
    assert sanity.ranks_disagree([1.0, 1.05], "x") is None
    assert sanity.ranks_disagree([1.0], "x") is None


def test_an_average_over_the_wrong_number_is_found() -> None:
    found = sanity.wrong_denominator(196, 40, "loss")
    assert found is not None
    assert "divides by 196, but 40" in found.text
    assert sanity.wrong_denominator(39, 39, "loss") is None


def test_a_warm_up_step_inside_the_window_is_found() -> None:
    found = sanity.warm_up_inside([3.0, 1.0, 1.1, 0.9], "ddp")
    assert found is not None
    assert "3.00 s" in found.text
    assert sanity.warm_up_inside([1.2, 1.0, 1.1, 0.9], "ddp") is None
    assert sanity.warm_up_inside([1.6, 1.0, 1.0, 2.0], "ddp") is None, "a later step was as slow"
    assert sanity.warm_up_inside([3.0, 1.0], "ddp") is None


def test_a_difference_inside_the_spread_is_no_difference() -> None:
    assert sanity.inside_spread([1.0, 1.2, 1.4], [1.1, 1.25, 1.4], ("a", "b")) is not None
    assert sanity.inside_spread([1.0, 1.01, 1.02], [2.0, 2.01, 2.02], ("a", "b")) is None
    assert sanity.inside_spread([], [1.0], ("a", "b")) is None


def test_too_few_steps_are_told() -> None:
    assert sanity.too_few_steps(4, "ddp") is not None
    assert sanity.too_few_steps(1, "ddp").text.startswith("ddp: 1 timed step;")  # type: ignore[union-attr]
    assert sanity.too_few_steps(5, "ddp") is None


def test_other_load_is_told() -> None:
    found = sanity.other_load(0.4, "run")
    assert found is not None
    assert "40%" in found.text
    assert sanity.other_load(0.1, "run") is None


def test_marks_become_warnings_also_that_of_a_slow_link() -> None:
    mark = Mark.parse("link: host0 reached 8.7 Gbit/s of 10 Gbit/s")
    rows = [Row("s", {"method": "ddp", "workers": 8}, marks=(mark,))]
    assert [one.text for one in sanity.check_rows(rows)] == [
        "ddp on 8 workers: link: host0 reached 8.7 Gbit/s of 10 Gbit/s."
    ]


def test_a_rule_is_said_once_for_all_rows_that_break_it() -> None:
    rows = [Row("s", {"method": name, "workers": 2}, seconds=[1.0, 1.0]) for name in ("a", "b", "c", "d", "e", "f")]
    found = sanity.check_rows(rows)
    assert len(found) == 1
    assert found[0].text.endswith("The same applies to b on 2 workers, c on 2 workers, d on 2 workers and 2 more.")
    assert sanity.check_rows([Row("s", {"method": "a"}, seconds=[1.0] * 5)]) == []


def test_rows_are_checked_for_ranks_load_and_denominators() -> None:
    figures = {"step_by_rank": [0.89, 1.4], "other_load": 0.5, "counted": 196}
    rules = {one.rule for one in sanity.check_rows([Row("s", {"method": "a"}, seconds=[1.0] * 5, figures=figures)])}
    assert rules == {"ranks disagree", "other load", "denominator"}
