"""Files that several processes read and write: each is whole or absent, and one process at a time holds a lock."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


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
