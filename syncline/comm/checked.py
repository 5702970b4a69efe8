"""Checked: ranks that call different operations get an error that says so, instead of a crash or a hang.

Gloo aborts the process when sizes differ, and waits for ever when one rank calls something else. So the first time
that a signature (operation, root, shape, strides, dtype) occurs at a call, ranks compare it over the store, which
works whatever Gloo does. Calls are counted from the start of a scope, so a step's collectives are compared in the
first step only, and later steps cost a set look-up.

Sends and receives concern two ranks. The sender publishes and goes on; the receiver compares, and posts its receive,
when this rank first waits for anything. By then its own sends are on their way, so the comparison cannot lock up.

When a deadline passes, the ranks that are not stalled at the same place are the missing ones.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from syncline.comm.communicator import PAIRWISE, Communicator, Operation, Work, Wrapper
from syncline.comm.stall import Place, Stall, StallBoard
from syncline.errors import CommunicationError, ContractError, DeadlineError
from syncline.spans import EventLog

SHORTEST_PAUSE_S = 0.0002
LONGEST_PAUSE_S = 0.1
SURE_AFTER_S = 2.0
"""A stall seen elsewhere counts only if it lasts: a rank that was just freed may not have said so yet."""


class Checked(Wrapper):
    def __init__(
        self,
        inner: Communicator,
        log: EventLog,
        *,
        deadline_s: float,
        name_of: Callable[[int], str] = "rank {}".format,
    ) -> None:
        super().__init__(inner)
        self._name_of = name_of
        self.log = log
        self.deadline_s = deadline_s
        self._scope = ""
        self._counts: dict[str, int] = {}
        """Calls so far in this scope, by channel: what makes 'call 3 of gradients' the same call on every rank."""
        self._visits: dict[tuple[str, str, int], int] = {}
        """How often each call was reached, so that keys of an earlier step never answer for this one."""
        self._seen: set[tuple[object, ...]] = set()
        """Signatures that were compared at their call. A rank that changes one compares again, and finds the others
        stalled in the old one."""
        self._unposted: deque[_CheckedWork] = deque()
        """Receives not compared yet. To compare at once would wait for a sender that may be waiting for our send."""
        self._stalls = StallBoard(inner.store, inner.rank)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        outer = (self._scope, self._counts)
        self._scope, self._counts = name, {}
        try:
            yield
        finally:
            self._scope, self._counts = outer

    def start(self, operation: Operation) -> Work:
        place = self._next_place(_channel(operation, self.rank))
        if self._is_new(operation, place):
            if operation.name == "receive":
                work = _CheckedWork(self, operation, place, None)
                self._unposted.append(work)
                return work
            if operation.name != "send":
                self._compare(operation, place, range(self.world_size))
        return _CheckedWork(self, operation, place, self._begin(operation, place))

    def run(self, operation: Operation, body: Callable[[Communicator], None]) -> None:
        place = self._next_place("all")
        if self._is_new(operation, place):
            self._compare(operation, place, range(self.world_size))
        self._stalls.enter(place, lambda: _signature(operation))
        try:
            self.inner.run(operation, body)
        except CommunicationError as error:
            raise self._located(error, operation, place) from error
        self._stalls.leave()

    def split(self, name: str) -> Communicator:
        return Checked(self.inner.split(name), self.log, deadline_s=self.deadline_s, name_of=self._name_of)

    def part(self, name: str, groups: Sequence[Sequence[int]]) -> Communicator | None:
        inner = self.inner.part(name, groups)
        return inner and Checked(inner, self.log, deadline_s=self.deadline_s)

    def close(self) -> None:
        self._stalls.stop()
        super().close()

    def finish(self, work: _CheckedWork) -> None:
        """Wait for an operation. Receives that are new are compared and posted first, in the order of the calls,
        whichever is waited for: messages between two ranks arrive in that order."""
        while self._unposted:
            receive = self._unposted.popleft()
            assert receive.operation.peer is not None
            self._compare(receive.operation, receive.place, [self.rank, receive.operation.peer])
            receive.work = self._begin(receive.operation, receive.place)
        assert work.work is not None
        operation, place = work.operation, work.place
        self._stalls.enter(place, lambda: _signature(operation))
        try:
            work.work.wait()
        except CommunicationError as error:
            raise self._located(error, operation, place) from error
        self._stalls.leave()

    def _is_new(self, operation: Operation, place: Place) -> bool:
        """Whether this signature is new at this call; if so it is published for the other ranks."""
        tensor = operation.tensor
        # Compared as values, not as text: this is on the path of every message.
        known = (
            place.scope, place.channel, place.index,
            operation.name, operation.peer, tensor.dtype, tensor.shape, tensor.stride(),
        )  # fmt: skip
        if known in self._seen:
            return False
        self._seen.add(known)
        self.store.set(_key(place, self.rank), _signature(operation))
        return True

    def _next_place(self, channel: str) -> Place:
        index = self._counts.get(channel, 0)
        self._counts[channel] = index + 1
        key = (self._scope, channel, index)
        visit = self._visits.get(key, 0)
        self._visits[key] = visit + 1
        return Place(self._scope, channel, index, visit)

    def _begin(self, operation: Operation, place: Place) -> Work:
        try:
            return self.inner.start(operation)
        except CommunicationError as error:
            raise self._located(error, operation, place) from error

    def _compare(self, operation: Operation, place: Place, ranks: Sequence[int]) -> None:
        self._stalls.enter(place, lambda: _signature(operation))
        calls = self._collect(operation, place, ranks)
        self._stalls.leave()
        if len(set(calls.values())) > 1:
            who = "; ".join(f"rank {rank} calls {call}" for rank, call in sorted(calls.items()))
            raise ContractError(
                f"ranks disagree at {self._describe(place)}: {who}.",
                action="Every rank must make the same calls with the same shapes, strides and dtypes.",
                rank=self.rank,
                step=self._step(),
            )

    def _collect(self, operation: Operation, place: Place, ranks: Sequence[int]) -> dict[int, str]:
        """What each rank calls here; for a rank that is stalled elsewhere, what it calls there.

        A rank stalls elsewhere if it waits for us in another call: without this, both would sit out the deadline.
        """
        calls: dict[int, str] = {}
        suspects: dict[int, tuple[Stall, float]] = {}
        end = time.monotonic() + self.deadline_s
        pause_s = SHORTEST_PAUSE_S
        # Asked again and again, because a wait on the store that times out makes torch print a warning.
        while missing := [rank for rank in ranks if not self._has_answered(rank, place, calls)]:
            for rank in missing:
                self._suspect(rank, place, suspects, calls)
            still_missing = [rank for rank in missing if rank not in calls]
            if still_missing and time.monotonic() > end:
                raise self._overdue(operation, place, still_missing)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return calls

    def _has_answered(self, rank: int, place: Place, calls: dict[int, str]) -> bool:
        key = _key(place, rank)
        if rank not in calls and self.store.check([key]):
            calls[rank] = self.store.get(key).decode()
        return rank in calls

    def _suspect(
        self, rank: int, place: Place, suspects: dict[int, tuple[Stall, float]], calls: dict[int, str]
    ) -> None:
        stall = self._stalls.of(rank)
        if stall is None:
            suspects.pop(rank, None)
        elif rank not in suspects or suspects[rank][0] != stall:
            suspects[rank] = (stall, time.monotonic())
        elif time.monotonic() - suspects[rank][1] > SURE_AFTER_S:
            where = "as in earlier steps" if stall.place == place else f"at {stall.place}"
            calls[rank] = f"{stall.signature} {where}"

    def _located(self, error: CommunicationError, operation: Operation, place: Place) -> CommunicationError:
        """The error from below with rank, step, method, operation, tensor and the missing ranks."""
        if isinstance(error, DeadlineError):
            expected = [operation.peer] if operation.name in PAIRWISE else range(self.world_size)
            missing = [rank for rank in expected if rank is not None and not self._is_here(rank, place)]
            return self._overdue(operation, place, missing)
        return type(error)(
            f"{error.message} It was in {_call(operation)}, {self._describe(place)}.",
            action=error.action,
            rank=self.rank,
            step=self._step(),
        )

    def _is_here(self, rank: int, place: Place) -> bool:
        stall = None if rank == self.rank else self._stalls.of(rank)
        return rank == self.rank or (stall is not None and stall.place == place)

    def _overdue(self, operation: Operation, place: Place, missing: Sequence[int]) -> DeadlineError:
        names = ", ".join(self._name_of(rank) for rank in missing) or "none, the transfer itself is stuck"
        return DeadlineError(
            f"{_call(operation)} did not end within {self.deadline_s:g} s, {self._describe(place)}; "
            f"missing: {names}.",
            action="Look at what the missing ranks were doing, or raise deadline_s.",
            rank=self.rank,
            step=self._step(),
        )

    def _describe(self, place: Place) -> str:
        return f"{place}, method {self.log.method}" if self.log.method else str(place)

    def _step(self) -> int | None:
        return self.log.step if self.log.step >= 0 else None


class _CheckedWork:
    def __init__(self, checked: Checked, operation: Operation, place: Place, work: Work | None) -> None:
        self.checked = checked
        self.operation = operation
        self.place = place
        self.work = work

    def wait(self) -> None:
        self.checked.finish(self)


def _channel(operation: Operation, rank: int) -> str:
    if operation.name == "send":
        return f"{rank}>{operation.peer}"
    if operation.name == "receive":
        return f"{operation.peer}>{rank}"
    return "all"


def _signature(operation: Operation) -> str:
    tensor = operation.tensor
    name = "transfer" if operation.name in PAIRWISE else operation.name
    root = f" root {operation.peer}" if operation.peer is not None and name != "transfer" else ""
    strides = "" if tensor.is_contiguous() else f" strides {list(tensor.stride())}"
    return f"{name}{root} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{strides}"


def _call(operation: Operation) -> str:
    label = f" of {operation.label}" if operation.label else ""
    return f"{_signature(operation)}{label}"


def _key(place: Place, rank: int) -> str:
    return f"contract/{place.scope}/{place.channel}/{place.index}/{place.visit}/{rank}"
