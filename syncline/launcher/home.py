"""The run folder for ranks that do not see it: its owner serves it, to whoever proves the run's secret.

    Home        the owner's side: answers one request after the other on each connection
    FarFolder   the rank's side: a Folder whose every call is a request
    Courier     carries what grows in a rank's own folder (event logs, output) home, now and then and at the end

A connection of their own, beside the ones by which nodes and engines talk: a checkpoint of a gigabyte must not keep a
sign of life waiting. Requests name files of the run folder alone, and of it only what ranks write.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from syncline.folders import LocalFolder
from syncline.launcher.nodes.door import Door, NotLetIn, knock
from syncline.launcher.nodes.token import Credential
from syncline.launcher.starting import listening
from syncline.launcher.wire import Connection, Message, NotAFrame

CARRY_SECONDS = 2.0
_PATIENCE_SECONDS = 60.0
_PAUSE_SECONDS = 0.5
_PIECE_BYTES = 2**22
_OURS = re.compile(
    r"((events|logs|checkpoints|profile)(/\.?[A-Za-z0-9_-][A-Za-z0-9._-]*){0,3}|\.?compute\.json[.0-9]*)"
)
_OF_RANK = re.compile(r"rank-(\d+)\..*")
_GROWING = (".blocks", ".log")
"""What only gets longer, unless it is another file by now."""
_CARRIED = ("events", "logs", "logs/outcomes", "profile")
_NOT_CARRIED = ".result"
"""A pickle for this machine's launcher."""


@dataclass(frozen=True)
class Address:
    """Where a home is, with the secret that opens it. Travels as a pickle, to this run's ranks alone."""

    host: str
    port: int
    token: str = field(repr=False)
    path: str
    """The run folder, as its owner calls it."""
    created: str
    """When, as its run.json says: a folder of that path that says otherwise is another one."""


class Home:
    """Serves the folder until it is closed."""

    def __init__(self, address: str, token: str, path: Path, created: str) -> None:
        self._folder = LocalFolder(path)
        self._connections: list[Connection] = []
        listener = listening(address, 0)
        self.address = Address(address, int(listener.getsockname()[1]), token, str(path.resolve()), created)
        self._door = Door(listener, Credential(token), 1, self._admit)

    def close(self) -> None:
        self._door.close()
        for connection in self._connections:
            connection.close()

    def _admit(self, connection: Connection, _seat: int) -> None:
        self._connections.append(connection)
        threading.Thread(target=self._serve, args=(connection,), name="syncline-home", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with contextlib.suppress(NotAFrame, OSError):
            while (received := connection.receive()) is not None:
                connection.send(*self._answer(*received))
        connection.close()

    def _answer(self, message: Message, payload: bytes) -> tuple[Message, bytes]:
        try:
            return self._done(message, payload)
        except OSError as error:
            return {"say": "failed", "errno": error.errno or errno.EIO, "words": error.strerror or str(error)}, b""
        except (KeyError, TypeError, ValueError):
            return {"say": "failed", "errno": errno.EINVAL, "words": "the request makes no sense"}, b""

    def _done(self, message: Message, payload: bytes) -> tuple[Message, bytes]:
        folder, what, name = self._folder, message["say"], _checked(message["name"])
        if what == "names":
            return {"say": "done", "names": folder.names(name)}, b""
        if what == "read":
            return {"say": "done"}, folder.read_piece(name, int(message["start"]), _PIECE_BYTES)
        if what == "write":
            folder.write_piece(name, int(message["start"]), payload)
        elif what == "rename":
            folder.rename(name, _checked(message["new"]))
        elif what == "remove":
            folder.remove(name)
        else:
            raise ValueError
        return {"say": "done"}, b""


def _checked(name: object) -> str:
    """It comes from the network: of the run folder, only what ranks write."""
    if not isinstance(name, str) or not _OURS.fullmatch(name):
        raise PermissionError(errno.EACCES, "no file of a rank")
    return name


class FarFolder:
    """A folder inside the run folder at home. One request at a time; a connection that broke is made again by the
    next one."""

    def __init__(self, address: Address, inside: str = "") -> None:
        self._address = address
        self._inside = inside
        self._connection: Connection | None = None
        self._asking = threading.Lock()

    @property
    def path(self) -> Path:
        return Path(self._address.path, self._inside)

    def names(self, inside: str = "") -> list[str]:
        return [str(name) for name in self._ask("names", inside)[0]["names"]]

    def read(self, name: str) -> bytes:
        whole = bytearray()
        while True:
            piece = self._ask("read", name, start=len(whole))[1]
            whole += piece
            if len(piece) < _PIECE_BYTES:
                return bytes(whole)

    def write(self, name: str, content: bytes | memoryview) -> None:
        above, _, last = name.rpartition("/")
        aside = f"{above}{'/' if above else ''}.{last}.{os.getpid()}"
        try:
            self.write_end(aside, 0, content)
            self.rename(aside, name)
        except OSError:
            with contextlib.suppress(OSError):
                self.remove(aside)  # on a full disk, it holds the room that is missing
            raise

    def write_end(self, name: str, start: int, content: bytes | memoryview) -> None:
        """The file's end, from `start` on."""
        view = memoryview(content)
        for begin in range(0, max(len(view), 1), _PIECE_BYTES):
            self._ask("write", name, bytes(view[begin : begin + _PIECE_BYTES]), start=start + begin)

    def rename(self, old: str, new: str) -> None:
        self._ask("rename", old, new=self._full(new))

    def remove(self, name: str) -> None:
        self._ask("remove", name)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def __del__(self) -> None:
        self.close()

    def _full(self, name: str) -> str:
        return "/".join(part for part in (self._inside, name) if part)

    def _ask(self, what: str, name: str, payload: bytes = b"", **more: object) -> tuple[Message, bytes]:
        with self._asking:
            if self._connection is None:
                self._connection = _connected(self._address)
            sent = self._connection.send({"say": what, "name": self._full(name), **more}, payload)
            received = self._connection.receive() if sent else None
            if received is None:
                self.close()
                raise ConnectionError(
                    errno.ECONNRESET, f"no answer from {self._address.host}, which has the run folder"
                )
        if received[0]["say"] == "failed":
            raise OSError(int(received[0]["errno"]), str(received[0]["words"]), str(self.path / name))
        return received


def _connected(address: Address, tries: int = 5) -> Connection:
    """Tries again where too many came at once."""
    connection = None
    try:
        connection = Connection(socket.create_connection((address.host, address.port), timeout=_PATIENCE_SECONDS))
        knock(connection, lambda: Credential(address.token, "the launcher"), 0)
    except (OSError, NotLetIn) as error:
        if connection is not None:
            connection.close()
        if tries > 1 and isinstance(error, NotLetIn) and error.may_pass:
            time.sleep(_PAUSE_SECONDS)
            return _connected(address, tries - 1)
        reason = getattr(error, "strerror", None) or error
        raise ConnectionError(
            errno.ECONNREFUSED, f"cannot reach {address.host} port {address.port}, which has the run folder: {reason}"
        ) from None
    connection.set_patience(_PATIENCE_SECONDS)
    return connection


@dataclass(frozen=True)
class _Sent:
    """A file as far as it is at home."""

    inode: int
    size: int
    changed: int


class Courier:
    """From `here` to the run folder at home, of the named ranks. What home has of them is fetched first: a rank that
    starts again goes on with its logs."""

    def __init__(self, here: Path, address: Address, ranks: Iterable[int]) -> None:
        self._here = here
        self._home = FarFolder(address)
        self._sent: dict[str, _Sent] = {}
        self._carrying = threading.Lock()
        self._ended = threading.Event()
        self._is_over = False
        self._fetch(set(ranks))
        threading.Thread(target=self._watch, name="syncline-courier", daemon=True).start()

    def carry(self, *, last: bool = False) -> None:
        """What is new. Raises OSError."""
        with self._carrying:
            if self._is_over:
                return  # the folder here may be gone, which is no reason to remove anything at home
            self._is_over = last
            found = dict(self._found())
            for name, status in found.items():
                self._send(name, status)
            for name in self._sent.keys() - found.keys():
                self._home.remove(name)
                del self._sent[name]

    def close(self) -> None:
        """The last round, then no more."""
        self._ended.set()
        try:
            self.carry(last=True)
        finally:
            self._home.close()

    def _watch(self) -> None:
        while not self._ended.wait(CARRY_SECONDS):
            with contextlib.suppress(OSError):  # if it lasts, the next checkpoint says so
                self.carry()

    def _fetch(self, ranks: set[int]) -> None:
        for folder in ("events", "logs"):
            for name in self._home.names(folder):
                match = _OF_RANK.fullmatch(name)
                if match and int(match[1]) in ranks:
                    content, path = self._home.read(f"{folder}/{name}"), self._here / folder / name
                    LocalFolder(path.parent).write(name, content)
                    status = path.stat()
                    self._sent[f"{folder}/{name}"] = _Sent(status.st_ino, status.st_size, status.st_mtime_ns)

    def _found(self) -> Iterator[tuple[str, os.stat_result]]:
        """A log before its tail, which continues it."""
        for folder in _CARRIED:
            for name in LocalFolder(self._here).names(folder):
                path = self._here / folder / name
                with contextlib.suppress(FileNotFoundError):
                    if not name.startswith(".") and path.is_file() and path.suffix != _NOT_CARRIED:
                        yield f"{folder}/{name}", path.stat()

    def _send(self, name: str, status: os.stat_result) -> None:
        before, path = self._sent.get(name), self._here / name
        if before == _Sent(status.st_ino, status.st_size, status.st_mtime_ns):
            return
        grew = before is not None and before.inode == status.st_ino and before.size <= status.st_size
        start = before.size if before is not None and grew and path.suffix in _GROWING else 0
        with contextlib.suppress(FileNotFoundError):
            content = LocalFolder(self._here).read_piece(name, start, status.st_size - start)
            self._home.write_end(name, start, content) if start else self._home.write(name, content)
            self._sent[name] = _Sent(status.st_ino, start + len(content), status.st_mtime_ns)
