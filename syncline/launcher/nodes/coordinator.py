"""Node 0's book of the nodes: who has joined, whether all may start, who was lost, and how the run ends.

Whoever comes has proven the run's token at the door (door.py). One thread reads each connection, one handles what
they read, in order; so the book needs no locks. A node that closes its connection or talks nonsense is lost at once;
one that is cut off is lost when it has been silent for a while.

    joining     until every node has said who it is, and all fit together
    gathering   until every node is ready to start its ranks
    running     until every node's ranks have finished, or one has failed
    deciding    for a moment, in which the cause may show behind its echoes; then gathering again, or over
    over        every node knows how the run ended
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from syncline.errors import HostError, Interrupted, SynclineError, UsageError
from syncline.launcher.nodes.door import Door
from syncline.launcher.nodes.token import Credential
from syncline.launcher.wire import Connection, Message, NotAFrame, describe, restore

BEAT_SECONDS = 1.0
_ECHO_SECONDS = 3.0
_FIRST_LINE_SECONDS = 5.0
_NEXT_LINE_SECONDS = 30.0
_HELLO = {"nodes": int, "node_rank": int, "host": str, "address": str, "process": str, "versions": dict, "plan": dict}


@dataclass(frozen=True)
class Limits:
    join_timeout_s: float
    silence_s: float
    """A node that is silent for so long is lost; each sends a sign of life every second."""
    max_restarts: int


@dataclass
class Seat:
    """One node's line in the book."""

    node_rank: int
    connection: Connection | None = None
    host: str = ""
    address: str = ""
    process: str = ""
    heard: float = 0.0
    ready: bool = False
    finished: bool = False
    failed: bool = False
    gone: bool = False
    why_lost: str = ""

    def __str__(self) -> str:
        return f"host {self.host} (node {self.node_rank}, {self.address})" if self.host else f"node {self.node_rank}"


@dataclass(frozen=True)
class _Failure:
    is_echo: bool
    error: Message


class Coordinator:
    """`expected` is what node 0 itself says: the others must fit. `listener` is open at the rendezvous address."""

    def __init__(self, listener: socket.socket, expected: Message, limits: Limits, credential: Credential) -> None:
        self._expected = expected
        self._limits = limits
        self._seats = [Seat(number) for number in range(expected["nodes"])]
        self._inbox: queue.Queue[tuple[Connection, int, Message | None, bytes]] = queue.Queue()
        self._phase = "joining"
        self._since = time.monotonic()
        self._next_line = self._since + _FIRST_LINE_SECONDS
        self._attempt = -1
        self._failures: list[_Failure] = []
        self._decide_at = 0.0
        self._values: Message | None = None
        self._verdict: Message | None = None
        self._store: Any = None
        self._last_beat = 0.0
        self._refused: list[Connection] = []
        """Nodes that did not fit, until they have heard it."""
        self._closed = threading.Event()
        self._door = Door(listener, credential, len(self._seats), self._admit)
        threading.Thread(target=self._work, name="syncline-coordinator", daemon=True).start()

    @property
    def is_done(self) -> bool:
        """No node is left that must still hear how the run ended."""
        return self._phase != "over" or all(seat.gone or seat.connection is None for seat in self._seats)

    @property
    def turned_away(self) -> str:
        """How many strangers came, in words; empty if none did."""
        return self._door.turned_away

    def close(self) -> None:
        self._closed.set()
        self._store = None
        self._door.close()
        for connection in [*self._refused, *(seat.connection for seat in self._seats)]:
            if connection is not None:
                connection.close()

    def _admit(self, connection: Connection, proven: int) -> None:
        threading.Thread(target=self._read, args=(connection, proven), daemon=True).start()

    def _read(self, connection: Connection, proven: int) -> None:
        try:
            while (received := connection.receive()) is not None:
                self._inbox.put((connection, proven, *received))
        except (NotAFrame, OSError):
            pass  # nonsense; or this end was closed between two pieces
        connection.close()
        self._inbox.put((connection, proven, None, b""))

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                connection, proven, message, payload = self._inbox.get(timeout=0.2)
            except queue.Empty:
                pass
            else:
                self._handle(connection, proven, message, payload)
            self._look_around()

    def _handle(self, connection: Connection, proven: int, message: Message | None, payload: bytes) -> None:
        seat = next((seat for seat in self._seats if seat.connection is connection), None)
        try:
            if message is None:
                if seat is not None and not seat.gone:
                    self._lose(seat, "its connection closed")
            elif seat is not None:
                seat.heard = time.monotonic()
                self._hear(seat, message, payload)
            elif _is_hello(message, proven):
                self._welcome(connection, message)
            elif message["say"] == "which plan":
                connection.send({"say": "plan", "plan": {**self._expected["plan"], **self._expected.get("own", {})}})
            else:
                connection.close()
        except (KeyError, TypeError, ValueError, AttributeError):
            # A node of another make: what it says must not end this thread, and with it the run.
            connection.close()
            if seat is not None:
                self._lose(seat, "node 0 does not understand what it says")

    def _hear(self, seat: Seat, message: Message, payload: bytes) -> None:
        kind = message["say"]
        current = message.get("attempt") == self._attempt and self._phase in ("running", "deciding")
        if kind == "ready":
            seat.ready = True
        elif kind == "finished" and current:
            seat.finished = True
        elif kind == "failed" and current:
            error = describe(restore({**message["error"], "host": seat.host}))  # now, where nonsense is noticed
            seat.failed = True
            self._note(_Failure(bool(message["echo"]), error))
        elif kind == "fatal":
            self._end(restore({**message["error"], "host": seat.host}))
        elif kind == "interrupted":
            self._end(Interrupted(f"Stopped by {message['by']} on host {seat.host}; every rank has ended."))
        elif kind == "values" and seat.node_rank == 0:
            self._values = message["values"]
            self._tell_all({"say": "values", "values": self._values})
        elif kind == "bye":
            seat.gone = True

    def _welcome(self, connection: Connection, message: Message) -> None:
        wrong = self._misfit(message)
        seat = self._seats[message["node_rank"]] if wrong is None else None
        if seat is not None and seat.connection is not None and seat.process == message["process"]:
            self._lose(seat, "its connection broke")  # and it came back before that was seen here
        if seat is not None and seat.connection is not None:
            wrong = UsageError(
                f"node rank {seat.node_rank} is claimed twice: by {seat} and by host {message['host']} "
                f"({message['address']}).",
                action="Give every node a different --node-rank, counting from 0.",
            )
        if self._phase == "over":
            connection.send({"say": "over", "error": self._verdict})
            self._refused.append(connection)
        elif wrong is not None:
            connection.send({"say": "over", "error": describe(wrong)})
            self._refused.append(connection)
            if self._phase == "joining":
                self._end(wrong)
        elif seat is not None:
            self._seat(seat, connection, message)

    def _seat(self, seat: Seat, connection: Connection, message: Message) -> None:
        seat.connection, seat.heard, seat.ready, seat.finished = connection, time.monotonic(), False, False
        seat.host, seat.address, seat.process = message["host"], message["address"], message["process"]
        seat.why_lost = ""
        connection.send({"say": "welcome"})
        if self._phase == "joining" and all(seat.connection for seat in self._seats):
            self._enter("gathering")
            self._tell_all(self._table())
        elif self._phase != "joining":
            connection.send(self._table())
            if self._values is not None:
                connection.send({"say": "values", "values": self._values})

    def _table(self) -> Message:
        return {"say": "joined", "hosts": [[seat.host, seat.address] for seat in self._seats]}

    def _misfit(self, message: Message) -> UsageError | None:
        """What does not fit, in words that name the node."""
        nodes, node_rank = self._expected["nodes"], message["node_rank"]
        who = f"host {message['host']} (node {node_rank}, {message['address']})"
        if message["nodes"] != nodes:
            return UsageError(
                f"{who} was started with --nodes {message['nodes']}, node 0 with --nodes {nodes}.",
                action="Use the same number on every node.",
            )
        for name, ours in self._expected["versions"].items():
            theirs = message["versions"].get(name)
            if theirs != ours:
                return UsageError(
                    f"{who} has {name} {theirs}, node 0 has {ours}.", action="Install the same version."
                )
        ours, theirs = self._expected["plan"], message["plan"]
        differing = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
        if differing:
            keys = ", ".join(f"{key} = {theirs.get(key)!r}, not {ours.get(key)!r}" for key in differing)
            return UsageError(
                f"{who} has a different plan than node 0: {keys}.", action="Start every node with the same plan."
            )
        return None

    def _look_around(self) -> None:
        now = time.monotonic()
        for seat in self._seats:
            if seat.connection is not None and not seat.gone and now - seat.heard > self._limits.silence_s:
                self._lose(seat, f"it has been silent for {self._limits.silence_s:g} s")
        if self._phase in ("joining", "gathering"):
            self._wait_for_missing(now)
        if self._phase == "gathering" and all(seat.connection and seat.ready for seat in self._seats):
            self._start()
        elif self._phase == "running" and all(seat.finished for seat in self._seats):
            self._end(None)
        elif self._phase == "deciding":
            self._decide(now)
        if now - self._last_beat > BEAT_SECONDS:
            self._last_beat = now
            self._tell_all({"say": "beat"})

    def _wait_for_missing(self, now: float) -> None:
        missing = [seat for seat in self._seats if seat.connection is None]
        if not missing:
            self._since = now
            return
        names = ", ".join(f"{seat}{f': {seat.why_lost}' if seat.why_lost else ''}" for seat in missing)
        if now - self._since > self._limits.join_timeout_s:
            self._end(
                HostError(
                    f"waited {self._limits.join_timeout_s:g} s for {names}.",
                    action="Start the missing nodes, or raise --join-timeout.",
                )
            )
        elif now > self._next_line:
            self._next_line = now + _NEXT_LINE_SECONDS
            strangers = f"; {self.turned_away}" if self.turned_away else ""
            self._tell_all({"say": "waiting", "text": f"waiting for {names}{strangers}"})

    def _start(self) -> None:
        # Late: node 0 loads torch while the others join.
        from syncline.launcher.starting import listening, make_store

        address = self._door.address
        self._store = None
        self._store = make_store(listening(address, 0))
        self._attempt += 1
        for seat in self._seats:
            seat.ready = seat.finished = seat.failed = False
        self._enter("running")
        self._tell_all({"say": "start", "attempt": self._attempt, "address": address, "port": self._store.port})

    def _lose(self, seat: Seat, why: str) -> None:
        if seat.connection is not None:
            seat.connection.close()
        seat.connection, seat.ready, seat.why_lost = None, False, why
        lost = HostError(f"{seat} is lost: {why}.")
        lost.host = seat.host
        if self._phase in ("running", "deciding"):
            self._note(_Failure(False, describe(lost)))
        elif self._phase == "gathering" and self._attempt < 0:
            self._end(lost)

    def _note(self, failure: _Failure) -> None:
        self._failures.append(failure)
        now = time.monotonic()
        if self._phase == "running":
            self._enter("deciding")
            self._decide_at = now + _ECHO_SECONDS
        if not failure.is_echo:
            self._decide_at = now

    def _decide(self, now: float) -> None:
        """The cause comes before its echoes. A node that is just being cut off may still turn out to be the cause."""
        silent = any(seat.connection is not None and now - seat.heard > 3 * BEAT_SECONDS for seat in self._seats)
        only_echoes = all(failure.is_echo for failure in self._failures)
        if now < self._decide_at or (only_echoes and silent):
            return
        first = min(self._failures, key=lambda failure: failure.is_echo)
        error = restore(first.error)
        if first.is_echo:
            error.action = " ".join([error.action, *self._suspicion()]).strip()
        if isinstance(error, UsageError) or self._attempt >= self._limits.max_restarts:
            self._end(error)
            return
        self._failures = []
        self._enter("gathering")
        self._tell_all({"say": "stop", "attempt": self._attempt, "error": describe(error)})

    def _suspicion(self) -> list[str]:
        """Where all complain of others, those that do not complain are the ones that were waited for."""
        suspects = [str(seat) for seat in self._seats if not seat.failed]
        if not suspects or len(suspects) == len(self._seats):
            return []
        return [f"Still busy while the others waited: {', '.join(suspects)}."]

    def _end(self, error: SynclineError | None) -> None:
        if self._phase == "over":
            return
        self._enter("over")
        self._verdict = describe(error) if error is not None else None
        self._tell_all({"say": "over", "error": self._verdict})

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self._since = time.monotonic()
        self._next_line = self._since + _FIRST_LINE_SECONDS

    def _tell_all(self, message: Message) -> None:
        for seat in self._seats:
            if seat.connection is not None and not seat.gone:
                seat.connection.send(message)


def _is_hello(message: Message, proven: int) -> bool:
    """Whether a node says all that it should, about the seat that it has proven."""
    is_whole = all(isinstance(message.get(name), kind) for name, kind in _HELLO.items())
    return message["say"] == "hello" and is_whole and message["node_rank"] == proven
