"""Which of a data set's image files can be used: found out once, kept in the user's cache.

Every rank must know the same samples before the first batch, so that the global batch is the same at any world size.
The launcher brings the index up to date: it looks at the time and size of every file and decodes those that are new
or have changed. The ranks only read it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from syncline.errors import DataError
from syncline.machine import cores
from syncline.workload.data.class_folders import list_class_folders
from syncline.workload.data.images import Progress, measure
from syncline.workload.data.imdb_wiki import list_imdb_wiki
from syncline.workload.data.listing import (
    Checked,
    Files,
    Listing,
    chosen_files,
    index_place,
    load,
    rotten_files,
    save,
)

KINDS: dict[str, Callable[[Path], Listing]] = {"imdb-wiki": list_imdb_wiki, "folder": list_class_folders}
GOOD, MISSING, UNREADABLE, PLACEHOLDER = range(4)
FOUND = {MISSING: "missing", UNREADABLE: "unreadable", PLACEHOLDER: "1x1 placeholders"}
SHOW_EVERY_S = 0.2
AHEAD = 8
"""Files that each checking thread may be ahead of the last one reported, so that Ctrl-C is heard at once."""


@dataclass(frozen=True)
class ImageIndex:
    """What a run trains on and is tested on."""

    kind: str
    folder: Path
    source: str
    """One sentence for people: where the images are, how many there are, how many were left out and why."""
    train: Files
    test: Files
    class_names: tuple[str, ...]
    counts: dict[str, int]
    """Images left out, by reason."""
    place: Path
    """Where the index is kept, and beside it what went wrong with its files later."""


def update_index(kind: str, folder: Path, cache: Path, *, progress: Progress | None = None) -> tuple[ImageIndex, str]:
    """List the folder, check what is new or has changed, keep the result. The index, and what was done."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder.", action="Point --data-dir to the folder that holds the images.")
    listing = KINDS[kind](folder)
    place = index_place(kind, folder, cache)
    known = load(place)
    stamps = _stamps(listing)
    findings, changed = _still_true(known, listing, stamps)
    started = time.monotonic()
    _check(listing, changed, findings, progress)
    seconds = time.monotonic() - started
    checked = Checked(listing, stamps, findings)
    index = _usable(checked, place)
    if known is None or not _is_same(known, checked):
        save(place, checked)
    if not len(changed):
        return index, "No file has changed since it was checked."
    rate = len(changed) / max(seconds, 1e-9)
    return index, f"Checked {len(changed):,} files in {seconds:.1f} s, {rate:,.0f} a second."


def read_index(kind: str, folder: Path, cache: Path) -> ImageIndex:
    """What the launcher found; where it ran on another machine, the folder is checked here."""
    place = index_place(kind, folder, cache)
    known = load(place)
    return update_index(kind, folder, cache)[0] if known is None else _usable(known, place)


def digest(index: ImageIndex) -> bytes:
    """Eight bytes that are equal where the same samples stand in the same order, wherever the folder is."""
    summed = hashlib.blake2b(digest_size=8)
    for part in (index.train, index.test):
        for piece in (part.text, part.ends.tobytes(), part.labels.tobytes()):
            summed.update(piece)
    return summed.digest()


def _stamps(listing: Listing) -> npt.NDArray[np.int64]:
    stamps = np.full((len(listing.paths), 2), -1, np.int64)
    base = str(listing.folder)
    for index, path in enumerate(listing.paths):
        with contextlib.suppress(OSError):
            status = os.stat(os.path.join(base, path))
            stamps[index] = status.st_size, status.st_mtime_ns
    return stamps


def _still_true(
    known: Checked | None, listing: Listing, stamps: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.uint8], list[int]]:
    """What is known of each file, and which files have to be looked at."""
    findings = np.full(len(listing.paths), MISSING, np.uint8)
    before = (
        dict(zip(known.listing.paths, zip(known.stamps.tolist(), known.findings.tolist(), strict=True), strict=True))
        if known
        else {}
    )
    changed = []
    for index, (path, stamp) in enumerate(zip(listing.paths, stamps.tolist(), strict=True)):
        old_stamp, old_finding = before.get(path, (None, MISSING))
        if stamp == old_stamp:
            findings[index] = old_finding
        elif stamp[0] >= 0:
            changed.append(index)
    return findings, changed


def _check(listing: Listing, changed: list[int], findings: npt.NDArray[np.uint8], progress: Progress | None) -> None:
    """Decode each once. In threads: Pillow lets others run while it decodes."""
    num_threads = cores()
    shown = time.monotonic()
    with ThreadPoolExecutor(num_threads) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of what is odd but readable
        checks: deque[tuple[int, Future[int]]] = deque()
        waiting = iter(changed)
        done = 0
        while True:
            for index in waiting:
                checks.append((index, pool.submit(look_at, listing.folder / listing.paths[index])))
                if len(checks) >= AHEAD * num_threads:
                    break
            if not checks:
                return
            index, check = checks.popleft()
            findings[index] = check.result()
            done += 1
            if progress is not None and (time.monotonic() - shown > SHOW_EVERY_S or done == len(changed)):
                shown = time.monotonic()
                progress("checking images", done, len(changed), "images")


def look_at(path: Path) -> int:
    """Whether a file is an image that can be decoded to its end."""
    try:
        width, height = measure(path)
    except (FileNotFoundError, IsADirectoryError):
        return MISSING
    except Exception:  # a damaged image can raise nearly anything
        return UNREADABLE
    return PLACEHOLDER if width <= 1 and height <= 1 else GOOD


def _usable(checked: Checked, place: Path) -> ImageIndex:
    listing = checked.listing
    good = checked.findings == GOOD
    counts = dict(listing.dropped)
    for code, words in FOUND.items():
        if count := int((checked.findings == code).sum()):
            counts[words] = count
    train, test = (chosen_files(listing, good & part) for part in (~listing.is_test, listing.is_test))
    if not len(train) or not len(test):
        lacking = "image" if not good.any() else "test image" if len(train) else "training image"
        causes = ", ".join(f"{count:,} {reason}" for reason, count in counts.items())
        raise DataError(
            f"{listing.folder} has no {lacking} that can be used ({causes or 'too few images'}).",
            action="Check that the images lie where their list says.",
        )
    source = _describe(listing, len(train), len(test), counts)
    if rotten := rotten_files(place, listing.folder):
        others = f" and {len(rotten) - 1} more" if len(rotten) > 1 else ""
        source += f" Grey stands for {rotten[0]}{others}, no longer readable: replace or remove what is damaged."
    return ImageIndex(listing.kind, listing.folder, source, train, test, listing.class_names, counts, place)


def _describe(listing: Listing, num_train: int, num_test: int, counts: dict[str, int]) -> str:
    what = "IMDB-WIKI" if listing.kind == "imdb-wiki" else f"Images of {len(listing.class_names):,} classes"
    out = sum(counts.values())
    causes = ", ".join(f"{count:,} {reason}" for reason, count in counts.items())
    left_out = f"; {out:,} left out ({causes})" if out else ""
    return f"{what} from {listing.folder}: {num_train:,} training and {num_test:,} test images{left_out}."


def _is_same(known: Checked, checked: Checked) -> bool:
    before, now = known.listing, checked.listing
    return (
        list(before.paths) == list(now.paths)
        and (before.folder, before.class_names, before.dropped) == (now.folder, now.class_names, now.dropped)
        and np.array_equal(before.labels, now.labels)
        and np.array_equal(before.is_test, now.is_test)
        and np.array_equal(known.stamps, checked.stamps)
    )
