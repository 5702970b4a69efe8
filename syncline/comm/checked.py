"""Checked: ranks that call different operations get an error that says so, instead of a crash or a hang.

Gloo aborts the process when sizes differ, and waits for ever when one rank calls something else. So the first time
that a signature (operation, root, shape, strides, dtype) occurs at a call, ranks compare it over the store, which
works whatever Gloo does. Calls are counted from the start of a scope, so a step's collectives are compared in the
first step only, and later steps cost a set look-up.

Sends and receives concern two ranks. The sender publishes and goes on; the receiver compares before its receive is
posted, when it is waited for. So neither order of sends and receives can lock up in the comparison itself.

When a deadline passes, the ranks that are not stalled at the same place are the missing ones.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from syncline.comm.communicator import PAIRWISE, Communicator, Operation, Work
from syncline.comm.stall import Place, Stall, StallBoard
from syncline.comm.wrapper import Wrapper
from syncline.errors import CommunicationError, ContractError, DeadlineError
from syncline.spans import EventLog

POLL = timedelta(seconds=0.5)
SURE_AFTER_S = 2.0
"""A stall seen elsewhere counts only if it lasts: a rank that was just freed may not have said so yet."""


class Checked(Wrapper):
    def __init__(self, inner: Communicator, log: EventLog, *, deadline_s: float) -> None:
        super().__init__(inner)
        self.log = log
        self.deadline_s = deadline_s
        self._scope = ""
        self._counts: Counter[str] = Counter()
        self._visits: Counter[tuple[str, str, int]] = Counter()
        self._seen: set[tuple[str, str, int, str]] = set()
        self._stalls = StallBoard(inner.store, inner.rank)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        outer = (self._scope, self._counts)
        self._scope, self._counts = name, Counter()
        try:
            yield
        finally:
            self._scope, self._counts = outer

    def start(self, operation: Operation) -> Work:
        place = self._next_place(_channel(operation, self.rank))
        signature = _signature(operation)
        known = (place.scope, place.channel, place.index, signature)
        if known in self._seen:
            return _CheckedWork(self, operation, place, self._begin(operation, place))
        self._seen.add(known)
        self.store.set(_key(place, self.rank), signature)
        if operation.name == "receive":
            return _CheckedWork(self, operation, place, None)
        if operation.name != "send":
            self._compare(operation, place, range(self.world_size))
        return _CheckedWork(self, operation, place, self._begin(operation, place))

    def split(self, name: str) -> Communicator:
        return Checked(self.inner.split(name), self.log, deadline_s=self.deadline_s)

    def close(self) -> None:
        self._stalls.stop()
        super().close()

    def finish(self, operation: Operation, place: Place, work: Work | None) -> None:
        """Wait for an operation; a receive that is new here is compared and posted first."""
        if work is None:
            assert operation.peer is not None
            self._compare(operation, place, [self.rank, operation.peer])
            work = self._begin(operation, place)
        with self._located(operation, place), self._stalls.waiting(Stall(place, _signature(operation))):
            work.wait()

    def _next_place(self, channel: str) -> Place:
        index = self._counts[channel]
        self._counts[channel] += 1
        visit = self._visits[self._scope, channel, index]
        self._visits[self._scope, channel, index] += 1
        return Place(self._scope, channel, index, visit)

    def _begin(self, operation: Operation, place: Place) -> Work:
        with self._located(operation, place):
            return self.inner.start(operation)

    def _compare(self, operation: Operation, place: Place, ranks: Sequence[int]) -> None:
        with self._stalls.waiting(Stall(place, _signature(operation))):
            found = self._collect(operation, place, ranks)
        if len(set(found.values())) > 1:
            calls = "; ".join(f"rank {rank} calls {text}" for rank, text in sorted(found.items()))
            raise ContractError(
                f"ranks disagree at {self._describe(place)}: {calls}.",
                action="Every rank must make the same calls with the same shapes, strides and dtypes.",
                rank=self.rank,
                step=self._step(),
            )

    def _collect(self, operation: Operation, place: Place, ranks: Sequence[int]) -> dict[int, str]:
        """What each rank calls here; for a rank that is stalled elsewhere, what it calls there."""
        found: dict[int, str] = {}
        suspects: dict[int, tuple[Stall, float]] = {}
        end = time.monotonic() + self.deadline_s
        while missing := [rank for rank in ranks if rank not in found]:
            for rank in missing:
                try:
                    self.store.wait([_key(place, rank)], POLL)
                    found[rank] = self.store.get(_key(place, rank)).decode()
                except dist.DistStoreError:
                    self._suspect(rank, place, suspects, found)
            still_missing = [rank for rank in missing if rank not in found]
            if still_missing and time.monotonic() > end:
                raise self._overdue(operation, place, still_missing)
        return found

    def _suspect(
        self, rank: int, place: Place, suspects: dict[int, tuple[Stall, float]], found: dict[int, str]
    ) -> None:
        stall = self._stalls.of(rank)
        if stall is None:
            suspects.pop(rank, None)
        elif rank not in suspects or suspects[rank][0] != stall:
            suspects[rank] = (stall, time.monotonic())
        elif time.monotonic() - suspects[rank][1] > SURE_AFTER_S:
            where = "as in earlier steps" if stall.place == place else f"at {stall.place}"
            found[rank] = f"{stall.signature} {where}"

    @contextmanager
    def _located(self, operation: Operation, place: Place) -> Iterator[None]:
        """Errors from below leave with rank, step, method, operation, tensor and the missing ranks."""
        try:
            yield
        except DeadlineError as error:
            expected = [operation.peer] if operation.name in PAIRWISE else range(self.world_size)
            missing = [rank for rank in expected if rank is not None and not self._is_here(rank, place)]
            raise self._overdue(operation, place, missing) from error
        except CommunicationError as error:
            raise type(error)(
                f"{error.message} It was in {_call(operation)}, {self._describe(place)}.",
                action=error.action,
                rank=self.rank,
                step=self._step(),
            ) from error

    def _is_here(self, rank: int, place: Place) -> bool:
        stall = None if rank == self.rank else self._stalls.of(rank)
        return rank == self.rank or (stall is not None and stall.place == place)

    def _overdue(self, operation: Operation, place: Place, missing: Sequence[int]) -> DeadlineError:
        names = ", ".join(f"rank {rank}" for rank in missing) or "none, the transfer itself is stuck"
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
        self.checked.finish(self.operation, self.place, self.work)


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
