"""Traced: writes every operation into the event log, from ready to end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from syncline.comm.communicator import Communicator, Operation, TellsWhenDone, Work, Wrapper
from syncline.spans import EventLog


class Traced(Wrapper):
    def __init__(self, inner: Communicator, log: EventLog) -> None:
        super().__init__(inner)
        self.log = log

    def split(self, name: str) -> Communicator:
        return Traced(self.inner.split(name), self.log)

    def part(self, name: str, groups: Sequence[Sequence[int]]) -> Communicator | None:
        inner = self.inner.part(name, groups)
        return inner and Traced(inner, self.log)

    def start(self, operation: Operation) -> Work:
        start_ns = time.monotonic_ns()
        return _TracedWork(self.inner.start(operation), self.log, operation, start_ns)

    def run(self, operation: Operation, body: Callable[[Communicator], None]) -> None:
        start_ns = time.monotonic_ns()
        self.inner.run(operation, body)
        _note(self.log, operation, start_ns)


class _TracedWork:
    def __init__(self, work: Work, log: EventLog, operation: Operation, start_ns: int) -> None:
        self.work = work
        self.log = log
        self.operation = operation
        self.start_ns = start_ns
        self.step = log.step  # it may be waited for in the next one
        self.end_ns: int | None = None
        if operation.waited_later and not log.off and isinstance(work, TellsWhenDone):
            work.when_done(self._ended)

    def wait(self) -> None:
        self.work.wait()
        _note(self.log, self.operation, self.start_ns, self.end_ns, self.step)

    def _ended(self) -> None:
        self.end_ns = time.monotonic_ns()


def _note(
    log: EventLog, operation: Operation, start_ns: int, end_ns: int | None = None, step: int | None = None
) -> None:
    ready_ns = start_ns if operation.ready_ns is None else operation.ready_ns
    log.add(
        "collective", name=operation.name, label=operation.label, bytes=operation.num_bytes,
        ready=ready_ns, start=start_ns, end=end_ns or time.monotonic_ns(), step=step,
    )  # fmt: skip
