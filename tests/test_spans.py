"""The event log: what is written, when, and what can be read after a crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline import spans
from syncline.spans import FORMAT, EventLog, logging_to, read_log


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The monotonic clock's nanoseconds, in the hand of the test."""
    now = [5_000_000_000]
    monkeypatch.setattr(spans.time, "monotonic_ns", lambda: now[0])
    return now


def test_span_notes_name_step_and_both_ends(clock: list[int]) -> None:
    log = EventLog()
    log.step = 4
    with log.span("forward"):
        clock[0] += 70
    assert log.records == [
        {"seq": 0, "kind": "phase", "name": "forward", "start": 5_000_000_000, "end": 5_000_000_070, "step": 4}
    ]


def test_span_is_recorded_also_when_the_body_raises() -> None:
    log = EventLog()
    with pytest.raises(KeyError), log.span("backward"):
        raise KeyError
    assert [record["name"] for record in log.records] == ["backward"]


def test_records_are_numbered_and_stamped_with_the_method() -> None:
    log = EventLog()
    log.add("loss", value=2.5)
    log.method = "ddp"
    log.add("loss", value=1.5)
    assert [record["seq"] for record in log.records] == [0, 1]
    assert [record.get("method") for record in log.records] == [None, "ddp"]


def test_flush_writes_only_what_is_a_second_old_unless_forced(tmp_path: Path, clock: list[int]) -> None:
    path = tmp_path / "deep" / "rank-0.jsonl"
    log = EventLog(path)

    def written() -> list[float]:
        return [record["value"] for record in read_log(path)[1:]]

    log.add("loss", value=1.0)
    log.flush()
    assert written() == []
    clock[0] += 1_000_000_001
    log.flush()
    assert written() == [1.0]
    log.add("loss", value=2.0)
    log.flush()
    assert written() == [1.0]
    log.flush(force=True)
    assert written() == [1.0, 2.0]
    log.close()


def test_log_without_a_path_keeps_its_records_over_a_flush() -> None:
    log = EventLog()
    log.add("loss", value=1.0)
    log.flush(force=True)
    log.close()
    assert len(log.records) == 1


def test_file_starts_with_a_header_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "rank-2.jsonl"
    with logging_to(path, rank=2, world_size=4) as log, log.span("data"):
        pass
    header, record = read_log(path)
    assert header["kind"] == "header"
    assert (header["format"], header["rank"], header["world_size"]) == (FORMAT, 2, 4)
    assert header["wall_ns"] > 1e18
    assert record["name"] == "data"


def test_log_is_closed_and_whole_when_the_body_raises(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with pytest.raises(KeyError), logging_to(path, rank=0, world_size=1) as log, log.span("data"):
        raise KeyError
    assert [record["kind"] for record in read_log(path)] == ["header", "phase"]


def test_last_line_cut_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with logging_to(path, rank=0, world_size=1) as log:
        log.add("loss", value=1.0)
        log.add("loss", value=2.0)
    path.write_text(path.read_text()[:-9])
    assert [record.get("value") for record in read_log(path)] == [None, 1.0]


def test_resumed_log_follows_a_cut_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for value in (1.0, 2.0):
        with logging_to(path, rank=0, world_size=1) as log:
            log.add("loss", value=value)
            log.add("loss", value=value)
        path.write_text(path.read_text()[:-9])
    kinds = [(record["kind"], record.get("value")) for record in read_log(path)]
    assert kinds == [("header", None), ("loss", 1.0), ("header", None), ("loss", 2.0)]
