"""Which images a run trains on and where they are: decides between folder, cache and fetch.

The launcher calls `choose_images` once: it fetches if need be and checks every byte, or brings the index of a folder
of images up to date. The ranks then load from the folder that it returned, and never fetch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from syncline.errors import DataError
from syncline.workload.data.cifar10 import find_folder, read_cifar10
from syncline.workload.data.fetch import fetch_cifar10, user_cache
from syncline.workload.data.image_index import KINDS, ImageIndex, read_index, update_index
from syncline.workload.data.images import ImageSet, Progress
from syncline.workload.data.synthetic import synthetic_images

DATA_NAMES = ("cifar10", "synthetic", "auto", *KINDS)
DATA_VARIABLE = "SYNCLINE_DATA"
AUTO_TIME_LIMIT_S = 20.0


@dataclass(frozen=True)
class Choice:
    """Which data set was chosen, the folder to read it from (None for made images), and why this one."""

    name: str
    folder: Path | None
    why: str = ""


def load_images(name: str, data_dir: Path | None, *, progress: Progress | None = None) -> ImageSet:
    """The images in memory, verified. `source` says where they come from, for "auto" also why these."""
    return _load(choose_images(name, data_dir, progress=progress))


def _load(choice: Choice) -> ImageSet:
    images = synthetic_images() if choice.folder is None else read_cifar10(choice.folder)
    return replace(images, source=f"{images.source} {choice.why}") if choice.why else images


def check_images(choice: Choice) -> str:
    """Read it once, so that a damaged file is reported before any rank starts; the sentence on the data."""
    if choice.name in KINDS and choice.folder is not None:
        return f"{load_index(choice.name, choice.folder).source} {choice.why}"
    return _load(choice).source


def load_index(name: str, folder: Path) -> ImageIndex:
    """Which files of a folder can be used, as the launcher found."""
    return read_index(name, folder, index_cache())


def index_cache() -> Path:
    """Where indexes of folders stay: beside the fetched data."""
    return user_cache().parent / "indexes"


def choose_images(name: str, data_dir: Path | None, *, progress: Progress | None = None) -> Choice:
    """Decide, and fetch if need be. A folder that the user named is used or refused, never passed over."""
    if name not in DATA_NAMES:
        raise DataError(f"unknown data set {name!r}.", action=f"Choose one of {', '.join(DATA_NAMES)}.")
    if name == "synthetic":
        return Choice("synthetic", None)
    if name in KINDS:
        if data_dir is None:
            raise DataError(f"Data {name} needs a folder.", action="Give it with --data-dir.")
        place = data_dir.expanduser().resolve()
        return Choice(name, place, update_index(name, place, index_cache(), progress=progress)[1])
    folder = _folder_at_hand(data_dir)
    if folder is not None:
        return Choice("cifar10", folder, "Chosen because it is here." if name == "auto" else "")
    if name == "cifar10":
        return Choice("cifar10", fetch_cifar10(user_cache(), progress=progress).resolve())
    try:
        folder = fetch_cifar10(user_cache(), progress=progress, time_limit_s=AUTO_TIME_LIMIT_S)
    except DataError as error:
        return Choice("synthetic", None, f"Chosen because CIFAR-10 is not here: {error.message}")
    return Choice("cifar10", folder.resolve(), "Chosen because it could be fetched.")


def _folder_at_hand(data_dir: Path | None) -> Path | None:
    """The user's folder, the variable's folder or the filled cache, in this order."""
    if data_dir is not None:
        return _required_folder(data_dir, f"--data-dir {data_dir}")
    if variable := os.environ.get(DATA_VARIABLE):
        return _required_folder(Path(variable), f"The environment variable {DATA_VARIABLE} ({variable})")
    cached = find_folder(user_cache())
    return cached.resolve() if cached is not None else None


def _required_folder(folder: Path, described: str) -> Path:
    found = find_folder(folder.expanduser())
    if found is None:
        cause = "the folder holds none" if folder.expanduser().is_dir() else "there is no such folder"
        raise DataError(
            f"{described} does not lead to CIFAR-10: {cause}.",
            action="Point it to the folder that holds cifar-10-batches-py, or leave it out to use the cache.",
        )
    return found.resolve()
