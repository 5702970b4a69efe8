"""Sentences of the lab on replicas and processes: with data that makes them true, and data that makes them false."""

from __future__ import annotations

from typing import Any

from syncline.marks import STRETCHED
from syncline.study.file import Table
from syncline.study.lab_code import LABS, load_answers
from syncline.study.rows import Quantity, Row
from syncline.study.tables import build_table
from syncline.study.values import VALUES

COMPUTE = {"forward": 0.3, "backward": 0.6}

ANSWERS = load_answers(LABS / "hpml-dataparallel")


def row(method: str, workers: int, *seconds: float, batch: int = 8, **more: Any) -> Row:
    point = {"method": method, "workers": workers, "global_batch": batch * workers, "batch_per_worker": batch}
    return Row("weak", {**point, **more.pop("point", {})}, seconds=seconds, **more)


def strong(method: str, workers: int, *seconds: float) -> Row:
    return Row("strong", {"method": method, "workers": workers, "global_batch": 32}, seconds=seconds)


def say(name: str, rows: list[Row], **others: list[Row]) -> str:
    return ANSWERS[name](rows, others)


# Which is faster, and why.


def test_processes_are_faster_because_threads_lose_more_than_sending_costs() -> None:
    rows = [
        row("thread-replicas", 2, *[2.0] * 5, parts={"forward": 0.8, "backward": 1.2}),
        row("ddp", 2, *[1.0] * 5, parts={**COMPUTE, "wire": 0.1}),
    ]
    said = say("replicas-or-processes", rows)
    assert said.startswith(
        "On 2 workers ddp is faster at 8 samples per worker (1.00 ±0.00 s a step with ddp, 2.00 ±0.00 s with "
        "thread-replicas: 2.00 times as long). At 8, forward"
    )
    assert "forward and backward take 1.10 s longer in thread-replicas" in said
    assert "ddp spends 100 ms more on copying, waiting and sending: sharing one interpreter" in said


def test_replicas_are_faster_where_sending_costs_more() -> None:
    rows = [
        row("thread-replicas", 2, *[1.0] * 5, parts=COMPUTE),
        row("ddp", 2, *[1.5] * 5, parts={**COMPUTE, "wire": 0.6}),
    ]
    said = say("replicas-or-processes", rows)
    assert "On 2 workers thread-replicas is faster at 8 samples per worker" in said
    assert "1.50 times as long" in said
    assert "the threads do not slow each other down, and have nothing to send" in said
    slow = row("thread-replicas", 2, *[1.1] * 5, parts={"forward": 0.3, "backward": 0.8})
    assert "the threads save more than they cost each other" in say("replicas-or-processes", [slow, rows[1]])


def test_what_the_parts_do_not_explain_is_left_unexplained() -> None:
    rows = [
        row("thread-replicas", 2, *[2.0] * 5, parts={**COMPUTE, "update": 1.1}),
        row("ddp", 2, *[1.0] * 5, parts={**COMPUTE, "wire": 0.1}),
    ]
    assert "that alone does not explain the difference" in say("replicas-or-processes", rows)


def test_no_difference_is_said_and_not_explained() -> None:
    rows = [row("thread-replicas", 2, 1.0, 1.5, 2.0), row("ddp", 2, 1.1, 1.5, 1.9)]
    said = say("replicas-or-processes", rows)
    assert "this run shows no difference" in said
    assert "faster" not in said
    assert "interpreter" not in said
    assert say("replicas-or-processes", rows[:1]).startswith("Not answered")


def test_workers_that_share_cores_are_not_what_is_judged() -> None:
    shared = (STRETCHED,)
    rows = [row(method, count, *[1.0 * count] * 5, marks=shared if count == 4 else ())
            for count in (2, 4) for method in ("thread-replicas", "ddp")]  # fmt: skip
    assert say("replicas-or-processes", rows).startswith("On 2 workers")


# Epochs, data and memory.


def epoch(method: str, batch: int, seconds: float, data: float) -> Row:
    parts = {"data": data, "forward": seconds - data}
    return row(method, 2, *[seconds] * 5, batch=batch, parts=parts, figures={"train_samples": 1000})


def test_an_epoch_without_data_leaves_the_waiting_out() -> None:
    one = epoch("ddp", 50, 1.0, 0.25)
    assert VALUES["epoch"].read(one, [one]) == Quantity(10.0)
    assert VALUES["epoch_without_data"].read(one, [one]) == Quantity(7.5)


def test_what_loading_costs() -> None:
    slow = [epoch("ddp", 8, 1.0, 0.2), epoch("thread-replicas", 8, 1.0, 0.1)]
    said = say("data-loading", slow)
    assert "adds between 11.1% (thread-replicas, 8 per worker) and 25.0% (ddp, 8 per worker)" in said
    assert say("data-loading", [epoch("ddp", 8, 1.0, 0.001)]).startswith(
        "Almost nothing: waiting for batches adds at most 0.1%"
    )
    assert say("data-loading", [row("ddp", 2, 1.0)]).startswith("Not answered")


def test_the_batch_with_the_shortest_epoch() -> None:
    rows = [epoch("ddp", 32, 2.0, 0), epoch("ddp", 128, 4.0, 0)]
    known = {"bytes_per_sample": 5e6, "needed_bytes": 1}
    memory = [row("single", 1, batch=32, figures={**known, "fits": True}),
              row("single", 1, batch=128, figures={**known, "fits": False})]  # fmt: skip
    said = say("epoch-by-batch", rows, memory=memory)
    assert said.startswith("ddp: an epoch is shortest at 128 per worker; at 32 it takes 2.00 times as long.")
    assert (
        "A sample takes 5.0 MB of memory (measured): one worker has room for a batch of 32, but not for one of 128."
        in said
    )
    rising = say("epoch-by-batch", [epoch("ddp", 32, 2.0, 0), epoch("ddp", 128, 16.0, 0)])
    assert rising == "ddp: an epoch is shortest at 32 per worker; at 128 it takes 2.00 times as long."
    flat = [row("ddp", 2, 1.0, 2.0, 3.0, batch=8), row("ddp", 2, 4.1, 8.1, 12.1, batch=32)]
    assert "no difference between the batch sizes" in say("epoch-by-batch", flat)
    full = say("epoch-by-batch", rows, memory=memory[1:])
    assert "One worker has room for none of the batches." in full
    assert say("epoch-by-batch", rows[:1]).startswith("Not answered")


# Scaling and the link.


def test_the_kind_of_scaling_follows_from_what_stayed_the_same() -> None:
    weak = [row("single", 1, 1.0), row("ddp", 2, 1.25), row("ddp", 4, 2.0)]
    fixed = [strong("single", 1, 1.0), strong("ddp", 2, 0.8)]
    said = say("kind-of-scaling", weak, strong=fixed)
    assert (
        "the workers: weak scaling. The best speed-up is 1.60 on 2 workers (ddp, 8 per worker) and 2.00 on 4 workers"
        in said
    )
    assert "strong scaling. The best speed-up is 1.25 on 2 workers (ddp, 32 in all)." in said
    alone = say("kind-of-scaling", fixed)
    assert alone.startswith("At one global batch")
    assert "weak" not in alone
    assert "shared cores" not in said
    shared = [weak[0], row("ddp", 4, 2.0, marks=(STRETCHED,))]
    assert "Some of these workers shared cores" in say("kind-of-scaling", shared)
    assert say("kind-of-scaling", weak[1:]).startswith("Not answered")


def test_what_workers_cost_over_one() -> None:
    rows = [row("single", 1, 1.0), row("ddp", 2, 1.25)]
    assert VALUES["over_one_worker"].read(rows[1], rows) == Quantity(0.25)
    assert VALUES["over_one_worker"].read(rows[0], rows) is None
    table = Table(title="t", stage="weak", values=["over_one_worker"], where={"workers": 2})
    assert build_table(table, rows).rows == [["single", "-"], ["ddp", "250 ms"]], "the baseline is in the table"


def test_the_same_doubt_about_several_rows_is_said_once() -> None:
    rows = [row("single", 1, *[1.0] * 5), row("ddp", 2, *[0.9] * 5), row("bucketed", 2, *[0.9] * 5)]
    warnings = build_table(Table(title="t", stage="weak", values=["speedup"]), rows).warnings
    assert len(warnings) == 1
    assert warnings[0].text.endswith("The same applies to bucketed on 2 workers.")


def test_how_much_of_the_link_is_used() -> None:
    figures = {"gradient_bytes": 1e9, "link_bytes_per_s": 4e9, "probe_bytes_per_s": 2.5e9}
    one = row("ddp", 2, 1.0, parts={"wire": 0.5, "hidden": 0.5}, figures=figures)
    assert VALUES["utilisation"].read(one, [one]) == Quantity(0.25)
    assert VALUES["of_probe"].read(one, [one]) == Quantity(0.4)
    said = say("link-use", [one])
    assert said == (
        "At most 25%: ddp on 2 workers at 8 per worker moves 1 GB/s of the 4 GB/s that the link carries, 40% of what "
        "an all-reduce reaches while nothing computes."
    )
    memory = row("shared-memory", 2, 1.0, parts={"wire": 0.1}, figures={"gradient_bytes": 1e9})
    assert say("link-use", [one, memory]).endswith("nothing computes. shared-memory moves 10 GB/s.")
    unknown = row("ddp", 2, 1.0, parts={"wire": 0.5}, figures={"gradient_bytes": 1e9})
    assert VALUES["utilisation"].read(unknown, [unknown]) is None
    assert say("link-use", [unknown]).startswith("Not answered")


def test_table_2_of_the_sheet_divides_an_epoch_of_one_worker() -> None:
    def timed(workers: int, seconds: float) -> Row:
        point = {"method": "ddp", "workers": workers, "global_batch": 10 * workers, "batch_per_worker": 10}
        return Row("weak", point, seconds=[seconds], figures={"train_samples": 200})

    rows = [timed(1, 1.0), timed(2, 1.5)]
    read = {
        name: VALUES[name].read(rows[1], rows) for name in ("epoch_seconds", "epoch_compute", "epoch_communication")
    }
    assert {name: value.value for name, value in read.items() if value} == {
        "epoch_seconds": 15.0, "epoch_compute": 10.0, "epoch_communication": 5.0
    }  # fmt: skip
    assert VALUES["epoch_compute"].text(read["epoch_compute"]) == "10.0 s"
    assert VALUES["epoch_communication"].read(rows[0], rows) is None
