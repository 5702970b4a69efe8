"""IMDB-WIKI: faces of known people with their age, as published: a .mat table beside the images that it names.

The table is a MATLAB struct of shape (1, 1) called `wiki` or `imdb`. Of its fields these are read: dob (date of birth
as a MATLAB day number), photo_taken (a year), full_path (a cell of paths relative to the table), face_score (-inf
where no face was found) and second_face_score (nan where there is only one).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from syncline.errors import DataError
from syncline.workload.data.listing import TEST_SHARE, Listing

TABLES = {"wiki.mat": "wiki", "imdb.mat": "imdb"}
SUBFOLDERS = ("", "wiki_crop", "imdb_crop", "wiki", "imdb")
"""Where the published archives put the table, seen from the folder in which they were unpacked."""
FIELDS = ("dob", "photo_taken", "full_path", "face_score", "second_face_score")
MIN_FACE_SCORE = 1.0
MAX_AGE = 100
NO_AGE = -1
EPOCH_DAY = 719529
"""MATLAB's number of 1970-01-01; its day 1 is the first of January of the year 0."""
LAST_DAY = 3652424.0
"""The first of January 10000: a later birth is a typing error."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Table:
    """The columns of one .mat file, one entry per photo."""

    dob: Floats
    photo_taken: Floats
    full_path: list[str]
    face_score: Floats
    second_face_score: Floats


def find_tables(folder: Path) -> list[Path]:
    """The .mat files in the folder or where the published archives put them; nothing is read yet."""
    places = [folder / inner / name for inner in SUBFOLDERS for name in TABLES]
    return [place for place in places if place.is_file()]


def list_imdb_wiki(folder: Path) -> Listing:
    """Every photo that passes the usual filter; whether its file can be read is for others to find out."""
    tables = find_tables(folder)
    if not tables:
        raise DataError(
            f"{folder} holds no IMDB-WIKI: neither wiki.mat nor imdb.mat is in it.",
            action="Point --data-dir to the folder that holds the .mat file, such as wiki_crop.",
        )
    paths: list[str] = []
    labels: list[npt.NDArray[np.int64]] = []
    dropped: Counter[str] = Counter()
    for place in tables:
        table = read_table(place)
        age = ages(table.dob, table.photo_taken)
        keep, reasons = usual_filter(table, age)
        inside = place.parent.relative_to(folder)
        paths += [str(inside / table.full_path[index]) for index in np.flatnonzero(keep)]
        labels.append(age[keep])
        dropped.update(reasons)
    if not paths:
        causes = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
        raise DataError(
            f"No image of {folder} is left after the filter: {causes or 'the table is empty'}.",
            action="Check that the .mat file is the published one.",
        )
    return Listing(
        kind="imdb-wiki",
        folder=folder,
        paths=paths,
        labels=np.concatenate(labels),
        is_test=people_for_test(paths),
        class_names=tuple(str(age) for age in range(MAX_AGE + 1)),
        dropped=dict(dropped),
    )


def read_table(path: Path) -> Table:
    """The columns that are needed; DataError says what is missing."""
    from scipy.io import loadmat  # half a second, which only those who need it pay

    action = "Check that it is the published .mat file."
    try:
        content: dict[str, Any] = loadmat(path)
    except Exception as error:  # a damaged file can raise nearly anything
        raise DataError(f"{path} cannot be read as a MATLAB file: {error}.", action=action) from error
    name = TABLES[path.name]
    struct = content.get(name)
    if not isinstance(struct, np.ndarray) or struct.shape != (1, 1) or struct.dtype.names is None:
        held = ", ".join(key for key in content if not key.startswith("__")) or "nothing"
        raise DataError(f"{path} has no struct {name!r} of shape (1, 1); it holds {held}.", action=action)
    missing = [field for field in FIELDS if field not in struct.dtype.names]
    if missing:
        raise DataError(f"The struct {name!r} in {path} lacks {', '.join(missing)}.", action=action)
    columns = {field: struct[field][0, 0].ravel() for field in FIELDS}
    lengths = {field: len(column) for field, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"The fields of {path} differ in length: {lengths}.", action=action)
    names = [str(entry.item()) if entry.size == 1 else "" for entry in map(np.asarray, columns.pop("full_path"))]
    return Table(full_path=names, **{field: column.astype(np.float64) for field, column in columns.items()})


def mid_year(years: Floats) -> Floats:
    """The MATLAB day number of the first of July of each year, as `datenum(year, 7, 1)`."""
    july = (years.astype(np.int64) - 1970).astype("M8[Y]").astype("M8[M]") + 6
    days: Floats = july.astype("M8[D]").astype(np.float64) + EPOCH_DAY
    return days


def ages(dob: Floats, photo_taken: Floats) -> npt.NDArray[np.int64]:
    """Full years at the middle of the year of the photo; NO_AGE where the dates cannot be right.

    The publishers' own formula: the year of the date that the difference in days stands for when read as a date.
    """
    with np.errstate(invalid="ignore"):
        sensible = (dob >= 1) & (dob < LAST_DAY) & (photo_taken >= 1) & (photo_taken <= 9999)
    days = np.floor(mid_year(np.where(sensible, photo_taken, 1970.0)) - np.where(sensible, dob, 1.0))
    dates = (np.maximum(days, 1).astype(np.int64) - EPOCH_DAY).astype("M8[D]")
    years = dates.astype("M8[Y]").astype(np.int64) + 1970
    result: npt.NDArray[np.int64] = np.where(sensible & (days >= 0), years, NO_AGE)
    return result


def usual_filter(table: Table, age: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.bool_], dict[str, int]]:
    """Which photos show one clear face of a sensible age, and how many fell out, each under its first reason."""
    with np.errstate(invalid="ignore"):
        checks = {
            "without a clear face": ~(table.face_score >= MIN_FACE_SCORE),
            "with a second face": ~np.isnan(table.second_face_score),
            "with a bad date": age == NO_AGE,
            f"older than {MAX_AGE}": age > MAX_AGE,
        }
    keep = np.ones(len(age), np.bool_)
    reasons = {}
    for reason, is_bad in checks.items():
        if count := int((keep & is_bad).sum()):
            reasons[reason] = count
        keep &= ~is_bad
    return keep, reasons


def people_for_test(paths: list[str]) -> npt.NDArray[np.bool_]:
    """One person in ten, at least one, by a hash of the name: no face is both learnt and tested.

    A file is called PERSON_BIRTH_YEAR.jpg or PERSON_PHOTO_BIRTH_YEAR.jpg.
    """
    people = [Path(path).name.partition("_")[0] for path in paths]
    ordered = sorted(set(people), key=lambda person: hashlib.blake2b(person.encode(), digest_size=8).digest())
    chosen = set(ordered[: max(1, len(ordered) // TEST_SHARE)])
    return np.array([person in chosen for person in people], np.bool_)
