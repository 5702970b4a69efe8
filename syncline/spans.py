"""The event log: what one rank did and when, as sequence-numbered records on the monotonic clock.

A file is a header and records, in compressed blocks (see blocks.py). Records are written between steps once the last
writing is a second and a half ago, and in the middle of a step that lasts: after a crash, all but the last two
seconds can be read. Earlier versions wrote one record a line, as JSON; such files are read too. The records:

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
import platform
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from syncline.machine import boot_id
from syncline.methods import OLD_NAMES

if TYPE_CHECKING:
    from syncline.block_file import BlockFile

FORMAT = 2
FLUSH_EVERY_NS = 1_500_000_000
LOOK_EVERY_S = 0.4
"""How often a thread looks for records that no end of a step wrote: with the above, below two seconds."""
MOST_WAITING = 4096
"""Records: so that writing them never takes long."""
LOG_NAME = re.compile(r"rank-(\d+)\.(blocks|jsonl)")
"""JSON lines, in runs of earlier versions."""

Record = dict[str, Any]


def log_name(rank: int) -> str:
    return f"rank-{rank}.blocks"


def log_files(folder: Path) -> list[Path]:
    """The event logs in a folder, by rank; a rank whose run was begun by an earlier version may have two."""
    found = [(int(match[1]), path) for path in folder.glob("rank-*") if (match := LOG_NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


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
        self._file: BlockFile | None = None
        self._flushed_ns = time.monotonic_ns()
        self._writing = threading.Lock()
        self._closed = threading.Event()
        if path is not None:
            from syncline.block_file import BlockFile  # numpy, which most commands do without

            self._file = BlockFile(path)
            self._file.write([{**_header(rank, world_size), **about}])
            threading.Thread(target=self._watch, name="syncline-log", daemon=True).start()

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
        # In place, since another dict would cost as much as all the rest.
        fields["kind"] = kind
        fields["seq"] = next(self._sequence)
        fields["step"] = self.step if step is None else step
        if self.method:
            fields["method"] = self.method
        self.records.append(fields)

    def pack(self, label: str, start_ns: int) -> None:
        """Copying or dividing gradients on the computing thread, from `start_ns` to now."""
        end_ns = time.monotonic_ns()
        self.add("pack", label=label, start=start_ns, end=end_ns, busy=end_ns - start_ns)

    def flush(self, *, force: bool = False) -> None:
        """Write what is new if the last write is old or there is much of it. Call it between steps, where no one
        waits."""
        now = time.monotonic_ns()
        if force or now - self._flushed_ns > FLUSH_EVERY_NS or len(self.records) >= MOST_WAITING:
            with self._writing:
                self._flushed_ns = now
                if self._file is not None:
                    # In place: a thread that adds at this moment adds to the same list.
                    records = self.records[:]
                    del self.records[: len(records)]
                    self._file.write(records)

    def close(self) -> None:
        if self._file is not None:
            self._closed.set()
            self.flush(force=True)
            with self._writing:
                file, self._file = self._file, None
                file.close()

    def _watch(self) -> None:
        """A step that hangs has no end at which its records would be written."""
        while not self._closed.wait(LOOK_EVERY_S):
            if self.records:
                with suppress(OSError):  # a full disk is for the rank itself to say
                    self.flush()


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
    """What one rank's file holds, in order; None for a record or block that is cut short or damaged."""
    from syncline.block_file import read_content, read_lines
    from syncline.blocks import bodies_of, decode, in_order

    content, lines = read_content(path)
    if content[:1] in (b"{", b""):  # of an earlier version
        content, lines = b"", content + lines
    for body in bodies_of(content):
        groups = None if body is None else decode(body)
        yield from [None] if groups is None else map(with_todays_name, in_order(groups))
    yield from (record and with_todays_name(record) for record in read_lines(lines))


def with_todays_name(record: Record) -> Record:
    if record.get("method") in OLD_NAMES:
        record["method"] = OLD_NAMES[record["method"]]
    return record


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
