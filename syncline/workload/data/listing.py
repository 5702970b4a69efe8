"""The image files that a data set names, with their labels; and, kept in the user's cache, what was found in each."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from syncline.errors import DataError
from syncline.files import replacing
from syncline.workload.data.images import Labels

TEST_SHARE = 10
"""Where a data set has no test part of its own, one image in ten is kept for the test."""


@dataclass(frozen=True)
class Listing:
    kind: str
    folder: Path
    paths: Sequence[str]
    """Relative to the folder."""
    labels: Labels
    is_test: npt.NDArray[np.bool_]
    class_names: tuple[str, ...]
    dropped: dict[str, int]
    """How many images the data set's own description ruled out, by reason."""


def files_for_test(paths: Sequence[str]) -> npt.NDArray[np.bool_]:
    """One file in ten, at least one, by a hash of its path: the same ones wherever and whenever it is asked."""
    hashes = [hashlib.blake2b(os.fsencode(path), digest_size=8).digest() for path in paths]
    order = sorted(range(len(paths)), key=hashes.__getitem__)
    chosen = np.zeros(len(paths), np.bool_)
    chosen[order[: max(1, len(paths) // TEST_SHARE)]] = True
    return chosen


FORMAT = 1


@dataclass(frozen=True)
class Files:
    """Image files with labels. The paths are kept as one text: a million Python strings would be 100 MB."""

    text: bytes
    ends: npt.NDArray[np.int64]
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        start = int(self.ends[index - 1]) if index else 0
        return os.fsdecode(self.text[start : int(self.ends[index])])


@dataclass(frozen=True)
class Checked:
    """A listing and what was found out about each of its files."""

    listing: Listing
    stamps: npt.NDArray[np.int64]
    """Size in bytes and time of the last change in nanoseconds; -1 where there is no file."""
    findings: npt.NDArray[np.uint8]


def chosen_files(listing: Listing, chosen: npt.NDArray[np.bool_]) -> Files:
    names = [os.fsencode(listing.paths[index]) for index in np.flatnonzero(chosen).tolist()]
    ends = np.cumsum([len(name) for name in names], dtype=np.int64)
    return Files(b"".join(names), ends, listing.labels[chosen])


def index_place(kind: str, folder: Path, cache: Path) -> Path:
    name = hashlib.blake2b(f"{kind} {folder.resolve()}".encode(), digest_size=8).hexdigest()
    return cache / f"{kind}-{name}.npz"


def rotten_place(place: Path) -> Path:
    return place.with_suffix(".rotten")


def mark_rotten(place: Path, path: Path, relative: str) -> None:
    """Note that a file which was good cannot be read any more. Ranks append at the same time, a line each."""
    with contextlib.suppress(OSError), rotten_place(place).open("ab") as file:
        file.write(f"{_stamp(path)} ".encode() + os.fsencode(relative) + b"\n")


def rotten_files(place: Path, folder: Path) -> list[str]:
    """Those that were noted and have not been changed since."""
    try:
        lines = rotten_place(place).read_bytes().splitlines()
    except OSError:
        return []
    noted = {
        os.fsdecode(name): stamp.decode(errors="replace")
        for stamp, _, name in (line.partition(b" ") for line in lines)
    }
    return sorted(name for name, stamp in noted.items() if stamp == _stamp(folder / name))


def _stamp(path: Path) -> str:
    try:
        status = path.stat()
    except (OSError, ValueError):
        return ""
    return f"{status.st_size}/{status.st_mtime_ns}"


def load(place: Path) -> Checked | None:
    """What was kept, or None: a cache that cannot be read is as good as none."""
    try:
        with place.open("rb") as file, np.load(file, allow_pickle=False) as cache:
            about = json.loads(cache["about"].tobytes())
            if about["format"] != FORMAT:
                return None
            files = Files(cache["text"].tobytes(), cache["ends"], cache["labels"])
            listing = Listing(
                kind=about["kind"],
                folder=Path(about["folder"]),
                paths=[files.path(index) for index in range(len(files))],
                labels=files.labels,
                is_test=cache["is_test"],
                class_names=tuple(about["class_names"]),
                dropped=about["dropped"],
            )
            return Checked(listing, cache["stamps"], cache["found"])
    except Exception:
        return None


def save(place: Path, checked: Checked) -> None:
    listing = checked.listing
    files = chosen_files(listing, np.ones(len(listing.paths), np.bool_))
    about = {
        "format": FORMAT,
        "kind": listing.kind,
        "folder": str(listing.folder),
        "class_names": listing.class_names,
        "dropped": listing.dropped,
    }
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with replacing(place) as file:
            np.savez(
                file,
                about=np.frombuffer(json.dumps(about).encode(), np.uint8),
                text=np.frombuffer(files.text, np.uint8),
                ends=files.ends,
                labels=files.labels,
                is_test=listing.is_test,
                stamps=checked.stamps,
                found=checked.findings,
            )
    except OSError as error:
        action = "Free some space, or set XDG_CACHE_HOME to a folder that can be written."
        raise DataError(f"The cache {place.parent} cannot be written: {error}.", action=action) from error
