"""The desk: where an engine's processes report to the launcher.

Each opens three connections, and proves the start's secret on each as nodes do: one for words, and one for each of
its output streams, whose bytes arrive even if the process is killed right after it wrote them. So outcome, result
and output need neither a common file system nor anything of the engine, and a connection that ends without a last
word is a process that is gone.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from syncline.launcher.engines.placing import Seat
from syncline.launcher.nodes.door import Door, NotLetIn, knock
from syncline.launcher.nodes.token import Credential
from syncline.launcher.starting import listening
from syncline.launcher.wire import Connection, Message, NotAFrame

WORDS, STDOUT, STDERR = range(3)
STREAMS = 3
PIECE_BYTES = 2**26
"""Of a result: a frame has a longest payload, results do not."""
_CONNECT_SECONDS = 30.0
_PAUSE_SECONDS = 0.5
_JOIN_SECONDS = 2.0

Output = Callable[[int, int, bytes], None]
"""Takes what a process wrote: its number, the stream, the bytes."""


class Guest:
    """One process, as far as it has come."""

    def __init__(self) -> None:
        self.seat: Seat | None = None
        self.sees_folder = True
        self.outcome: dict[str, Any] | None = None
        self.result = bytearray()
        self.is_gone = False
        self.last_alive = 0.0
        self.connection: Connection | None = None


class Desk:
    """Listens on one address until it is closed. `output` is called from threads of its own."""

    def __init__(self, address: str, workers: int, output: Output) -> None:
        self.token = secrets.token_hex(16)
        self.guests = [Guest() for _ in range(workers)]
        self._output = output
        self._threads: list[threading.Thread] = []
        listener = listening(address, 0)
        self.port = int(listener.getsockname()[1])
        self._door = Door(listener, Credential(self.token), STREAMS * workers, self._admit)

    @property
    def turned_away(self) -> str:
        return self._door.turned_away

    def send(self, number: int, message: Message, payload: bytes = b"") -> None:
        connection = self.guests[number].connection
        if connection is not None:
            connection.send(message, payload)

    def ask_to_stop(self) -> None:
        for number, guest in enumerate(self.guests):
            if not guest.is_gone:
                self.send(number, {"say": "stop"})

    def wait_for_ends(self, seconds: float) -> None:
        """Until no process that has reported is there any more, or so long."""
        deadline = time.monotonic() + seconds
        while any(guest.connection is not None and not guest.is_gone for guest in self.guests):
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)

    def close(self) -> None:
        """No process reports any more; what has arrived has been heard."""
        self._door.close()
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for guest in self.guests:
            if guest.connection is not None:
                guest.connection.close()

    def _admit(self, connection: Connection, seat: int) -> None:
        number, stream = divmod(seat, STREAMS)
        serve = self._hear if stream == WORDS else self._carry
        thread = threading.Thread(
            target=serve, args=(connection, number, stream), name=f"syncline-desk-{seat}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _hear(self, connection: Connection, number: int, _stream: int) -> None:
        guest = self.guests[number]
        guest.connection = connection
        with contextlib.suppress(NotAFrame, KeyError, TypeError):
            while (received := connection.receive()) is not None:
                guest.last_alive = time.time()
                self._note(guest, number, *received)
        guest.last_alive = time.time()
        guest.is_gone = True
        connection.close()

    def _note(self, guest: Guest, number: int, message: Message, payload: bytes) -> None:
        if message["say"] == "hello":
            guest.sees_folder = bool(message["sees_folder"])
            port = int(message["port"])
            guest.seat = Seat(number, str(message["host"]), str(message["name"]), str(message["address"]), port)
        elif message["say"] == "result":
            guest.result += payload
        elif message["say"] == "outcome":
            guest.outcome = message["outcome"]

    def _carry(self, connection: Connection, number: int, stream: int) -> None:
        with connection.take() as connected:
            while data := _some(connected):
                with contextlib.suppress(OSError, ValueError):  # a full disk here must not break the rank's own pipe
                    self._output(number, stream, data)


def report_to(address: str, port: int, token: str, seat: int) -> Connection:
    """The process's side of the door. Tries again where too many came at once."""
    deadline = time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            connection = Connection(socket.create_connection((address, port), timeout=_CONNECT_SECONDS))
            knock(connection, lambda: Credential(token, "the launcher"), seat)
            return connection
        except (OSError, NotLetIn) as error:
            passes = isinstance(error, OSError) or error.may_pass
            if not passes or time.monotonic() > deadline:
                raise ConnectionError(
                    f"cannot reach the launcher at {address} port {port} from here: {error}"
                ) from None
        time.sleep(_PAUSE_SECONDS)


def _some(connected: socket.socket) -> bytes:
    try:
        return connected.recv(2**16)
    except OSError:
        return b""
