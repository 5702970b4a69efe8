"""Reading a run's event logs: steps by method and rank on one clock, and what a damaged log still says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from event_logs import MS, header, phase, span, transfer, whole_step, write_log

from syncline.errors import RunFolderError
from syncline.events import read_events
from syncline.spans import FORMAT


def two_ranks(run: Path, steps: int = 2) -> None:
    for rank in range(2):
        lines = [header(rank, 2, threads=rank + 1, host=rank)]
        for step in range(steps):
            lines += whole_step(step, 50.0 * step + rank)
        write_log(run, rank, lines)


def test_steps_are_read_by_method_and_rank(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    events = read_events(tmp_path)
    assert events.problems == []
    assert (events.world_size, sorted(events.ranks)) == (2, [0, 1])
    assert (events.ranks[1].threads, events.ranks[1].host) == (2, 1)
    assert list(events.steps) == ["bucketed"]
    assert [step.number for step in events.complete("bucketed")] == [0, 1]
    one = events.steps["bucketed"][1].ranks[1]
    assert (one.start, one.end, one.duration) == (51 * MS, 91 * MS, 40 * MS)
    assert [part.name for part in one.phases] == ["forward", "backward", "sync", "update"]
    assert [(part.label, part.ready, part.end) for part in one.transfers] == [("bucket 0", 81 * MS, 86 * MS)]


def test_a_method_goes_by_the_name_that_it_has_today(tmp_path: Path) -> None:
    write_log(tmp_path, 0, [header(0, 1), *whole_step(0, method="data-parallel")])
    events = read_events(tmp_path)
    assert len(events.complete("thread-replicas")) == 1
    assert set(events.table()["method"]) == {"thread-replicas"}


def test_what_lies_outside_a_step_is_not_part_of_it(tmp_path: Path) -> None:
    meeting, loss_line = transfer("turn", 0, -3, -3, -1), transfer("loss line", 0, 41, 41, 43)
    write_log(tmp_path, 0, [header(0, 1), meeting, *whole_step(0), loss_line, phase("evaluate", 0, 44, 60)])
    events = read_events(tmp_path)
    (step,) = events.steps["bucketed"]
    assert [one.label for one in step.ranks[0].transfers] == ["bucket 0"]
    assert step.ranks[0].phase("evaluate") is None
    assert [record["label"] for _, record in events.of_kind("collective")] == ["turn", "bucket 0", "loss line"]


def test_rank_that_only_waits_its_turn_takes_no_part(tmp_path: Path) -> None:
    write_log(tmp_path, 0, [header(0, 2), *whole_step(0, method="single"), *whole_step(0, 50)])
    write_log(tmp_path, 1, [header(1, 2), span("step", 0, 0, 0.01, "single"), *whole_step(0, 50)])
    events = read_events(tmp_path)
    assert events.taking_part("single") == [0]
    assert events.taking_part("bucketed") == [0, 1]
    assert len(events.complete("single")) == len(events.complete("bucketed")) == 1


def test_truncated_log_shows_what_is_whole(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    path = tmp_path / "events" / "rank-1.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    events = read_events(tmp_path)
    assert [step.number for step in events.complete("bucketed")] == [0]
    assert events.problems == [
        "rank-1.jsonl: skipped 1 line, cut short or damaged",
        "rank 1's log ends in step 1, after update",
    ]


def test_damage_in_the_middle_costs_one_line(tmp_path: Path) -> None:
    lines = [json.dumps(line) for line in [header(0, 1), *whole_step(0), *whole_step(1, 50)]]
    for place, damage in ((1, "{"), (2, '{"kind": "phase", "name": "backward"}'), (9, "[1]"), (9, '"\\ud800"')):
        path = write_log(tmp_path, 0, [])
        path.write_text("\n".join([*lines[:place], damage, *lines[place:]]) + "\n")
        events = read_events(tmp_path)
        assert [step.number for step in events.complete("bucketed")] == [0, 1]
        assert events.problems == ["rank-0.jsonl: skipped 1 line, cut short or damaged"]


def test_crashed_run_says_where_each_rank_was(tmp_path: Path) -> None:
    write_log(tmp_path, 0, [header(0, 2), *whole_step(0), *whole_step(1, 50)[:2]])
    write_log(tmp_path, 1, [header(1, 2), *whole_step(0), *whole_step(1, 50)[:1]])
    events = read_events(tmp_path)
    assert [step.number for step in events.complete("bucketed")] == [0]
    assert events.problems == [
        "rank 0's log ends in step 1, after backward",
        "rank 1's log ends in step 1, after forward",
    ]


def test_empty_and_missing_logs_are_said(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="has no event log"):
        read_events(tmp_path)
    write_log(tmp_path, 0, [])
    with pytest.raises(RunFolderError, match=r"rank-0\.jsonl is empty"):
        read_events(tmp_path)
    write_log(tmp_path, 1, [header(1, 3), *whole_step(0)])
    events = read_events(tmp_path)
    assert events.problems == ["rank-0.jsonl is empty", "no log of rank 0, 2"]
    assert [step.number for step in events.complete("bucketed")] == [0]


def test_newer_log_is_said_and_read_as_far_as_it_is_known(tmp_path: Path) -> None:
    lines = [header(0, 1, format=FORMAT + 1), {"kind": "hologram", "depth": 3}, *whole_step(0)]
    write_log(tmp_path, 0, lines)
    events = read_events(tmp_path)
    assert len(events.problems) == 1
    assert f"newer version (format {FORMAT + 1}, this one reads {FORMAT})" in events.problems[0]
    assert len(events.complete("bucketed")) == 1


def test_resumed_run_counts_the_last_time_that_a_step_was_taken(tmp_path: Path) -> None:
    """Step 1 was taken, lost in a crash after it, and taken again on another boot's clock."""
    for rank in range(2):
        first = [header(rank, 2), *whole_step(0), *whole_step(1, 50), *whole_step(2, 100)[:3]]
        resumed = header(rank, 2, wall_ns=2 * 10**18 + rank, clock="another")
        write_log(tmp_path, rank, [*first, resumed, *whole_step(1, 7), *whole_step(2, 57)])
    events = read_events(tmp_path)
    assert events.problems == []
    steps = events.complete("bucketed")
    assert [(step.number, step.session, step.ranks[0].start // MS) for step in steps] == [
        (0, 0, 0),
        (1, 1, 7),
        (2, 1, 57),
    ]


def test_rank_that_never_came_up_leaves_the_sessions_in_step(tmp_path: Path) -> None:
    resumed = 2 * 10**18
    write_log(tmp_path, 0, [header(0, 2), header(0, 2, wall_ns=resumed), *whole_step(0)])
    write_log(tmp_path, 1, [header(1, 2, wall_ns=resumed + 1), *whole_step(0)])
    (step,) = read_events(tmp_path).complete("bucketed")
    assert (step.session, sorted(step.ranks)) == (1, [0, 1])


# Clocks.


def clock(at: float, offset: float, interval: float = 1.0) -> dict[str, object]:
    times = {"at": round(at * MS), "offset": round(offset * MS), "interval": round(interval * MS)}
    return {"kind": "clock", **times, "step": -1}


def test_other_clock_is_set_to_rank_0s_and_may_drift(tmp_path: Path) -> None:
    write_log(tmp_path, 0, [header(0, 2), *whole_step(0)])
    lines = [clock(1000, -1000, 0.5), *whole_step(0, 1000), clock(1040, -1004, 2)]
    write_log(tmp_path, 1, [header(1, 2, clock="other"), *lines])
    events = read_events(tmp_path)
    assert events.problems == []
    own = events.steps["bucketed"][0].ranks[1]
    assert (own.start, own.end) == (0, 36 * MS)  # it runs 10 % fast: its 40 ms are 36
    assert own.transfers[0].ready == 27 * MS
    assert (events.alignments[0].source, events.alignments[1].source) == ("same clock", "ping")
    assert events.alignments[1].interval_ns == 2 * MS


def test_one_exchange_sets_the_clock_without_drift(tmp_path: Path) -> None:
    write_log(tmp_path, 0, [header(0, 2), *whole_step(0)])
    write_log(tmp_path, 1, [header(1, 2, clock="other"), clock(1000, -1000), *whole_step(0, 1000)])
    assert read_events(tmp_path).steps["bucketed"][0].ranks[1].end == 40 * MS


def test_clocks_that_were_never_compared_are_said(tmp_path: Path) -> None:
    write_log(tmp_path, 0, [header(0, 2, wall_ns=10**18, monotonic_ns=0), *whole_step(0)])
    other = header(1, 2, clock="other", wall_ns=10**18 + 5 * MS, monotonic_ns=1000 * MS)
    write_log(tmp_path, 1, [other, *whole_step(0, 1000)])
    events = read_events(tmp_path)
    assert events.steps["bucketed"][0].ranks[1].start == 5 * MS
    assert len(events.problems) == 1
    assert "did not compare their clocks" in events.problems[0]
