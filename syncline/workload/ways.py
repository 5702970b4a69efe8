"""What the ways of fetching share: how one fails, how much time is left, and reading a file of an archive."""

from __future__ import annotations

import tarfile
import time
from dataclasses import dataclass

from syncline.errors import DataError

POLL_S = 0.1


class WayFailed(Exception):
    """One way of getting the data did not work; the message is the cause."""


@dataclass(frozen=True)
class Clock:
    """How much of the caller's time limit is left."""

    limit_s: float | None
    started: float

    def left_s(self, at_most: float) -> float:
        """Seconds left, capped; DataError once the limit has passed."""
        if self.limit_s is None:
            return at_most
        left = self.started + self.limit_s - time.monotonic()
        if left <= 0:
            message = f"Fetching CIFAR-10 took longer than its limit of {self.limit_s:g} s."
            raise DataError(message, action="Run `syncline data cifar10` once, or use `--data synthetic`.")
        return min(left, at_most)


def member(archive: tarfile.TarFile, name: str) -> bytes:
    # Read in memory, never unpacked: no path in an archive can lead outside the cache.
    file = archive.extractfile(name)
    if file is None:
        raise KeyError(f"{name} is not a file")
    return file.read()
