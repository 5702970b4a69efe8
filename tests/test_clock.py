"""The exchange between clocks: the true offset lies inside the interval that is stated."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from helpers import on_threads

from syncline.comm import Communicator
from syncline.comm.clock import note_clock
from syncline.spans import EventLog, Record

OFFSETS_NS = (0, 7_000_000_000, -3_000_000)


def shifted(rank: int) -> Callable[[], int]:
    return lambda: time.monotonic_ns() + OFFSETS_NS[rank]


def clock_records(log: EventLog) -> list[Record]:
    return [record for record in log.records if record["kind"] == "clock"]


def test_offset_to_rank_0_lies_inside_its_interval() -> None:
    def live(comm: Communicator, log: EventLog) -> list[Record]:
        for _ in range(2):
            note_clock(comm, log, now=shifted(comm.rank), identity=f"clock {comm.rank}")
        return clock_records(log)

    found = on_threads(3, live)
    assert found[0] == []
    for rank in (1, 2):
        assert len(found[rank]) == 2
        for record in found[rank]:
            assert record["offset"] == pytest.approx(-OFFSETS_NS[rank], abs=record["interval"])
            assert 0 < record["interval"] < 1e9


def test_ranks_with_rank_0s_clock_are_not_asked() -> None:
    def live(comm: Communicator, log: EventLog) -> list[Record]:
        note_clock(comm, log, identity="a" if comm.rank < 2 else "b")
        return clock_records(log)

    assert [len(records) for records in on_threads(3, live)] == [0, 0, 1]


def test_ranks_of_one_machine_have_one_clock() -> None:
    def live(comm: Communicator, log: EventLog) -> list[Record]:
        note_clock(comm, log)
        return clock_records(log)

    assert on_threads(2, live) == [[], []]
    assert on_threads(1, live) == [[]]
