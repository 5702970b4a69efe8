"""The event log: what one rank did and when, as sequence-numbered records on the monotonic clock.

A file is JSON lines: a header, then one record a line. It is flushed about once a second, so after a crash all
but the last second can be read; a line cut short is the only damage possible.

    {"seq": 7, "kind": "phase", "name": "forward", "step": 3, "start": …, "end": …}
    {"seq": 8, "kind": "collective", "name": "all_reduce", "label": "classifier.bias", "bytes": 40,
     "ready": …, "start": …, "end": …, "step": 3}
    {"seq": 9, "kind": "pack", "label": "bucket 0", "start": …, "end": …, "busy": …, "step": 3}
    {"seq": 10, "kind": "loss", "value": 2.302, "samples": 64, "step": 3}

A pack record is time that the computing thread spent on copying gradients into or out of a bucket, or on dividing
them: `busy` nanoseconds in all between start and end. `events.py` puts the files of all ranks together.

Times are nanoseconds. Measuring is a span around the code; no algorithm holds a timer.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from syncline.machine import boot_id
from syncline.methods import OLD_NAMES

FORMAT = 1
FLUSH_EVERY_NS = 1_000_000_000

Record = dict[str, Any]


class EventLog:
    """One rank's log. Without a path it only remembers, in `records`; with keep=False not even that.

    Any thread may add records; `step` and `method` are stamped on each. `about` goes into the header: threads, host.
    """

    def __init__(
        self, path: Path | None = None, *, rank: int = 0, world_size: int = 1, keep: bool = True, **about: Any
    ) -> None:
        self.rank = rank
        self.also: EventLog | None = None
        """Another log that gets every record too, with that one's step and method."""
        self._keep = path is not None or keep
        self.step = -1
        self.method = ""
        self.records: list[Record] = []
        self._sequence = itertools.count()
        self._file = None
        self._flushed_ns = time.monotonic_ns()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut_unfinished_line(path)
            self._file = path.open("a")
            self._write([{**_header(rank, world_size), **about}])

    def span(self, name: str) -> Span:
        """Context manager: a phase of the step, from entry to exit, also when it raises."""
        return Span(self, name)

    @property
    def off(self) -> bool:
        return not self._keep and self.also is None

    def add(self, kind: str, *, step: int | None = None, **fields: Any) -> None:
        """A record of this moment's step, unless another one is named."""
        if self.also is not None:
            self.also.add(kind, **fields)
        if not self._keep:
            return
        record = {"seq": next(self._sequence), "kind": kind, **fields, "step": self.step if step is None else step}
        if self.method:
            record["method"] = self.method
        self.records.append(record)

    def pack(self, label: str, start_ns: int) -> None:
        """Copying or dividing gradients on the computing thread, from `start_ns` to now."""
        end_ns = time.monotonic_ns()
        self.add("pack", label=label, start=start_ns, end=end_ns, busy=end_ns - start_ns)

    def flush(self, *, force: bool = False) -> None:
        """Write what is new if the last write is a second old. Call it between steps, where no one waits."""
        now = time.monotonic_ns()
        if self._file is not None and (force or now - self._flushed_ns > FLUSH_EVERY_NS):
            self._flushed_ns = now
            # In place: a thread that adds at this moment adds to the same list.
            records = self.records[:]
            del self.records[: len(records)]
            self._write(records)

    def close(self) -> None:
        if self._file is not None:
            self.flush(force=True)
            self._file.close()
            self._file = None

    def _write(self, records: list[Record]) -> None:
        if self._file is not None:
            self._file.write("".join(json.dumps(record) + "\n" for record in records))
            self._file.flush()


class Span:
    """A plain class, because a generator-based context manager costs more than some spans last."""

    __slots__ = ("log", "name", "start")

    def __init__(self, log: EventLog, name: str) -> None:
        self.log = log
        self.name = name

    def __enter__(self) -> None:
        self.start = time.monotonic_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.log.add("phase", name=self.name, start=self.start, end=time.monotonic_ns())


def read_records(path: Path) -> Iterator[Record | None]:
    """What one rank's file holds, in order; None for a record that is cut short or damaged. Nothing else knows how
    records are stored."""
    for line in path.read_bytes().split(b"\n"):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
            yield None
            continue
        if record.get("method") in OLD_NAMES:
            record["method"] = OLD_NAMES[record["method"]]
        yield record


def read_log(path: Path) -> list[Record]:
    """The records of one rank's file that are whole, header first."""
    return [record for record in read_records(path) if record is not None]


@contextmanager
def logging_to(path: Path | None, *, rank: int, world_size: int) -> Iterator[EventLog]:
    log = EventLog(path, rank=rank, world_size=world_size)
    try:
        yield log
    finally:
        log.close()


def _cut_unfinished_line(path: Path) -> None:
    """What a crash left without an end must not run into the header of the resumed run."""
    if path.exists():
        content = path.read_bytes()
        os.truncate(path, content.rfind(b"\n") + 1)


def _header(rank: int, world_size: int) -> Record:
    return {
        "kind": "header",
        "format": FORMAT,
        "rank": rank,
        "world_size": world_size,
        "wall_ns": time.time_ns(),
        "monotonic_ns": time.monotonic_ns(),
        "clock": clock_identity(),
    }


def clock_identity() -> str:
    """Ranks with the same one read the same monotonic clock: one boot of one kernel, one time namespace."""
    namespace = Path("/proc/self/ns/time")
    return f"{boot_id() or platform.node()} {namespace.stat().st_ino if namespace.exists() else 0}"
