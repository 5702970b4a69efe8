"""A file that grows by blocks (see blocks.py) and loses little when its writer is killed.

Large blocks are small on disk and quick to read, but a slow run takes minutes to fill one. Until then its records
also go into a second file, the tail, as lines of JSON, which costs less than many small blocks. A tail counts as long
as the file ends where it ended when the tail was begun: once the large block is in the file, the tail says nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from syncline.blocks import HEAD, MARK, Record, body_at, encode
from syncline.files import read_regular, write_atomic

LARGE = 2048
"""Records: about a hundred steps."""


def tail_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.tail")


def read_content(path: Path) -> tuple[bytes, bytes]:
    """The blocks of a file, and the lines of its tail, which begins with the length of the file that it continues."""
    content = read_regular(path)
    with suppress(OSError, ValueError):
        begin, _, lines = read_regular(tail_of(path)).partition(b"\n")
        base = int(begin)
        if 0 <= base <= len(content) and body_at(content, base) is None:
            return content[:base], lines
    return content, b""


class BlockFile:
    """For one writer, and one thread at a time. What is there already stays, but for a last block cut short."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._tail_path = tail_of(path)
        if path.exists():
            blocks, lines = read_content(path)
            kept = encode([record for record in read_lines(lines) if record is not None]) if lines else b""
            write_atomic(path, _whole_blocks(blocks) + kept, durable=False)
        self._tail_path.unlink(missing_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._tail: int | None = None
        self._pending: list[Record] = []
        """What is in the tail, if anywhere."""

    def write(self, records: Sequence[Record]) -> None:
        self._pending += records
        if len(self._pending) >= LARGE:
            self._write_pending()
        elif records:
            if self._tail is None:
                self._tail = os.open(self._tail_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            is_first = os.fstat(self._tail).st_size == 0
            base = f"{os.fstat(self._file).st_size}\n" if is_first else ""
            _append(self._tail, (base + "\n".join(map(_line, records)) + "\n").encode())

    def close(self) -> None:
        try:
            self._write_pending()
            self._tail_path.unlink(missing_ok=True)
        finally:
            os.close(self._file)
            if self._tail is not None:
                os.close(self._tail)

    def _write_pending(self) -> None:
        if self._pending:
            _append(self._file, encode(self._pending))
            self._pending = []
            if self._tail is not None:
                os.ftruncate(self._tail, 0)


_line = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def read_lines(lines: bytes) -> Iterator[Record | None]:
    """Records that were written one a line; None for one that is cut short or damaged."""
    for line in lines.split(b"\n"):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        yield record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None


def _append(file: int, content: bytes) -> None:
    """All or nothing: half a block on a full disk would hide what follows it."""
    before, rest = os.fstat(file).st_size, memoryview(content)
    try:
        while rest:
            rest = rest[os.write(file, rest) :]
    except OSError:
        os.ftruncate(file, before)
        raise


def _whole_blocks(content: bytes) -> bytes:
    """Without what a crash left unfinished at the end. Damage before that is left for readers to step over."""
    at = 0
    while content.startswith(MARK, at) and at + HEAD.size <= len(content):
        _, length, _ = HEAD.unpack_from(content, at)
        if at + HEAD.size + length > len(content):
            return content[:at]
        at += HEAD.size + length
    return content[:at] if MARK.startswith(content[at : at + len(MARK)]) or len(content) - at < HEAD.size else content
