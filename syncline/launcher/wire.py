"""How things travel between our processes: messages as frames, errors as messages, functions and results as pickles.

A frame is four magic bytes, the lengths of message and payload, the message, and the payload (a file, where there is
one). Over a Unix socket, open descriptors go with it. Messages are JSON and not pickles: whoever reaches a node can
say something, but run nothing. Of somebody who has not proven yet who they are, only a short message is read.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from syncline import errors
from syncline.errors import RankFailed, SynclineError
from syncline.launcher.trust import is_same_user

Message = dict[str, Any]

_MAGIC = b"SYN1"
_HEAD = struct.Struct("!4sII")
_LONGEST_MESSAGE = 2**22
_LONGEST_PAYLOAD = 2**28
LONGEST_OF_STRANGERS = 4096
"""Bytes of a frame from somebody unproven, payload included."""


class NotAFrame(Exception):
    """Somebody else's protocol."""


@dataclass(frozen=True)
class Frame:
    """A message with what came along. The receiver owns the descriptors and closes them."""

    message: Message
    payload: bytes = b""
    descriptors: list[int] = field(default_factory=list)


def send_frame(
    connected: socket.socket, message: Mapping[str, Any], payload: bytes = b"", descriptors: Sequence[int] = ()
) -> None:
    """Send one frame; raises OSError if the other end is gone. Sent descriptors are duplicates: ours stay open."""
    text = json.dumps(message).encode()
    head = _HEAD.pack(_MAGIC, len(text), len(payload))
    if descriptors:
        head = head[socket.send_fds(connected, [head], descriptors) :]
    connected.sendall(head + text + payload)


def receive_frame(connected: socket.socket, most_descriptors: int = 0, longest: int | None = None) -> Frame | None:
    """The next frame, or None when the other end is gone. What is no frame, or has more than `longest` bytes, raises
    NotAFrame before more of it is read."""
    descriptors: list[int] = []
    try:
        head = b""
        if most_descriptors:
            # Descriptors arrive with the first byte of the frame that they were sent with.
            head, descriptors, _, _ = socket.recv_fds(connected, _HEAD.size, most_descriptors)
            if not head:
                return None
        head += _exactly(connected, _HEAD.size - len(head))
        text_length, payload_length = _lengths(head, longest)
        text, payload = _exactly(connected, text_length), _exactly(connected, payload_length)
        received = Frame(_message(text), payload, descriptors)
        descriptors = []
        return received
    except OSError:
        return None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def parse_frame(data: bytes | bytearray) -> Message | None:
    """The message of a stranger's frame, None while there is not all of it. What is no such frame, or is followed by
    anything, raises NotAFrame."""
    if len(data) < _HEAD.size:
        if not _MAGIC.startswith(data[: len(_MAGIC)]):
            raise NotAFrame
        return None
    length = sum(_lengths(bytes(data[: _HEAD.size]), LONGEST_OF_STRANGERS))
    if len(data) - _HEAD.size > length:
        raise NotAFrame
    return _message(bytes(data[_HEAD.size :])) if len(data) - _HEAD.size == length else None


def _lengths(head: bytes, longest: int | None) -> tuple[int, int]:
    """Bytes of message and payload."""
    magic, text, payload = _HEAD.unpack(head)
    if magic != _MAGIC or text > _LONGEST_MESSAGE or payload > _LONGEST_PAYLOAD:
        raise NotAFrame
    if longest is not None and _HEAD.size + text + payload > longest:
        raise NotAFrame
    return text, payload


def _message(text: bytes) -> Message:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        raise NotAFrame from None
    if not isinstance(message, dict):
        raise NotAFrame
    return message


class Connection:
    """One end of a TCP connection between nodes. Any thread may send; one thread receives."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.settimeout(None)
        self._socket = connected
        self._sending = threading.Lock()
        self.peer, self.port = str(connected.getpeername()[0]), int(connected.getpeername()[1])

    def send(self, message: Message, payload: bytes = b"") -> bool:
        """Whether the network accepted it; False if the connection is closed or broken."""
        try:
            with self._sending:
                send_frame(self._socket, message, payload)
        except OSError:
            return False
        return True

    @property
    def is_same_user(self) -> bool:
        """Whether the other end is on this machine and belongs to the same user."""
        return is_same_user(self._socket)

    def receive(self, longest: int | None = None) -> tuple[Message, bytes] | None:
        """The next message and its payload, or None when the other end is gone."""
        frame = receive_frame(self._socket, longest=longest)
        if frame is None:
            return None
        if not isinstance(frame.message.get("say"), str):
            raise NotAFrame
        return frame.message, frame.payload

    def set_patience(self, seconds: float | None) -> None:
        """How long `receive` waits for each piece before it gives the other end up."""
        self._socket.settimeout(seconds)

    def take(self) -> socket.socket:
        """The socket itself, for what is no frame. The connection is the taker's from now on."""
        return self._socket

    def close(self) -> None:
        close_now(self._socket)


def close_now(open_socket: socket.socket) -> None:
    """Also wakes a thread that waits on it, which closing alone does not."""
    with contextlib.suppress(OSError):
        open_socket.shutdown(socket.SHUT_RDWR)
    open_socket.close()


def describe(error: SynclineError, host: str | None = None) -> Message:
    """An error as a message: a node must end with the same words wherever the fault was.

    `host` is where it happened, unless the error says so itself.
    """
    return {
        "kind": type(error).__name__,
        "message": error.message,
        "action": error.action,
        "rank": error.rank,
        "step": error.step,
        "host": error.host or host,
        "traceback": error.traceback_text if isinstance(error, RankFailed) else "",
    }


def restore(description: Message) -> SynclineError:
    """The error that `describe` was given, on another machine."""
    kind = getattr(errors, str(description["kind"]), None)
    message, action, rank = str(description["message"]), str(description["action"]), description["rank"]
    error: SynclineError
    if kind is RankFailed:
        error = RankFailed(message, action=action, rank=rank, traceback_text=str(description["traceback"]))
    elif isinstance(kind, type) and issubclass(kind, SynclineError):
        error = kind(message, action=action, rank=rank, step=description["step"])
    else:
        error = SynclineError(message, action=action, rank=rank, step=description["step"])
    error.host = description["host"]
    return error


def pack(thing: object) -> bytes:
    """A pickle. Cloudpickle sends functions and classes of a script, a notebook or a lambda by value, where the
    standard pickle only sends their names. It is imported on first use, to keep `import syncline` quick."""
    import cloudpickle  # type: ignore[import-untyped]

    return bytes(cloudpickle.dumps(thing))


def unpack(data: bytes) -> Any:
    """Only for what our own processes wrote: a pickle can run any code."""
    import cloudpickle

    return cloudpickle.loads(data)


def _exactly(connected: socket.socket, count: int) -> bytes:
    parts, missing = [], count
    while missing:
        part = connected.recv(min(missing, 2**20))
        if not part:
            raise ConnectionError("the other end closed the connection")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
