"""A node's side of a run on several nodes: it joins node 0, and directs its ranks as all nodes together decide.

Node 0 joins itself over the same kind of connection as everybody else. While ranks run, a thread listens, another
sends a sign of life every second; the launcher looks ten times a second at what they know.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from syncline.errors import HostError, SynclineError
from syncline.launcher.here.host_ranks import Attempt, restart_line
from syncline.launcher.nodes.coordinator import BEAT_SECONDS, Coordinator, Limits
from syncline.launcher.nodes.door import NotLetIn, knock
from syncline.launcher.nodes.token import Credential
from syncline.launcher.route import Route, connect
from syncline.launcher.starting import signal_words
from syncline.launcher.wire import Connection, Message, NotAFrame, describe, restore

_LOOK_SECONDS = 0.1
_ANSWER_SECONDS = 10.0
_FAREWELL_SECONDS = 10.0


@dataclass
class _Known:
    """What node 0 has said, since this node joined."""

    heard: float = 0.0
    welcome: bool = False
    hosts: list[tuple[str, str]] | None = None
    values: Message | None = None
    start: Attempt | None = None
    stopped: int = -1
    reason: Message | None = None
    over: bool = False
    verdict: SynclineError | None = None
    lost: str = ""


class Membership:
    """One node's place in the run, from joining to leaving. `credential` is asked for the token at each attempt to
    join; `signals` are those that the launcher has caught."""

    def __init__(
        self,
        hello: Message,
        route: Route,
        limits: Limits,
        coordinator: Coordinator | None,
        credential: Callable[[], Credential],
    ) -> None:
        self._hello = hello
        self._route = route
        self._limits = limits
        self._coordinator = coordinator
        self._credential = credential
        self._known = _Known()
        self._changed = threading.Condition()
        self._connection: Connection | None = None
        self._left = threading.Event()
        self._number = -1
        self._reported_finished = -1
        self._reported_interrupt = False
        self.signals: list[int] = []
        self.known_as: dict[str, str] = {}
        """Folders of this node whose files go to node 0, and what they are called there."""

    def credential(self) -> Credential:
        return self._credential()

    @property
    def verdict(self) -> SynclineError | None:
        """How the run ended for all nodes, if it ended badly."""
        return self._known.verdict

    def join(self) -> list[tuple[str, str]]:
        """Returns name and address of every host when all have joined; an error says which has not, or what is
        wrong."""
        self._connect()
        threading.Thread(target=self._beat, name="syncline-beat", daemon=True).start()
        self._wait(lambda: self._known.hosts is not None)
        assert self._known.hosts is not None
        return self._known.hosts

    def share(self, values: Message) -> None:
        """Node 0 tells the others what it has chosen."""
        self._say({"say": "values", "values": values})

    def shared(self) -> Message:
        """What node 0 has chosen."""
        self._wait(lambda: self._known.values is not None)
        assert self._known.values is not None
        return self._known.values

    def next_attempt(self) -> Attempt:
        self._say({"say": "ready"})
        self._wait(lambda: self._known.start is not None and self._known.start.number > self._number)
        assert self._known.start is not None
        self._number = self._known.start.number
        return self._known.start

    def must_stop(self) -> bool:
        self._report_signals()
        known = self._known
        return known.verdict is not None or bool(known.lost) or known.stopped >= self._number

    def again(self, error: SynclineError, *, is_echo: bool) -> bool:
        if not self.must_stop():
            for here, there in self.known_as.items():
                error.action = error.action.replace(here, there)
            failure = {"attempt": self._number, "echo": is_echo, "error": describe(error)}
            self._say({"say": "failed", **failure})
        with contextlib.suppress(SynclineError):
            self._wait(lambda: self._known.stopped >= self._number)
        if self._known.lost and not self._known.over and not self._come_back():
            return False
        if self._known.over:
            return False
        if self._known.reason is not None:
            _print(restart_line(restore(self._known.reason), self._number + 1, self._limits.max_restarts))
        return True

    def all_finished(self) -> bool:
        if self._reported_finished != self._number:
            self._reported_finished = self._number
            self._say({"say": "finished", "attempt": self._number})
        return self._known.over and self._known.verdict is None

    def fail(self, error: BaseException) -> None:
        """This node cannot continue, for a reason outside its ranks: tell all others."""
        if isinstance(error, KeyboardInterrupt):
            self._say({"say": "interrupted", "by": "Ctrl-C"})
        elif isinstance(error, SynclineError):
            self._say({"say": "fatal", "error": describe(error)})
        else:
            self._say({"say": "fatal", "error": describe(HostError(f"{type(error).__name__}: {error}"))})
        with contextlib.suppress(SynclineError):
            self._wait(lambda: False, seconds=_ANSWER_SECONDS)

    def leave(self) -> None:
        """Node 0 stays until the others have heard how the run ended."""
        self._say({"say": "bye"})
        if self._coordinator is not None:
            deadline = time.monotonic() + _FAREWELL_SECONDS
            while not self._coordinator.is_done and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
        self._left.set()
        if self._coordinator is not None:
            self._coordinator.close()
            if self._coordinator.turned_away:
                _print(f"syncline: {self._coordinator.turned_away}.")
        elif self._connection is not None:
            self._connection.close()

    def _connect(self) -> None:
        about = (self._limits.join_timeout_s, self._credential, self._hello["node_rank"], _print)
        connection = let_in(self._route, *about)
        self._connection = connection
        self._known.lost, self._known.welcome, self._known.heard = "", False, time.monotonic()
        threading.Thread(target=self._listen, args=(connection,), name="syncline-listen", daemon=True).start()
        connection.send(self._hello)
        self._wait(lambda: self._known.welcome, seconds=_ANSWER_SECONDS)

    def _listen(self, connection: Connection) -> None:
        why = "its connection closed"
        try:
            while (received := connection.receive()) is not None:
                with self._changed:
                    self._known.heard = time.monotonic()
                    self._learn(received[0])
                    self._changed.notify_all()
        except (NotAFrame, KeyError, TypeError, ValueError, AttributeError):
            why = "this node does not understand what it says"
        self._lose(connection, why)

    def _learn(self, message: Message) -> None:
        known, kind = self._known, message["say"]
        if kind == "welcome":
            known.welcome = True
        elif kind == "joined":
            known.hosts = [(str(name), str(address)) for name, address in message["hosts"]]
        elif kind == "values":
            known.values = message["values"]
        elif kind == "start":
            known.start = Attempt(message["attempt"], message["address"], message["port"])
        elif kind == "stop":
            known.stopped, known.reason = message["attempt"], message["error"]
        elif kind == "over":
            known.over = True
            known.verdict = restore(message["error"]) if message["error"] is not None else None
        elif kind == "waiting":
            _print(f"syncline: {message['text']}")

    def _beat(self) -> None:
        while not self._left.wait(BEAT_SECONDS):
            connection = self._connection
            if connection is None or self._known.lost:
                continue
            connection.send({"say": "beat"})
            if time.monotonic() - self._known.heard > self._limits.silence_s:
                self._lose(connection, f"it has been silent for {self._limits.silence_s:g} s")

    def _lose(self, connection: Connection, why: str) -> None:
        with self._changed:
            if connection is self._connection and not self._known.over and not self._known.lost:
                self._known.lost = why
            self._changed.notify_all()
        connection.close()

    def _come_back(self) -> bool:
        """After the connection was lost: whether it could be made again. If not, the run is over for this node."""
        closed = "closed" in self._known.lost
        verdict = self._rendezvous_lost()
        if self._number < self._limits.max_restarts and not closed:
            _print(f"syncline: {verdict} Trying to reach it again.")
            try:
                self._known.reason = None
                self._connect()
                return not self._known.over
            except SynclineError as error:
                verdict = HostError(f"{verdict.message} It could not be reached again: {error.message}")
        if self._known.verdict is None:
            self._known.over, self._known.verdict = True, verdict
        return False

    def _rendezvous_lost(self) -> HostError:
        hosts = self._known.hosts
        name = f"host {hosts[0][0]} (node 0, {hosts[0][1]})" if hosts else f"node 0 at {self._route.target}"
        return HostError(f"the rendezvous, {name}, is lost: {self._known.lost or 'it does not answer'}.")

    def _wait(self, holds: Callable[[], bool], seconds: float | None = None) -> None:
        """Until the condition holds. Raises the verdict when the run is over, HostError when node 0 is lost or the
        time is up."""
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while not holds():
                if self._known.over or self._left.is_set():
                    raise self._known.verdict or HostError("the run has ended.")
                if self._known.lost or (deadline is not None and time.monotonic() > deadline):
                    raise self._rendezvous_lost()
                self._changed.wait(_LOOK_SECONDS)
                self._report_signals()

    def _report_signals(self) -> None:
        if self.signals and not self._reported_interrupt:
            self._reported_interrupt = True
            self._say({"say": "interrupted", "by": signal_words(self.signals[0])})

    def _say(self, message: Message, payload: bytes = b"") -> None:
        if self._connection is not None:
            self._connection.send(message, payload)


def let_in(
    route: Route, join_timeout_s: float, credential: Callable[[], Credential], node_rank: int,
    say: Callable[[str], None],
) -> Connection:  # fmt: skip
    """A connection on which each side has proven the run's token. Tried again for a while: a crowd of strangers at
    node 0 may have pushed this node out, or a shared file system may be late with the token."""
    until = 0.0
    while True:
        connection = connect(route, join_timeout_s, say)
        try:
            knock(connection, credential, node_rank)
            return connection
        except NotLetIn as refused:
            connection.close()
            until = until or time.monotonic() + _ANSWER_SECONDS
            if time.monotonic() > until or not refused.may_pass:
                raise refused.error from None
        time.sleep(_LOOK_SECONDS)


def ask_for_plan(
    node_rank: int, route: Route, join_timeout_s: float, credential: Callable[[], Credential]
) -> dict[str, Any]:
    """Before this node joins."""
    connection = let_in(route, join_timeout_s, credential, node_rank, _print)
    try:
        connection.set_patience(_ANSWER_SECONDS)
        connection.send({"say": "which plan"})
        received = connection.receive()
        if received is not None and isinstance(received[0].get("plan"), dict):
            return dict(received[0]["plan"])
    except NotAFrame:
        pass
    finally:
        connection.close()
    raise HostError(f"node 0 at {route.target} does not say what it runs.")


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
