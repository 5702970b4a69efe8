"""The timeline of a step, from made-up events."""

from __future__ import annotations

from dataclasses import replace

from syncline.events import Events, Phase, RankStep, Step, Steps, Transfer
from syncline.study.figures import distinct_names, timeline_of
from syncline.study.rows import Row

MS = 1_000_000


def step(number: int, length: int) -> Step:
    begin = number * 1000 * MS
    ranks = {
        rank: RankStep(
            rank,
            begin + rank * MS,
            begin + length * MS,
            (Phase("forward", begin + rank * MS, begin + 5 * MS),),
            (Transfer("all_reduce", "bucket 0", 2000, begin + 5 * MS, begin + 6 * MS, begin + 8 * MS),),
        )
        for rank in (0, 1)
    }
    return Step(number, 0, ranks)


def events(*steps: Step) -> Events:
    return Events(2, {}, {"ddp": Steps.of(steps)}, {}, {}, [])


def test_a_typical_step_is_drawn_with_its_lanes() -> None:
    timeline = timeline_of(events(step(0, 90), step(1, 10), step(2, 30), step(3, 20)), "ddp", warmup=1)
    assert timeline is not None
    assert timeline.title == "ddp: step 3"
    assert timeline.lanes == [f"rank {rank} {kind}" for rank in (0, 1) for kind in ("compute", "communication")]
    bars = [(bar.lane, bar.name, bar.start_ms, bar.length_ms) for bar in timeline.spans]
    assert bars[0] == ("rank 0 compute", "forward", 0.0, 5.0)
    assert bars[2] == ("rank 1 compute", "forward", 1.0, 4.0)
    assert bars[3] == ("rank 1 communication", "transfer", 6.0, 2.0)
    assert timeline.spans[1].text == "all_reduce: bucket 0, 2.0 kB: 2.00 ms"
    assert "rank 1 compute forward 4.0 ms" in timeline.text


def test_titles_tell_rows_of_one_method_apart() -> None:
    cases = (("ddp", 16, True), ("ddp", 32, True), ("ring", 16, True), ("ddp", 16, False))
    points = [{"method": name, "workers": 2, "batch_per_worker": batch, "overlap": on} for name, batch, on in cases]
    names = distinct_names([Row("s", point) for point in points])
    assert names == [
        "ddp, batch per worker 16, overlap yes",
        "ddp, batch per worker 32, overlap yes",
        "ring, batch per worker 16, overlap yes",
        "ddp, batch per worker 16, overlap no",
    ]
    assert distinct_names([Row("s", points[0]), Row("s", points[2])]) == ["ddp", "ring"]


def test_a_method_that_sends_nothing_has_no_empty_lanes() -> None:
    whole = step(0, 10)
    alone = Step(0, 0, {rank: replace(own, transfers=()) for rank, own in whole.ranks.items()})
    timeline = timeline_of(events(alone), "ddp")
    assert timeline is not None
    assert timeline.lanes == ["rank 0 compute", "rank 1 compute"]


def test_transfers_of_the_step_before_and_what_waits_for_them_are_drawn() -> None:
    late = Transfer("all_reduce", "bucket 3", 4000, -4 * MS, -2 * MS, 3 * MS)
    own = RankStep(
        0, 0, 10 * MS, (Phase("forward", 0, 6 * MS),), carried=(late,), stalls=(Phase("bucket 3", 2 * MS, 3 * MS),)
    )
    timeline = timeline_of(events(Step(1, 0, {0: own})), "ddp")
    assert timeline is not None
    assert [(bar.lane, bar.name, bar.start_ms, bar.length_ms) for bar in timeline.spans] == [
        ("rank 0 compute", "forward", 0.0, 6.0),
        ("rank 0 compute", "stall", 2.0, 1.0),
        ("rank 0 communication", "transfer of the step before", -2.0, 5.0),
    ]
    assert timeline.spans[1].text == "waits for bucket 3: 1.00 ms"


def test_a_run_without_steps_has_none() -> None:
    assert timeline_of(events(), "ddp") is None
    assert timeline_of(events(step(0, 10)), "ring") is None
