"""Messages between the launcher and the processes that hold a cluster: JSON with open files beside it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

_HEADER_BYTES = 4
_MOST_DESCRIPTORS = 5


def send(connection: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """The message, and with it the descriptors, which both sides then hold."""
    body = json.dumps(message).encode()
    socket.send_fds(connection, [len(body).to_bytes(_HEADER_BYTES, "big")], descriptors)
    connection.sendall(body)


def receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message and its descriptors; None when the other side is gone."""
    try:
        header, descriptors, _, _ = socket.recv_fds(connection, _HEADER_BYTES, _MOST_DESCRIPTORS)
        body = _exactly(connection, int.from_bytes(header, "big")) if len(header) == _HEADER_BYTES else b""
    except ConnectionError:
        return None, []
    if not body:
        for descriptor in descriptors:
            os.close(descriptor)
        return None, []
    return json.loads(body), descriptors


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            return b""
        parts += part
    return bytes(parts)
