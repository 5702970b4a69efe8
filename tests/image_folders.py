"""Data sets of image files, made small: IMDB-WIKI in its published form with every oddity, and class folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy.io import savemat

NAN = float("nan")


def day_number(born: date) -> int:
    """MATLAB's: Python counts from the year 1, which is 366 days later."""
    return born.toordinal() + 366


def picture(
    path: Path, *, seed: int = 0, size: tuple[int, int] = (40, 30), mode: str = "RGB", **options: Any
) -> None:
    """A smooth picture of its own, so that a JPEG of it is small and still unlike the others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    knots = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(knots).resize(size, Image.Resampling.BICUBIC).convert(mode).save(path, **options)


def cut_short(path: Path) -> None:
    """What an interrupted download leaves."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@dataclass
class Photo:
    """One entry of the table and what lies at its path."""

    person: int
    born: date | float = date(1981, 5, 5)
    """A date, or a raw day number."""
    taken: float = 2009
    score: float = 3.5
    second_score: float = NAN
    file: str = "good"
    """good, grey, tiny (1x1), cut, text or none."""
    path: str = field(init=False)

    def __post_init__(self) -> None:
        born = self.born.isoformat() if isinstance(self.born, date) else "0000-00-00"
        self.path = f"{self.person % 100:02}/{self.person}_{born}_{self.taken:.0f}.jpg"

    def write(self, folder: Path) -> None:
        place = folder / self.path
        if self.file == "none":
            return
        size = (1, 1) if self.file == "tiny" else (40 + self.person % 7, 48)
        picture(place, seed=self.person, size=size, mode="L" if self.file == "grey" else "RGB")
        if self.file == "cut":
            cut_short(place)
        if self.file == "text":
            place.write_text("not an image")


def cell(values: Sequence[Any]) -> Any:
    """A MATLAB cell of one row."""
    made = np.empty((1, len(values)), object)
    for number, value in enumerate(values):
        made[0, number] = value
    return made


def write_table(path: Path, photos: Sequence[Photo], **changes: Any) -> None:
    """The .mat file as published; `changes` replaces fields, or leaves one out where it is None."""
    born = [day_number(photo.born) if isinstance(photo.born, date) else photo.born for photo in photos]
    fields = {
        "dob": np.array([born], np.float64),
        "photo_taken": np.array([[photo.taken for photo in photos]], np.float64),
        "full_path": cell([photo.path for photo in photos]),
        "gender": np.array([[1.0] * len(photos)]),
        "name": cell([f"Person {photo.person}" for photo in photos]),
        "face_location": cell([np.array([[1.0, 1.0, 40.0, 40.0]]) for _ in photos]),
        "face_score": np.array([[photo.score for photo in photos]], np.float64),
        "second_face_score": np.array([[photo.second_score for photo in photos]], np.float64),
        **changes,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, {path.stem: {name: value for name, value in fields.items() if value is not None}})


def odd_photos(num_good: int = 40) -> list[Photo]:
    """Good ones (one of them grey), then one or more of each oddity; COUNTS says what is to be left out."""
    good = [Photo(10000217 + 7 * number, date(1950 + number, 1 + number % 12, 5)) for number in range(num_good)]
    good[1].file = "grey"
    return [
        *good,
        Photo(1, score=-np.inf),
        Photo(2, score=0.99),
        Photo(3, score=NAN),
        Photo(4, second_score=1.2),
        Photo(5, second_score=-1.0),
        Photo(6, born=0.0),
        Photo(7, born=-5.0),
        Photo(8, born=NAN),
        Photo(9, born=date(2012, 1, 1)),  # born after the photo
        Photo(10, taken=0),
        Photo(11, born=date(1709, 1, 1)),  # 300 years
        Photo(12, file="none"),
        Photo(13, file="tiny"),
        Photo(14, file="tiny"),
        Photo(15, file="cut"),
        Photo(16, file="text"),
    ]


COUNTS = {
    "without a clear face": 3,
    "with a second face": 2,
    "with a bad date": 5,
    "older than 100": 1,
    "missing": 1,
    "unreadable": 2,
    "1x1 placeholders": 2,
}


def imdb_wiki_folder(folder: Path, photos: Sequence[Photo] | None = None, name: str = "wiki") -> Path:
    photos = odd_photos() if photos is None else photos
    for photo in photos:
        photo.write(folder)
    write_table(folder / f"{name}.mat", photos)
    return folder


def class_folder(folder: Path, parts: Mapping[str, Mapping[str, int]], suffix: str = ".JPEG") -> Path:
    """{"train": {"cat": 3}} makes train/cat/0.JPEG to 2.JPEG; the part "" stands for the folder itself."""
    seed = 0
    for part, classes in parts.items():
        for name, count in classes.items():
            (folder / part / name).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                seed += 1
                place = folder / part / name / f"{number}{suffix}"
                picture(place, seed=seed, size=(36 + seed % 5, 30 + seed % 9), format="JPEG")
    return folder
