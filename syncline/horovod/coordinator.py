"""How requests come to rank 0 and answers go back: one connection for each rank, rank 0's own included.

Answers are sent while the matching is locked, so every rank receives them in one order. A connection that ends
without a word is a lost rank, and every other rank is told.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from syncline.errors import CommunicationError, UsageError
from syncline.horovod.matching import Answer, Matching
from syncline.horovod.stalls import Stalls
from syncline.launcher.route import local_address
from syncline.launcher.starting import LOOPBACK, listening
from syncline.launcher.wire import Connection, Message, close_now

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_ATTEMPT_S = 5.0
_KEY = "lane"


class Coordinator:
    """On rank 0: serves all ranks until each has left, rank 0 itself included or not."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._matching = Matching(size)
        self._lock = threading.Lock()
        self._connections: dict[int, Connection] = {}
        self._steps: dict[int, int] = {}
        """How many steps of each optimiser some rank has begun."""
        self._taken_part: dict[int, dict[int, int]] = {}
        """By rank that has joined, in how many of them it took part, or is told to."""
        self._stalls = Stalls(self._matching, self._send, self._end_all)
        self._closed = threading.Event()

    def serve(self, store: Store, addresses: Iterable[str], deadline_s: float) -> None:
        """Say where, and take one connection of each rank. In a thread of its own; ends when all are there."""
        token = secrets.token_hex(16)
        server = listening("", 0)
        server.settimeout(deadline_s)
        port = server.getsockname()[1]
        store.set(_KEY, json.dumps({"addresses": list(addresses), "port": port, "token": token}))
        threading.Thread(target=self._accept, args=(server, token), name="syncline-horovod-door", daemon=True).start()

    def _accept(self, server: socket.socket, token: str) -> None:
        arrived = 0
        try:
            while arrived < self._size:
                connection = Connection(server.accept()[0])
                connection.set_patience(_ATTEMPT_S)
                first = connection.receive()
                connection.set_patience(None)
                if first is None or not secrets.compare_digest(str(first[0].get("token")), token):
                    connection.close()
                    continue
                rank = int(first[0]["rank"])
                with self._lock:
                    self._connections[rank] = connection
                arrived += 1
                threading.Thread(
                    target=self._serve, args=(rank, connection), name=f"syncline-horovod-{rank}", daemon=True
                ).start()
        except OSError:
            return  # ranks that cannot connect say so themselves
        finally:
            close_now(server)
        threading.Thread(target=self._look, name="syncline-horovod-stalls", daemon=True).start()

    def _look(self) -> None:
        while not self._closed.wait(self._stalls.pause_s):
            with self._lock:
                self._stalls.look(time.monotonic())

    def _serve(self, rank: int, connection: Connection) -> None:
        said_bye = False
        while (received := connection.receive()) is not None:
            message = received[0]
            with self._lock:
                said_bye = message["say"] == "bye"
                self._on_message(rank, message)
        connection.close()
        with self._lock:
            del self._connections[rank]
            if not said_bye:
                self._end_all(f"rank {rank} was lost: its process ended without hvd.shutdown().")
            if not self._connections:
                self._closed.set()

    def _on_message(self, rank: int, message: Message) -> None:
        say = message["say"]
        if say == "request":
            if message["request"]["kind"] == "join":
                self._on_join(rank, message["request"]["steps"])
            self._answer(self._matching.submit(rank, message["request"], time.monotonic()))
        elif say == "step":
            self._on_step(message["optimizer"], message["count"])
        elif say == "status":
            self._stalls.on_status(rank, message, time.monotonic())
        elif say == "failed":
            self._end_all(f"on rank {rank}, {message['why']}")
        elif say == "bye":
            self._answer(self._matching.leave(rank, f"Horovod has been shut down on rank {rank}."))

    def _on_join(self, rank: int, steps: dict[str, int]) -> None:
        self._taken_part[rank] = {int(number): count for number, count in steps.items()}
        self._send(range(self._size), {"say": "joined"})
        for number in self._steps:
            self._owe(rank, number)

    def _on_step(self, optimizer: int, count: int) -> None:
        self._steps[optimizer] = max(count, self._steps.get(optimizer, 0))
        for rank in self._taken_part:
            self._owe(rank, optimizer)

    def _owe(self, rank: int, optimizer: int) -> None:
        """A rank that has joined takes part in every step that another has begun."""
        took_part = self._taken_part[rank].get(optimizer, 0)
        for _ in range(took_part, self._steps[optimizer]):
            self._send([rank], {"say": "owed", "optimizer": optimizer})
        self._taken_part[rank][optimizer] = max(took_part, self._steps[optimizer])

    def _answer(self, answers: list[Answer]) -> None:
        for answer in answers:
            if answer["say"] == "all joined":
                self._taken_part.clear()
            self._send(answer["ranks"], answer)

    def _send(self, ranks: Iterable[int], message: Message) -> None:
        """Rank 0 comes last: its process may end on what it reads, and this thread with it."""
        for rank in sorted(ranks, reverse=True):
            if rank in self._connections:
                self._connections[rank].send(message)

    def _end_all(self, why: str) -> None:
        self._send(range(self._size), {"say": "over", "why": why})


class Link:
    """A rank's end: sends, and hands what comes to a reader in a thread of its own."""

    def __init__(self, connection: Connection, on_message: Callable[[Answer], None], on_end: Callable[[str], None]):
        self._connection = connection
        self._on_message, self._on_end = on_message, on_end
        self._thread = threading.Thread(target=self._read, name="syncline-horovod-link", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._connection.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    def _read(self) -> None:
        while (received := self._connection.receive()) is not None:
            self._on_message(received[0])
        self._on_end("rank 0 was lost, or has been shut down.")


def find(store: Store, rank: int, *, same_host: bool, deadline_s: float) -> Connection:
    """A connection to rank 0's coordinator."""
    store.wait([_KEY], timedelta(seconds=deadline_s))
    where: dict[str, Any] = json.loads(store.get(_KEY))
    addresses = [LOOPBACK] if same_host else where["addresses"]
    for address in addresses:
        try:
            connection = Connection(socket.create_connection((address, where["port"]), timeout=_ATTEMPT_S))
        except OSError:
            continue
        connection.send({"say": "rank", "rank": rank, "token": where["token"]})
        return connection
    raise CommunicationError(
        f"rank {rank} cannot reach rank 0 at {', '.join(addresses)} port {where['port']}.",
        action="Let a firewall pass connections between the hosts of the run.",
        rank=rank,
    )


def own_addresses(known: str) -> list[str]:
    """Where other hosts may find this one: the address that the launcher gave, then the one on the way out."""
    found = [known] if known else []
    with contextlib.suppress(UsageError):
        found.append(local_address("192.0.2.1", 9))
    found.append(socket.gethostname())
    return list(dict.fromkeys(found))
