"""Shows what ranks other than 0 write, line by line with the rank in front, while they run."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from syncline.launcher.outcome import output_files

_LOOK_SECONDS = 0.1


def following(log_dir: Path, workers: int) -> contextlib.AbstractContextManager[None]:
    """Of ranks whose output goes to files in that folder: all but rank 0."""
    return following_files(
        [(f"rank {rank}: ", path) for rank in range(workers) for path in output_files(log_dir, rank)]
    )


@contextlib.contextmanager
def following_files(files: Sequence[tuple[str, Path]]) -> Iterator[None]:
    """Each is a prefix and a file of a rank, its standard output if its name says so. Inside, a thread prints what
    comes; at the end nothing is left unsaid."""
    followed = [_Followed(prefix, path) for prefix, path in files]
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(_LOOK_SECONDS):
            for stream in followed:
                stream.show_lines()

    thread = threading.Thread(target=follow, name="syncline-following", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        for stream in followed:
            stream.show_lines(last=True)
            stream.close()


class _Followed:
    """One stream of one rank: the file in which it ends up. A file of an earlier run may still be there at first,
    and a rank that is replaced begins a new one."""

    def __init__(self, prefix: str, path: Path) -> None:
        self._prefix = prefix
        self._path = path
        self._is_stdout = "stdout" in path.name
        self._seen = _inode(path)
        self._file: BinaryIO | None = None
        self._rest = b""

    def show_lines(self, *, last: bool = False) -> None:
        inode = _inode(self._path)
        is_new = inode not in (None, self._seen)
        self._show(last or is_new)
        if is_new:
            self.close()
            self._seen = inode
            with contextlib.suppress(FileNotFoundError):  # put aside this very moment
                self._file = self._path.open("rb")
            self._show(last)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _show(self, last: bool) -> None:
        if self._file is None:
            return
        self._rest += self._file.read()
        cut = len(self._rest) if last else self._rest.rfind(b"\n") + 1
        whole, self._rest = self._rest[:cut], self._rest[cut:]
        stream = sys.stdout if self._is_stdout else sys.stderr
        if whole:
            text = whole.decode(errors="replace").removesuffix("\n").replace("\n", f"\n{self._prefix}")
            print(f"{self._prefix}{text}", file=stream, flush=True)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None
