"""A folder of class folders, the form of ImageNet, Imagenette and Tiny-ImageNet: the folder's name is the class.

train/<class>/…   and   val/<class>/… (or test, validation)
train/<class>/images/…   and   val/images/… with val/val_annotations.txt        Tiny-ImageNet
<class>/…                                                                       no test part: one image in ten
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from syncline.errors import DataError
from syncline.workload.data.listing import Listing, files_for_test

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm")
TEST_FOLDERS = ("val", "validation", "test")
ANNOTATIONS = "val_annotations.txt"

Labelled = list[tuple[str, int]]
"""Paths relative to the data set's folder, each with the number of its class."""


def list_class_folders(folder: Path) -> Listing:
    """All image files below the class folders; classes are numbered by their sorted names."""
    train_root = folder / "train" if (folder / "train").is_dir() else folder
    names = _classes(folder, train_root)
    numbers = {name: number for number, name in enumerate(names)}
    train = _labelled(folder, train_root, numbers)
    test = _test_part(folder, numbers) if train_root != folder else []
    paths = [path for path, _ in (*train, *test)]
    is_test = np.arange(len(paths)) >= len(train) if test else files_for_test(paths)
    return Listing(
        kind="folder",
        folder=folder,
        paths=paths,
        labels=np.array([label for _, label in (*train, *test)], np.int64),
        is_test=is_test,
        class_names=tuple(names),
        dropped={},
    )


def _classes(folder: Path, train_root: Path) -> list[str]:
    names = [entry.name for entry in _entries(train_root) if entry.is_dir()]
    if len(names) < 2:
        held = f"only {names[0]!r}" if names else "none"
        raise DataError(
            f"{train_root} should hold one folder per class, at least two, but holds {held}.",
            action="Point --data-dir to the folder that holds train and val, or the class folders themselves.",
        )
    if train_root == folder and set(names) & set(TEST_FOLDERS):
        raise DataError(
            f"{folder} holds {', '.join(sorted(set(names) & set(TEST_FOLDERS)))} but no train.",
            action="Name the folder with the training images train.",
        )
    return names


def _labelled(folder: Path, root: Path, numbers: dict[str, int]) -> Labelled:
    """The images below each class folder of `root`, in sorted order."""
    found: Labelled = []
    for entry in _entries(root):
        if not entry.is_dir():
            continue
        if entry.name not in numbers:
            raise DataError(
                f"{entry} is a class that {folder / 'train'} does not have.",
                action="Give both parts the same class folders.",
            )
        images = list(_images(entry))
        if not images:
            raise DataError(f"The class folder {entry} holds no image.", action="Fill it or remove it.")
        found += [(os.path.relpath(path, folder), numbers[entry.name]) for path in images]
    return found


def _test_part(folder: Path, numbers: dict[str, int]) -> Labelled:
    """The first test part that has labels; empty if there is none."""
    for name in TEST_FOLDERS:
        root = folder / name
        if (root / ANNOTATIONS).is_file():
            return _annotated(folder, root, numbers)
        if any(entry.is_dir() and entry.name in numbers for entry in _entries(root)):
            return _labelled(folder, root, numbers)
        if name != "test" and any(_images(root)):
            # The labels of ImageNet's 50,000 validation images are not in their names.
            raise DataError(
                f"{root} holds images but no folder per class, so their labels are not known.",
                action=f"Sort them into class folders, add {ANNOTATIONS}, or move {name} elsewhere.",
            )
    return []


def _annotated(folder: Path, root: Path, numbers: dict[str, int]) -> Labelled:
    """Tiny-ImageNet: lines of file name, class and the place of the object, separated by tabs."""
    found: Labelled = []
    for number, line in enumerate((root / ANNOTATIONS).read_text().splitlines(), start=1):
        name, _, rest = line.partition("\t")
        label = numbers.get(rest.partition("\t")[0].strip())
        if label is None:
            raise DataError(
                f"{root / ANNOTATIONS}, line {number}: {line!r} is not a file name and a class of train.",
                action="Check that the file is the published one.",
            )
        found.append((str((root / "images" / name).relative_to(folder)), label))
    return found


def _images(folder: Path) -> Iterator[str]:
    """Image files at any depth, in an order that does not depend on the file system."""
    for where, inner, files in os.walk(folder):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        for name in sorted(files):
            if name.lower().endswith(SUFFIXES) and not name.startswith("."):
                yield os.path.join(where, name)


def _entries(folder: Path) -> list[Path]:
    """What a folder holds, hidden names left out; nothing if it does not exist."""
    if not folder.is_dir():
        return []
    return [folder / name for name in sorted(os.listdir(folder)) if not name.startswith(".")]
