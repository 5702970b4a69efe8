"""Files that several processes read and write: each is whole or absent, and one process at a time holds a lock."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


def to_json(document: Any, *, indent: int | None = None) -> str:
    """JSON as others read it too, which knows no NaN and no infinity: null stands for them."""
    return json.dumps(_finite(document), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A file to write beside `path`. It takes the path's place at the end, or is removed if the block fails.

    A reader sees the old file or the new one, never half of it. `durable` ones survive a power cut.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write_atomic(path: Path, content: str | bytes | memoryview, *, durable: bool = True) -> None:
    with replacing(path, durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def read_regular(path: Path) -> bytes:
    """A file's content. A pipe or a device, which may never end, is refused like a file that is not there."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return file.read()


def is_locked(path: Path) -> bool:
    """Whether a process holds the file's lock."""
    try:
        # A pipe in its place must keep nobody waiting.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@contextmanager
def locked(path: Path, *, while_waiting: Callable[[], object] | None = None) -> Iterator[None]:
    """Hold the file's lock, which goes with the process however it ends.

    If another process holds it: BlockingIOError, or `while_waiting` is called again and again until it is free.
    """
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if while_waiting is None:
                    raise
                while_waiting()
        yield
