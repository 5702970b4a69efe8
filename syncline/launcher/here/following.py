"""Shows what ranks other than 0 write, line by line with the rank in front, while they run."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from syncline.launcher.outcome import output_files

_LOOK_SECONDS = 0.1


@contextlib.contextmanager
def following(log_dir: Path, workers: int) -> Iterator[None]:
    """Inside, a thread prints what comes; at the end nothing is left unsaid."""
    followed = [_Followed(rank, path) for rank in range(workers) for path in output_files(log_dir, rank)]
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


class _Followed:
    """One stream of one rank: the file in which it ends up. A file of an earlier run may still be there at first."""

    def __init__(self, rank: int, path: Path) -> None:
        self._prefix = f"rank {rank}: "
        self._path = path
        self._is_stdout = path.suffixes[-2] == ".stdout"
        self._old = _inode(path)
        self._read = 0

    def show_lines(self, *, last: bool = False) -> None:
        if _inode(self._path) in (None, self._old):
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new if last else new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        stream = sys.stdout if self._is_stdout else sys.stderr
        if whole:
            text = whole.decode(errors="replace").removesuffix("\n").replace("\n", f"\n{self._prefix}")
            print(f"{self._prefix}{text}", file=stream, flush=True)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None
