"""The door of a run: who knocks must prove the run's token before node 0 listens to anything else.

    node    knock: its seat, a random number
    node 0  challenge: a random number of its own
    node    proof of the token over seat and both numbers; empty where it has no token
    node 0  proven, with a proof in return: neither side talks to somebody who only sits at the right address

One thread serves all that wait at the door, and none of them can hold it up: each has a few seconds in all and one
short message at a time, and where too many wait, the one that came first has to go. A node that was crowded out
knocks again. Whoever proves nothing is turned away and counted.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from syncline.errors import UsageError
from syncline.launcher.nodes.token import VARIABLE, Credential
from syncline.launcher.trust import is_proof, is_same_user, proof
from syncline.launcher.wire import LONGEST_OF_STRANGERS, Connection, Message, NotAFrame, parse_frame, send_frame

PATIENCE_SECONDS = 5.0
MOST_GUESTS = 128
_LOOK_SECONDS = 0.5
_NODE, _NODE_0 = "node", "node 0"


@dataclass
class _Guest:
    connected: socket.socket
    address: str
    until: float
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    read: bytearray = field(default_factory=bytearray)
    knock: tuple[int, str] | None = None
    """The seat, and the node's own random number."""


class Door:
    """`listener` is the door's own from now on. `admit` gets a connection and its seat, of which there are `seats`;
    it is called from the door's thread."""

    def __init__(
        self, listener: socket.socket, credential: Credential, seats: int, admit: Callable[[Connection, int], None]
    ) -> None:
        self._listener = listener
        self._token = credential.token
        self._seats = seats
        self._admit = admit
        self._guests: dict[socket.socket, _Guest] = {}
        self._turned_away = 0
        self._last = ""
        self._closed = threading.Event()
        self.address = str(listener.getsockname()[0])
        self._thread = threading.Thread(target=self._serve, name="syncline-door", daemon=True)
        self._thread.start()

    @property
    def turned_away(self) -> str:
        """How many, in words; empty if there were none."""
        if self._turned_away < 2:
            one = f"1 connection, from {self._last}, did not prove the run's token and was turned away"
            return one if self._turned_away else ""
        return (
            f"{self._turned_away:,} connections, the last from {self._last}, did not prove the run's token and were "
            "turned away"
        )

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closing does not
        self._thread.join(2 * _LOOK_SECONDS)

    def _serve(self) -> None:
        self._listener.setblocking(False)
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._closed.is_set():
                for key, _ in selector.select(_LOOK_SECONDS):
                    if key.fileobj is self._listener:
                        self._open(selector)
                    else:
                        self._hear(selector, key.data)
                for guest in self._overdue():
                    self._turn_away(selector, guest)
            for guest in self._guests.values():
                guest.connected.close()

    def _open(self, selector: selectors.BaseSelector) -> None:
        try:
            connected, address = self._listener.accept()
        except OSError:
            self._closed.wait(0.05)  # no descriptor is left, or somebody was gone again
            return
        connected.setblocking(False)
        guest = _Guest(connected, str(address[0]), time.monotonic() + PATIENCE_SECONDS)
        self._guests[connected] = guest
        selector.register(connected, selectors.EVENT_READ, guest)

    def _overdue(self) -> list[_Guest]:
        waiting = list(self._guests.values())  # in the order in which they came
        crowd = max(0, len(waiting) - MOST_GUESTS)
        now = time.monotonic()
        return [guest for number, guest in enumerate(waiting) if number < crowd or guest.until < now]

    def _hear(self, selector: selectors.BaseSelector, guest: _Guest) -> None:
        try:
            data = guest.connected.recv(LONGEST_OF_STRANGERS)
            guest.read += data
            message = parse_frame(guest.read) if data else {}
            if message is None:
                return
            guest.read.clear()
            if guest.knock is None:
                guest.knock = self._understood(message)
                send_frame(guest.connected, {"say": "challenge", "nonce": guest.nonce})
            elif self._is_proven(guest, message):
                self._let_in(selector, guest)
            else:
                send_frame(guest.connected, {"say": "refused"})
                self._turn_away(selector, guest)
        except BlockingIOError:
            return
        except (OSError, NotAFrame):
            self._turn_away(selector, guest)

    def _understood(self, message: Message) -> tuple[int, str]:
        seat, nonce = message.get("seat"), message.get("nonce")
        is_seat = type(seat) is int and 0 <= seat < self._seats
        if message.get("say") != "knock" or not is_seat or not isinstance(nonce, str) or not nonce.isalnum():
            raise NotAFrame
        assert isinstance(seat, int)
        return seat, nonce

    def _is_proven(self, guest: _Guest, message: Message) -> bool:
        assert guest.knock is not None
        given = message.get("proof") if message.get("say") == "proof" else None
        if given == "":
            return is_same_user(guest.connected)
        return is_proof(given, self._token, _NODE, *guest.knock, guest.nonce)

    def _let_in(self, selector: selectors.BaseSelector, guest: _Guest) -> None:
        assert guest.knock is not None
        answer = proof(self._token, _NODE_0, *guest.knock, guest.nonce)
        send_frame(guest.connected, {"say": "proven", "proof": answer})
        connection = Connection(guest.connected)
        selector.unregister(guest.connected)
        del self._guests[guest.connected]
        self._admit(connection, guest.knock[0])

    def _turn_away(self, selector: selectors.BaseSelector, guest: _Guest) -> None:
        self._turned_away += 1
        self._last = guest.address
        del self._guests[guest.connected]
        selector.unregister(guest.connected)
        guest.connected.close()


class NotLetIn(Exception):
    """`error` says why to the user, unless it `may_pass` and another attempt goes better."""

    def __init__(self, error: UsageError, *, may_pass: bool = False) -> None:
        super().__init__(str(error))
        self.error = error
        self.may_pass = may_pass


def knock(connection: Connection, credential: Callable[[], Credential], seat: int) -> None:
    """A node's side of the door; NotLetIn if it stays shut. The token is asked for once node 0 has answered: by then
    it has left the one that nodes may share."""
    connection.set_patience(PATIENCE_SECONDS)
    nonce = secrets.token_hex(16)
    connection.send({"say": "knock", "seat": seat, "nonce": nonce})
    challenge = _answer(connection, "challenge")
    ours = credential()
    facts = (seat, nonce, challenge.get("nonce"))
    if ours.token:
        connection.send({"say": "proof", "proof": proof(ours.token, _NODE, *facts)})
        if not is_proof(_answer(connection, "proven", ours).get("proof"), ours.token, _NODE_0, *facts):
            raise NotLetIn(_not_node_0(connection))
    elif connection.is_same_user:
        connection.send({"say": "proof", "proof": ""})
        _answer(connection, "proven")
    else:
        raise NotLetIn(
            UsageError(
                f"this node has no token for the run of node 0 at {connection.peer}.",
                action=f"Node 0 prints it: set {VARIABLE} to it, or give a file that holds it with --token-file.",
            ),
            may_pass=ours.may_change,
        )
    connection.set_patience(None)


def _answer(connection: Connection, expected: str, ours: Credential | None = None) -> Message:
    try:
        received = connection.receive(LONGEST_OF_STRANGERS)
    except NotAFrame:
        raise NotLetIn(_not_node_0(connection)) from None
    if received is None:  # perhaps crowded out
        raise NotLetIn(_not_node_0(connection), may_pass=True)
    if received[0]["say"] == "refused" and ours is not None:
        raise NotLetIn(
            UsageError(
                f"node 0 at {connection.peer} does not know the token from {ours.source}.",
                action="Give this node the token of that run, which node 0 prints.",
            ),
            may_pass=ours.may_change,
        )
    if received[0]["say"] != expected:
        raise NotLetIn(_not_node_0(connection))
    return received[0]


def _not_node_0(connection: Connection) -> UsageError:
    return UsageError(
        f"the program at {connection.peer} port {connection.port} does not respond like node 0 of this run and of "
        "this version of Syncline.",
        action="Start node 0 there, or correct --rendezvous.",
    )
