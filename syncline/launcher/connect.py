"""Reach node 0: wait while it has not started yet, give up when nothing answers at all."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable

from syncline.errors import UsageError
from syncline.launcher.route import Route
from syncline.launcher.wire import Connection

_ATTEMPT_SECONDS = 3.0
_PAUSE_SECONDS = 0.2
_FIRST_LINE_SECONDS = 5.0
SILENCE_SECONDS = 30.0
"""A machine that is up refuses a port where nobody listens. One that says nothing is switched off, or something on
the way drops what is sent to that port."""

_SILENT = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT}


def connect(route: Route, timeout_s: float, tell: Callable[[str], None]) -> Connection:
    """A connection to the rendezvous. After five seconds in vain, a line says what it waits for."""
    start = time.monotonic()
    last_refused = None
    told = False
    while True:
        try:
            connected = socket.create_connection((route.target, route.port), timeout=_ATTEMPT_SECONDS)
            return Connection(connected)
        except OSError as error:
            silent = isinstance(error, TimeoutError) or error.errno in _SILENT
            why = "no answer" if silent else (error.strerror or str(error)).lower()
        now = time.monotonic()
        if not silent:
            last_refused = now
        where = f"node 0 at {route.target} port {route.port}"
        patience = min(SILENCE_SECONDS, timeout_s) if silent else timeout_s
        if now - (start if not silent else last_refused or start) > patience:
            raise UsageError(f"{where} could not be reached in {now - start:.0f} s: {why}.", action=_advice(silent))
        if now - start > _FIRST_LINE_SECONDS and not told:
            told = True
            tell(f"syncline: waiting for {where}: {why}")
        time.sleep(_PAUSE_SECONDS)


def _advice(silent: bool) -> str:
    if silent:
        return "Is the address right, is the machine on, and does its firewall let the port through?"
    return "Start node 0 on that machine with the same --rendezvous, or correct the address and the port."
