"""What nodes tell each other before and beside the ranks' own traffic: short JSON messages over one TCP connection.

JSON and not pickles: whoever reaches the port can say something, but run nothing. A frame is four magic bytes, the
lengths of message and payload, the message, the payload (a file, where there is one).
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from typing import Any

Message = dict[str, Any]

_MAGIC = b"SYN1"
_HEAD = struct.Struct("!4sII")
_LONGEST_MESSAGE = 2**22
_LONGEST_PAYLOAD = 2**28


class NotAFrame(Exception):
    """Somebody else's protocol."""


class Connection:
    """One end. Any thread may send; one thread receives."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.settimeout(None)
        self._socket = connected
        self._sending = threading.Lock()
        self.peer = str(connected.getpeername()[0])

    def send(self, message: Message, payload: bytes = b"") -> bool:
        """Whether it could be handed to the network; False if the connection is closed or broken."""
        text = json.dumps(message).encode()
        try:
            with self._sending:
                self._socket.sendall(_HEAD.pack(_MAGIC, len(text), len(payload)) + text + payload)
        except OSError:
            return False
        return True

    def receive(self) -> tuple[Message, bytes] | None:
        """The next message and its payload, or None when the other end is gone."""
        head = self._exactly(_HEAD.size)
        if head is None:
            return None
        magic, text_length, payload_length = _HEAD.unpack(head)
        if magic != _MAGIC or text_length > _LONGEST_MESSAGE or payload_length > _LONGEST_PAYLOAD:
            raise NotAFrame
        text, payload = self._exactly(text_length), self._exactly(payload_length)
        if text is None or payload is None:
            return None
        try:
            message = json.loads(text)
        except ValueError:
            raise NotAFrame from None
        if not isinstance(message, dict) or not isinstance(message.get("say"), str):
            raise NotAFrame
        return message, payload

    def set_patience(self, seconds: float | None) -> None:
        """How long `receive` waits for each piece before it takes the other end for gone."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        close_now(self._socket)

    def _exactly(self, count: int) -> bytes | None:
        parts, missing = [], count
        while missing:
            try:
                part = self._socket.recv(min(missing, 2**20))
            except OSError:
                return None
            if not part:
                return None
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)


def close_now(open_socket: socket.socket) -> None:
    """Also wakes a thread that waits on it, which closing alone does not."""
    with contextlib.suppress(OSError):
        open_socket.shutdown(socket.SHUT_RDWR)
    open_socket.close()
