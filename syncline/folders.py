"""A run's folder as ranks use it, wherever it is: names with slashes in, bytes out.

`LocalFolder` is on a file system that this process sees. launcher/home.py has the other one, which asks the owner of
the run. Both raise OSError.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from syncline.files import read_regular, write_atomic


class Folder(Protocol):
    @property
    def path(self) -> Path:
        """Where its owner has it; for messages."""

    def names(self, inside: str = "") -> list[str]:
        """Of what is there, in order; none where there is no such folder."""

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, content: bytes | memoryview) -> None:
        """Whole or not at all, and it survives a power cut. Makes the folders above it."""

    def rename(self, old: str, new: str) -> None:
        """Takes the place of what is there."""

    def remove(self, name: str) -> None:
        """A file, or a folder with all that is in it. That there is none is no error."""


@dataclass(frozen=True)
class LocalFolder:
    path: Path

    def names(self, inside: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self.path / inside))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(self, name: str) -> bytes:
        return read_regular(self.path / name)

    def write(self, name: str, content: bytes | memoryview) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)

    def rename(self, old: str, new: str) -> None:
        source, target = self.path / old, self.path / new
        if source.is_file():
            with source.open("rb") as file:
                os.fsync(file.fileno())
        else:
            shutil.rmtree(target, ignore_errors=True)
        source.replace(target)

    def remove(self, name: str) -> None:
        path = self.path / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def read_piece(self, name: str, start: int, length: int) -> bytes:
        with (self.path / name).open("rb") as file:
            file.seek(start)
            return file.read(length)

    def write_piece(self, name: str, start: int, content: bytes) -> None:
        """The file ends with it."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.truncate(start)
            file.seek(start)
            file.write(content)
