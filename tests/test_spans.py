"""The event log: what is written, when, and what can be read after a crash."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path

import pytest
from conftest import wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from syncline import spans
from syncline.block_file import LARGE, tail_of
from syncline.blocks import HEAD, MARK, bodies_of, body_of, encode
from syncline.spans import FLUSH_EVERY_NS, FORMAT, EventLog, logging_to, read_log


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


def test_flush_writes_only_what_is_old_unless_forced(tmp_path: Path, clock: list[int]) -> None:
    path = tmp_path / "deep" / "rank-0.blocks"
    log = EventLog(path)

    def written() -> list[float]:
        return [record["value"] for record in read_log(path)[1:]]

    log.add("loss", value=1.0)
    log.flush()
    assert written() == []
    clock[0] += FLUSH_EVERY_NS + 1
    log.flush()
    assert written() == [1.0]
    log.add("loss", value=2.0)
    log.flush()
    assert written() == [1.0]
    log.flush(force=True)
    assert written() == [1.0, 2.0]
    log.close()


def test_records_of_a_step_that_hangs_are_written_without_a_flush(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.blocks"
    log = EventLog(path)
    with log.span("forward"):
        pass
    log._flushed_ns -= FLUSH_EVERY_NS  # the last writing was long ago, and no step ends
    wait_until(lambda: [record["kind"] for record in read_log(path)] == ["header", "phase"], 30, "the log")
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


def write_steps(path: Path, count: int, *, close: bool = True) -> EventLog:
    """As a training does it: some records and a flush for each step."""
    log = EventLog(path)
    for step in range(count):
        log.step = step
        with log.span("forward"):
            pass
        log.add("loss", value=float(step))
        log.flush(force=True)
    if close:
        log.close()
    return log


def steps_in(path: Path) -> list[int]:
    return [record["step"] for record in read_log(path) if record["kind"] == "loss"]


def test_cut_at_any_byte_all_that_was_written_before_is_read(tmp_path: Path) -> None:
    """Of the file and of its tail, which holds what has not filled a block yet."""
    path = tmp_path / "rank-0.blocks"
    log = write_steps(path, 4, close=False)
    assert steps_in(path) == [0, 1, 2, 3]
    tail = tail_of(path).read_bytes()
    for cut in range(len(tail) + 1):
        tail_of(path).write_bytes(tail[:cut])
        lines = tail[:cut].partition(b"\n")[2].split(b"\n")
        assert steps_in(path) == list(range(sum(b'"loss"' in line and line.endswith(b"}") for line in lines))), cut
    tail_of(path).write_bytes(tail)
    log.close()
    blocks = [encode([{"kind": "loss", "step": 3 * block + step} for step in range(3)]) for block in range(3)]
    whole = b"".join(blocks)
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        count = sum(cut >= sum(map(len, blocks[: end + 1])) for end in range(3))
        assert steps_in(path) == list(range(3 * count)), cut
    for place in range(len(whole)):  # one byte damaged: one block lost
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        assert len(steps_in(path)) == 6, place


def test_killed_writer_loses_nothing_that_it_wrote_wherever_it_was(tmp_path: Path) -> None:
    """A full block goes into the file before the tail is emptied: a tail that the file holds already says nothing."""
    path = tmp_path / "rank-0.blocks"
    log = write_steps(path, 3, close=False)
    tail = tail_of(path).read_bytes()
    log.close()
    assert not tail_of(path).exists()
    tail_of(path).write_bytes(tail)
    assert steps_in(path) == [0, 1, 2]
    path.write_bytes(path.read_bytes()[:-5])  # the block was not whole yet: the tail counts
    assert steps_in(path) == [0, 1, 2]
    resumed = write_steps(path, 2, close=False)
    assert steps_in(path) == [0, 1, 2, 0, 1]
    assert [record["kind"] for record in read_log(path)].count("header") == 2
    resumed.close()
    assert steps_in(path) == [0, 1, 2, 0, 1]


def test_many_steps_fill_blocks_and_read_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.blocks"
    log = EventLog(path)
    odd = [1, 1.0, True, None, "é", 10**30, -(2**63), [1, {"a": None}], float("inf")]
    for step in range(LARGE):
        log.step = step
        log.add("odd", value=odd[step % len(odd)])
        about = {"name": "all_reduce", "label": f"bucket {step % 3}", "bytes": step % 7}
        log.add("collective", **about, ready=5, start=9, end=step)
        log.flush(force=step % 50 == 0)
    written = log.records[:]
    log.close()
    _, *records = read_log(path)
    assert [record["value"] for record in records[::2]] == [odd[step % len(odd)] for step in range(LARGE)]
    assert [type(record["value"]) for record in records[::2]] == [type(odd[step % len(odd)]) for step in range(LARGE)]
    assert [record["end"] for record in records[1::2]] == list(range(LARGE))
    assert records[-len(written) :] == written
    assert len(list(bodies_of(path.read_bytes()))) == 2


@given(content=st.binary(max_size=300), place=st.integers(0, 300))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_file_holds_is_read_or_passed_over(tmp_path: Path, content: bytes, place: int) -> None:
    path = tmp_path / "rank-0.blocks"
    body = body_of([{"kind": "loss", "start": 3, "end": step, "step": step} for step in range(9)])
    foreign = body[:place] + content
    head = HEAD.pack(MARK, len(foreign), zlib.crc32(foreign))  # a right checksum around what makes no sense
    path.write_bytes(head + foreign + content + encode([{"kind": "loss", "step": 7}]))
    assert steps_in(path)[-1:] == [7] or MARK[:1] in content


def test_full_disk_leaves_whole_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank-0.blocks"
    log = write_steps(path, 2, close=False)
    write = os.write

    def full(file: int, content: bytes) -> int:
        if len(content) > 20:
            return write(file, content[:20])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    log.add("loss", value=9.0)
    with pytest.raises(OSError, match="No space left"):
        log.flush(force=True)
    assert steps_in(path) == [0, 1]
    monkeypatch.setattr(os, "write", write)
    log.close()
    assert steps_in(path) == [0, 1, 1]  # it comes with the block
