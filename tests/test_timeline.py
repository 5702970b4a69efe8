"""The timeline of a step, from made-up events."""

from __future__ import annotations

from syncline.events import Events, Phase, RankStep, Step, Transfer
from syncline.study.figures import timeline_of

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
    return Events(2, {}, {"ddp": list(steps)}, {}, {}, [])


def test_a_typical_step_is_drawn_with_its_lanes() -> None:
    timeline = timeline_of(events(step(0, 90), step(1, 10), step(2, 30), step(3, 20)), "ddp", warmup=1)
    assert timeline is not None
    assert timeline.title == "Step 3 of ddp"
    assert timeline.lanes == [f"rank {rank} {kind}" for rank in (0, 1) for kind in ("compute", "communication")]
    bars = [(bar.lane, bar.name, bar.start_ms, bar.length_ms) for bar in timeline.spans]
    assert bars[0] == ("rank 0 compute", "forward", 0.0, 5.0)
    assert bars[2] == ("rank 1 compute", "forward", 1.0, 4.0)
    assert bars[3] == ("rank 1 communication", "transfer", 6.0, 2.0)
    assert timeline.spans[1].text == "all_reduce: bucket 0, 2.0 kB: 2.00 ms"
    assert "rank 1 compute forward 4.0 ms" in timeline.text


def test_a_run_without_steps_has_none() -> None:
    assert timeline_of(events(), "ddp") is None
    assert timeline_of(events(step(0, 10)), "ring") is None
