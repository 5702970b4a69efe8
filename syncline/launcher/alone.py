"""The director of ranks that are all on this machine: one store on loopback for each start."""

from __future__ import annotations

import socket
import sys
from datetime import timedelta

from torch.distributed import TCPStore

from syncline.errors import SynclineError, UsageError
from syncline.launcher.host_ranks import Attempt
from syncline.launcher.local import LOOPBACK, listening

_STORE_TIMEOUT = timedelta(minutes=5)


class Alone:
    """`listener` is for the first start; later ones listen on `port` again. Stops when a signal was `noted`."""

    def __init__(self, listener: socket.socket, port: int, noted: list[int], max_restarts: int) -> None:
        self._listener: socket.socket | None = listener
        self._port = port
        self._noted = noted
        self._max_restarts = max_restarts
        self._number = -1
        self._store: TCPStore | None = None

    def next_attempt(self) -> Attempt:
        self._number += 1
        # A store of its own for each start: keys of the last one would be taken for news.
        self._store = None
        listener, self._listener = self._listener or listening(LOOPBACK, self._port), None
        self._store = make_store(listener)
        return Attempt(self._number, LOOPBACK, self._store.port)

    def must_stop(self) -> bool:
        return bool(self._noted)

    def again(self, error: SynclineError, *, is_echo: bool) -> bool:
        if self._noted or isinstance(error, UsageError) or self._number >= self._max_restarts:
            return False
        print(restart_line(error, self._number + 1, self._max_restarts), file=sys.stderr, flush=True)
        return True

    def all_finished(self) -> bool:
        return True

    def close(self) -> None:
        self._store = None


def make_store(listener: socket.socket) -> TCPStore:
    """A store on a socket that was bound by us."""
    address, port = listener.getsockname()[:2]
    return TCPStore(
        address,
        int(port),
        is_master=True,
        timeout=_STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def restart_line(error: SynclineError, number: int, max_restarts: int) -> str:
    return f"syncline: {error} All ranks start again from the last checkpoint, restart {number} of {max_restarts}."
