"""Numbers of a report agree with each other: steps and their parts, speed-ups and their baselines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from syncline.accounting import sanity
from syncline.accounting.breakdown import PARTS as NAMES
from syncline.studies import scaling_study
from syncline.study.file import Table
from syncline.study.rows import Quantity, Row
from syncline.study.tables import TableData, build_table
from syncline.study.values import VALUES, format_quantity

PARTS = {"forward": 0.2, "backward": 0.4, "wire": 0.3, "wait": 0.1, "hidden": 0.6}


def row(method: str, workers: int, *seconds: float, run: str = "", **more: Any) -> Row:
    point = {"method": method, "workers": workers, "global_batch": 64, "threads": 1, **more.pop("point", {})}
    return Row("scale", point, seconds=seconds, runs=(Path(run),) if run else (), **more)


def numbers(table: TableData, line: int) -> dict[str, float | None]:
    return dict(zip(table.columns, table.numbers[line], strict=True))


# A step and its parts.


@pytest.mark.parametrize("step", ["step", "mean_step"])
def test_a_step_beside_its_parts_is_what_they_add_up_to(step: str) -> None:
    """The median of these steps is 0.9 s, their mean 1 s."""
    one = row("ddp", 2, 0.9, 0.9, 1.2, parts=PARTS)
    parts = [name for name in NAMES if name != "copy"]
    table = build_table(Table(title="t", stage="scale", values=[step, *parts, "hidden"]), [one])
    assert table.columns[:2] == ["method", "step (mean)"]
    shown = numbers(table, 0)
    assert shown["step (mean)"] == pytest.approx(sum(shown[name] or 0.0 for name in parts))
    alone = build_table(Table(title="t", stage="scale", values=["step", "throughput"]), [one])
    assert numbers(alone, 0)["step"] == 0.9


def test_parts_alone_get_the_step_in_front() -> None:
    table = build_table(
        Table(title="t", stage="scale", values=["forward", "wire"]), [row("ddp", 2, 1.0, parts=PARTS)]
    )
    assert table.columns == ["method", "step (mean)", "forward", "wire"]


def test_parts_have_their_share_beside_the_time() -> None:
    table = build_table(
        Table(title="t", stage="scale", values=["step", "forward", "communication", "hidden"]),
        [row("ddp", 2, 1.0, parts=PARTS)],
    )
    assert table.rows == [["ddp", "1.00 s", "200 ms (20%)", "400 ms (40%)", "600 ms"]]


def test_an_epoch_takes_the_step_that_is_beside_it() -> None:
    one = row("ddp", 2, 0.9, 0.9, 1.2, parts={**PARTS, "data": 0.25}, figures={"train_samples": 640})
    table = build_table(
        Table(title="t", stage="scale", values=["epoch_without_data", "epoch", "data", "step"]), [one]
    )
    shown = numbers(table, 0)
    assert shown["epoch"] == pytest.approx(10 * shown["step (mean)"])  # type: ignore[operator]
    assert shown["epoch without data"] == pytest.approx(10 * (shown["step (mean)"] - shown["data"]))  # type: ignore[operator]


def test_steps_that_differ_much_are_told() -> None:
    found = sanity.uneven_steps(5.03, 8.2, "ddp")
    assert found is not None
    assert "is 8.20 s and the median 5.03 s" in found.text
    assert sanity.uneven_steps(1.0, 1.1, "ddp") is None
    left_out = sanity.left_out(1, 10, "ddp")
    assert left_out is not None
    assert "1 of 10 steps took more than twice the usual time" in left_out.text
    assert sanity.left_out(0, 10, "ddp") is None
    figures = {"step_by_rank": [8.2, 8.2], "outliers": 2}
    rules = {one.rule for one in sanity.check_rows([row("ddp", 2, *[5.0] * 9, figures=figures)])}
    assert rules == {"uneven steps", "outliers"}


# A speed-up and its baseline.


def curve() -> list[Row]:
    """`single` takes turns with ddp in each cell; the machine was busy during the last."""
    cells = [(1, 1.0, 1.0), (2, 1.0, 0.6), (4, 6.0, 0.5)]
    return [
        row(method, nodes if method == "ddp" else 1, *[seconds] * 5, run=f"cell-{nodes}", point={"nodes": nodes})
        for nodes, alone, together in cells
        for method, seconds in (("single", alone), ("ddp", together))
    ]


def test_every_baseline_of_a_curve_is_in_its_table_and_gives_the_speed_up_printed() -> None:
    spec, *_ = scaling_study("ddp", [1, 2, 4], strong=True, batch=64, threads=1, steps=5, plan={}).table
    table = build_table(spec, curve())
    assert len(table.rows) == 6, "three times `single`, each beside the workers that it is the baseline of"
    by_place = {(line[2], line[1]): numbers(table, number) for number, line in enumerate(table.rows)}
    for nodes in ("1", "2", "4"):
        alone, together = by_place[nodes, "single"], by_place[nodes, "ddp"]
        assert together["speed-up"] == pytest.approx(alone["step"] / together["step"])  # type: ignore[operator]
    assert "single on 1 worker, 6.00 ±0.00 s, in run cell-4 for ddp on 4 workers" in table.note


def test_a_baseline_that_a_filter_leaves_out_is_shown_all_the_same() -> None:
    rows = [row("single", 1, *[1.0] * 5, run="one"), row("ddp", 2, *[0.6] * 5, run="two")]
    spec = Table(
        title="t", stage="scale", rows=["method", "workers"], values=["speedup"], where={"workers": 2}, note="N."
    )
    table = build_table(spec, rows)
    assert [line[:2] for line in table.rows] == [["single", "1"], ["ddp", "2"]]
    assert table.note == "N. Held against single on 1 worker, 1.00 ±0.00 s, in run one."
    assert build_table(spec.model_copy(update={"values": ["step"]}), rows).note == "N."


def test_the_baseline_is_the_one_that_ran_side_by_side() -> None:
    rows = [
        row("single", 1, 1.0, run="other"), row("single", 1, 3.0, run="this"), row("ddp", 2, 1.5, run="this"),
    ]  # fmt: skip
    found = VALUES["speedup"].read(rows[2], rows)
    assert found is not None
    assert found.value == 2.0


def test_no_row_is_dropped_from_a_table_in_silence() -> None:
    rows = [row("ddp", 2, 1.0, point={"run": "first"}), row("ddp", 2, 2.0, point={"run": "second"})]
    table = build_table(Table(title="t", stage="scale", rows=["method"], values=["step"]), rows)
    assert [line[:2] for line in table.rows] == [["ddp", "first"], ["ddp", "second"]]
    assert table.columns[:2] == ["method", "run"]


def test_a_ratio_to_ddp_is_of_the_same_run() -> None:
    rows = [row("ddp", 2, 1.0, run="one"), row("bucketed", 2, 0.9, run="two")]
    assert VALUES["time_to_ddp"].read(rows[1], rows) is None
    rows = [row("ddp", 2, 1.0, run="one"), row("bucketed", 2, 0.9, run="one")]
    assert VALUES["time_to_ddp"].read(rows[1], rows) is not None


def test_a_count_is_written_out() -> None:
    assert format_quantity(Quantity(20480.0), "") == "20480"
    assert format_quantity(Quantity(432.0), "") == "432"
