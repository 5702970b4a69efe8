"""Checked: ranks that call different operations get an error that says so, instead of a crash or a hang.

Gloo aborts the process when sizes differ, and waits for ever when one rank calls something else. So the first time
that a signature (operation, root, shape, strides, dtype) occurs at a call, ranks compare it over the store, which
works whatever Gloo does. Calls are counted from the start of a scope, so a step's collectives are compared in the
first step only, and later steps cost a set look-up.

Sends and receives concern two ranks. The sender publishes and goes on; the receiver compares, and posts its receive,
when this rank first waits for anything. By then its own sends are on their way, so the comparison cannot lock up.

When a deadline passes, the ranks that are not stalled at the same place are the missing ones, but for those that
wait elsewhere because of one that does not wait at all. All ranks are then
asked what they are doing (whereabouts.py), and a note on the error says it. Ranks are called by their numbers in the
whole world, with their hosts, also where they are members of a part of it.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from syncline.comm.communicator import PAIRWISE, Communicator, Operation, Work, Wrapper
from syncline.comm.sites import own_site
from syncline.comm.whereabouts import Call, Place, Signature, Stall, Whereabouts, joined_words, whereabouts_of
from syncline.errors import CommunicationError, ContractError, DeadlineError, PeerLostError
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
        parent: Checked | None = None,
        name: str = "",
    ) -> None:
        super().__init__(inner)
        self._name_of = name_of
        self.log = log
        self.deadline_s = deadline_s
        self._group = name
        self._children = 0
        self._scope = ""
        self._counts: dict[str, int] = {}
        """Calls so far in this scope, by channel: what makes 'call 3 of gradients' the same call on every rank."""
        self._visits: dict[tuple[str, str, int], int] = {}
        """How often each call was reached, so that keys of an earlier step never answer for this one."""
        self._seen: dict[tuple[object, ...], str] = {}
        """The user's line, by signature and call, of what was compared there. A rank that changes its signature
        compares again, and finds the others stalled in the old one."""
        self._unposted: deque[_CheckedWork] = deque()
        """Receives not compared yet. To compare at once would wait for a sender that may be waiting for our send."""
        self._is_part = parent is not None
        self._is_closed = False
        self._whereabouts: Whereabouts = parent._whereabouts if parent else whereabouts_of(inner.backend, log)

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
        call, is_new = self._call(operation, place)
        if is_new:
            if operation.name == "receive":
                work = _CheckedWork(self, operation, call, None)
                self._unposted.append(work)
                return work
            if operation.name != "send":
                self._compare(call, range(self.world_size))
        return _CheckedWork(self, operation, call, self._begin(operation, call))

    def run(self, operation: Operation, body: Callable[[Communicator], None]) -> None:
        call, is_new = self._call(operation, self._next_place("all"))
        if is_new:
            self._compare(call, range(self.world_size))
        self._whereabouts.enter(call)
        try:
            self.inner.run(operation, body)
        except CommunicationError as error:
            raise self._located(error, call) from error
        self._whereabouts.leave(call)

    def split(self, name: str) -> Communicator:
        return self._child(self.inner.split(name), name)

    def part(self, name: str, groups: Sequence[Sequence[int]]) -> Communicator | None:
        inner = self.inner.part(name, groups)
        return inner and self._child(inner, name)

    def close(self) -> None:
        if not self._is_part and not self._is_closed:
            self._whereabouts.release()
        self._is_closed = True
        super().close()

    def wait_began(self, what: str) -> None:
        self._whereabouts.enter(self._unsent(what))

    def wait_ended(self, what: str) -> None:
        self._whereabouts.leave(self._unsent(what))

    def overdue(self, what: str, missing: Sequence[int]) -> DeadlineError:
        return self._overdue(self._unsent(what), missing)

    def lost(self, what: str, error: CommunicationError) -> CommunicationError:
        return self._located(error, self._unsent(what))

    def finish(self, work: _CheckedWork) -> None:
        """Wait for an operation. Receives that are new are compared and posted first, in the order of the calls,
        whichever is waited for: messages between two ranks arrive in that order."""
        while self._unposted:
            receive = self._unposted.popleft()
            assert receive.operation.peer is not None
            self._compare(receive.call, [self.rank, receive.operation.peer])
            receive.work = self._begin(receive.operation, receive.call)
        assert work.work is not None
        self._whereabouts.enter(work.call)
        try:
            work.work.wait()
        except CommunicationError as error:
            peer = work.operation.peer if work.operation.name in PAIRWISE else None
            raise self._located(error, work.call, range(self.world_size) if peer is None else [peer]) from error
        self._whereabouts.leave(work.call)

    def _child(self, inner: Communicator, name: str) -> Checked:
        self._children += 1
        name = f"{self._group}/{name}#{self._children}"
        named = {"deadline_s": self.deadline_s, "name_of": self._name_of}
        return Checked(inner, self.log, parent=self, name=name, **named)  # type: ignore[arg-type]

    def _call(self, operation: Operation, place: Place) -> tuple[Call, bool]:
        """The call, and whether its signature is new here; if so it is published for the other ranks."""
        tensor, peer = operation.tensor, operation.peer
        if peer is not None and self._is_part:
            peer = self.ranks[peer]
        # Compared as values, not as text: this is on the path of every message.
        signature = Signature(operation.name, peer, tensor.dtype, tensor.shape, tensor.stride())
        known = (place.scope, place.channel, place.position, signature)
        site = self._seen.get(known)
        if site is not None:
            return Call(place, signature, operation.label, site), False
        self._seen[known] = site = own_site(self._whereabouts.owner)
        self.store.set(_key(place, self.rank), json.dumps([str(signature), site]))
        return Call(place, signature, operation.label, site), True

    def _next_place(self, channel: str) -> Place:
        index = self._counts.get(channel, 0)
        self._counts[channel] = index + 1
        key = (self._scope, channel, index)
        visit = self._visits.get(key, 0)
        self._visits[key] = visit + 1
        return Place(self._group, self._scope, channel, index, visit)

    def _unsent(self, what: str) -> Call:
        """A wait that no message is for, such as one in shared memory. Asked for after each: the line is kept."""
        site = self._seen.get((what,))
        if site is None:
            site = self._seen[what,] = own_site(self._whereabouts.owner)
        return Call(Place(f"{self._group}!", what, "all", -1, 0), what, "", site)

    def _begin(self, operation: Operation, call: Call) -> Work:
        try:
            return self.inner.start(operation)
        except CommunicationError as error:
            raise self._located(error, call) from error

    def _compare(self, call: Call, ranks: Sequence[int]) -> None:
        self._whereabouts.enter(call)
        answers = self._collect(call, ranks)
        self._whereabouts.leave(call)
        if len({signature for signature, _ in answers.values()}) > 1:
            who = "; ".join(
                f"{self._name(rank)} calls {signature}{where}" for rank, (signature, where) in sorted(answers.items())
            )
            raise ContractError(
                f"ranks disagree at {call.place}{joined_words(self._method)}: {who}.",
                action="Every rank must make the same calls with the same shapes, strides and dtypes.",
                rank=self.ranks[self.rank],
                step=self._step(),
            )

    def _collect(self, call: Call, ranks: Sequence[int]) -> dict[int, tuple[str, str]]:
        """What each rank calls here, and from which line; of a rank that is stalled elsewhere, what it calls there.

        A rank stalls elsewhere if it waits for us in another call: without this, both would sit out the deadline.
        """
        calls: dict[int, tuple[str, str]] = {}
        suspects: dict[int, tuple[Stall, float]] = {}
        end = time.monotonic() + self.deadline_s
        pause_s = SHORTEST_PAUSE_S
        # Asked again and again, because a wait on the store that times out makes torch print a warning.
        while missing := [rank for rank in ranks if not self._has_answered(rank, call.place, calls)]:
            for rank in missing:
                self._suspect(rank, call.place, suspects, calls)
            still_missing = [rank for rank in missing if rank not in calls]
            if still_missing and time.monotonic() > end:
                raise self._overdue(call, still_missing)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return calls

    def _has_answered(self, rank: int, place: Place, calls: dict[int, tuple[str, str]]) -> bool:
        key = _key(place, rank)
        if rank not in calls and self.store.check([key]):
            signature, site = json.loads(self.store.get(key))
            calls[rank] = (signature, _at(site))
        return rank in calls

    def _suspect(
        self,
        rank: int,
        place: Place,
        suspects: dict[int, tuple[Stall, float]],
        calls: dict[int, tuple[str, str]],
    ) -> None:
        stall = self._whereabouts.stall_of(self.ranks[rank], self._group)
        if stall is None:
            suspects.pop(rank, None)
        elif rank not in suspects or suspects[rank][0] != stall:
            suspects[rank] = (stall, time.monotonic())
        elif time.monotonic() - suspects[rank][1] > SURE_AFTER_S:
            where = "as in earlier steps" if stall.place == place else f"at {stall.place}"
            calls[rank] = (f"{stall.signature} {where}", _at(stall.site))

    def _located(
        self, error: CommunicationError, call: Call, expected: Sequence[int] | None = None
    ) -> CommunicationError:
        """The error from below with rank, step, method, operation, tensor and the missing ranks."""
        others = [rank for rank in expected or range(self.world_size) if rank != self.rank]
        if isinstance(error, DeadlineError):
            return self._overdue(call, [rank for rank in others if not self._is_here(rank, call.place)])
        message, action = error.message, error.action
        if isinstance(error, PeerLostError) and (gone := self._gone(others)):
            step = f" in step {self._step()}" if self._step() is not None else ""
            message = f"{gone}; {self._name(self.rank)} waits{step}."
            action = "Give every rank the same number of steps and of backward passes, or use join."
        return type(error)(
            f"{message} It was in {call}{call.where(self._method)}.",
            action=action,
            rank=self.ranks[self.rank],
            step=self._step(),
        )

    def _gone(self, ranks: Sequence[int]) -> str:
        """Who has ended, and how; empty where nobody says so."""
        gone = self._whereabouts.has_left([self.ranks[rank] for rank in ranks])
        return ", ".join(f"{self._name_of(rank)} {how}" for rank, how in gone.items())

    def _is_here(self, rank: int, place: Place) -> bool:
        stall = self._whereabouts.stall_of(self.ranks[rank], self._group)
        return stall is not None and stall.place == place

    def _overdue(self, call: Call, missing: Sequence[int]) -> DeadlineError:
        late = self._whereabouts.late([self.ranks[rank] for rank in missing])
        names = ", ".join(map(self._name_of, late)) or "none, the transfer itself is stuck"
        error = DeadlineError(
            f"{call} did not end within {self.deadline_s:g} s{call.where(self._method)}; missing: {names}.",
            action="Look at what the missing ranks were doing, or raise deadline_s.",
            rank=self.ranks[self.rank],
            step=self._step(),
        )
        error.add_note(self._whereabouts.ask(self._name_of))
        return error

    def _name(self, rank: int) -> str:
        return self._name_of(self.ranks[rank])

    @property
    def _method(self) -> str:
        return self.log.method and f"method {self.log.method}"

    def _step(self) -> int | None:
        return self.log.step if self.log.step >= 0 else None


class _CheckedWork:
    def __init__(self, checked: Checked, operation: Operation, call: Call, work: Work | None) -> None:
        self.checked = checked
        self.operation = operation
        self.call = call
        self.work = work

    def wait(self) -> None:
        self.checked.finish(self)


def _channel(operation: Operation, rank: int) -> str:
    if operation.name == "send":
        return f"{rank}>{operation.peer}"
    if operation.name == "receive":
        return f"{operation.peer}>{rank}"
    return "all"


def _at(site: str) -> str:
    return f" at {site}" if site else ""


def _key(place: Place, rank: int) -> str:
    return f"contract/{place.scope}/{place.channel}/{place.position}/{place.visit}/{rank}"
