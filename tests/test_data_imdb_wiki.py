"""IMDB-WIKI as published: dates, the usual filter, every oddity counted, people kept apart."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_folders import COUNTS, NAN, Photo, cell, day_number, imdb_wiki_folder, odd_photos, write_table
from scipy.io import savemat

from syncline.errors import DataError
from syncline.workload.data.image_index import update_index
from syncline.workload.data.imdb_wiki import (
    NO_AGE,
    Table,
    ages,
    list_imdb_wiki,
    mid_year,
    people_for_test,
    read_table,
    usual_filter,
)


def floats(*values: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array(values, np.float64)


@pytest.mark.parametrize("year", [1, 4, 1900, 1970, 2000, 2009, 9999])
def test_mid_year_is_the_first_of_july_as_matlab_counts(year: int) -> None:
    assert mid_year(floats(year)).tolist() == [day_number(date(year, 7, 1))]


def test_published_example_is_28_years_old() -> None:
    """17/10000217_1981-05-05_2009.jpg; its day number stands in wiki.mat."""
    assert day_number(date(1981, 5, 5)) == 723671
    assert ages(floats(723671), floats(2009)).tolist() == [28]


@pytest.mark.parametrize(
    ("born", "taken", "age"),
    [
        (date(2009, 7, 1), 2009, 0),  # on the day itself
        (date(2009, 6, 30), 2009, 0),
        (date(2009, 7, 2), 2009, NO_AGE),  # not born yet
        (date(2008, 7, 1), 2009, 0),  # 365 days: the publishers' year 0 is a leap year
        (date(2008, 6, 29), 2009, 1),
        (date(1909, 1, 1), 2009, 100),
        (date(1908, 1, 1), 2009, 101),
        (date(1709, 1, 1), 2009, 300),
    ],
)
def test_age_is_the_year_of_the_difference(born: date, taken: int, age: int) -> None:
    assert ages(floats(day_number(born)), floats(taken)).tolist() == [age]


@pytest.mark.parametrize("dob", [0, -1, -1e9, 1e9, NAN, float("inf"), float("-inf")])
def test_impossible_day_numbers_give_no_age(dob: float) -> None:
    assert ages(floats(dob, 723671), floats(2009, 2009)).tolist() == [NO_AGE, 28]


@pytest.mark.parametrize("taken", [0, -3, 10000, NAN, float("inf")])
def test_impossible_years_give_no_age(taken: float) -> None:
    assert ages(floats(723671), floats(taken)).tolist() == [NO_AGE]


def test_fractions_of_a_day_count_and_nothing_gives_nothing() -> None:
    noon = day_number(date(2009, 7, 1)) + 0.5
    assert ages(floats(noon), floats(2009)).tolist() == [NO_AGE]
    assert ages(floats(), floats()).tolist() == []


def table(score: float = 3.0, second: float = NAN) -> Table:
    return Table(floats(723671), floats(2009), ["a.jpg"], floats(score), floats(second))


@pytest.mark.parametrize(
    ("score", "second", "age", "reason"),
    [
        (1.0, NAN, 0, None),
        (np.inf, NAN, 100, None),
        (0.999, NAN, 30, "without a clear face"),
        (-np.inf, NAN, 30, "without a clear face"),
        (NAN, NAN, 30, "without a clear face"),
        (2.0, 0.0, 30, "with a second face"),
        (2.0, -np.inf, 30, "with a second face"),
        (2.0, NAN, NO_AGE, "with a bad date"),
        (2.0, NAN, 101, "older than 100"),
        (-np.inf, 2.0, 300, "without a clear face"),  # only the first reason is counted
    ],
)
def test_filter_keeps_one_clear_face_of_a_sensible_age(
    score: float, second: float, age: int, reason: str | None
) -> None:
    keep, reasons = usual_filter(table(score, second), np.array([age]))
    assert (keep.tolist(), reasons) == ([reason is None], {reason: 1} if reason else {})


def test_filter_of_nothing_is_nothing() -> None:
    keep, reasons = usual_filter(Table(floats(), floats(), [], floats(), floats()), np.array([], np.int64))
    assert (len(keep), reasons) == (0, {})


@pytest.mark.parametrize("num_people", [1, 2, 9, 10, 30, 31])
def test_no_person_is_both_learnt_and_tested(num_people: int) -> None:
    paths = [f"{n % 7:02}/nm{person}_rm{n}_1950-1-1_2000.jpg" for person in range(num_people) for n in range(3)]
    is_test = people_for_test(paths)
    assert is_test.sum() == 3 * max(1, num_people // 10)
    people = [Path(path).name.partition("_")[0] for path in paths]
    assert not {p for p, t in zip(people, is_test, strict=True) if t} & {
        p for p, t in zip(people, is_test, strict=True) if not t
    }
    backwards = people_for_test(paths[::-1])[::-1]
    assert np.array_equal(is_test, backwards), "the order of the table must not matter"


def test_every_oddity_is_counted_and_the_rest_loads(tmp_path: Path) -> None:
    folder = imdb_wiki_folder(tmp_path / "wiki_crop")
    seen: list[tuple[str, int, int | None, str]] = []
    index, done = update_index("imdb-wiki", folder, tmp_path / "cache", progress=lambda *report: seen.append(report))
    assert index.counts == COUNTS
    assert (len(index.train), len(index.test)) == (36, 4)
    assert f"{sum(COUNTS.values())} left out" in index.source
    assert "Checked 44 files" in done
    assert seen[-1] == ("checking images", 44, 44, "images")
    expected = {photo.path: photo for photo in odd_photos()[:40]}
    for files in (index.train, index.test):
        for number in range(len(files)):
            photo = expected.pop(files.path(number))
            assert isinstance(photo.born, date)
            assert files.labels[number] == ages(floats(day_number(photo.born)), floats(photo.taken))[0]
    assert expected == {}


@pytest.mark.parametrize("inner", ["", "wiki_crop", "imdb_crop"])
@pytest.mark.parametrize("name", ["wiki", "imdb"])
def test_table_is_found_where_the_archives_put_it(inner: str, name: str, tmp_path: Path) -> None:
    imdb_wiki_folder(tmp_path / inner, odd_photos(20), name=name)
    index, _ = update_index("imdb-wiki", tmp_path, tmp_path / "cache")
    assert len(index.train) + len(index.test) == 20
    assert (tmp_path / index.train.path(0)).is_file()


def test_both_tables_are_one_set(tmp_path: Path) -> None:
    imdb_wiki_folder(tmp_path / "wiki_crop", odd_photos(20))
    imdb_wiki_folder(tmp_path / "imdb_crop", odd_photos(20), name="imdb")
    listing = list_imdb_wiki(tmp_path)
    assert len(listing.paths) == len(set(listing.paths)) == 2 * 25
    assert listing.dropped == {reason: 2 * count for reason, count in list(COUNTS.items())[:4]}


def no_table(folder: Path) -> None:
    folder.mkdir()


def not_matlab(folder: Path) -> None:
    folder.mkdir()
    (folder / "wiki.mat").write_text("dob,photo_taken\n")


def empty_file(folder: Path) -> None:
    folder.mkdir()
    (folder / "wiki.mat").touch()


def no_struct(folder: Path) -> None:
    folder.mkdir()
    savemat(folder / "wiki.mat", {"imdb": {"dob": 1.0}})


def no_struct_but_numbers(folder: Path) -> None:
    folder.mkdir()
    savemat(folder / "wiki.mat", {"wiki": np.zeros((1, 1))})


def no_scores(folder: Path) -> None:
    write_table(folder / "wiki.mat", odd_photos(), face_score=None)


def short_column(folder: Path) -> None:
    write_table(folder / "wiki.mat", odd_photos(), dob=np.array([[1.0, 2.0]]))


def nothing_passes(folder: Path) -> None:
    imdb_wiki_folder(folder, [Photo(1, score=-np.inf), Photo(2, born=-1.0)])


def empty_table(folder: Path) -> None:
    write_table(folder / "wiki.mat", [])


def no_files(folder: Path) -> None:
    write_table(folder / "wiki.mat", odd_photos())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (no_table, ["neither wiki.mat nor imdb.mat", "--data-dir"]),
        (not_matlab, ["wiki.mat", "cannot be read as a MATLAB file"]),
        (empty_file, ["wiki.mat", "cannot be read as a MATLAB file"]),
        (no_struct, ["no struct 'wiki'", "it holds imdb"]),
        (no_struct_but_numbers, ["no struct 'wiki'"]),
        (no_scores, ["lacks face_score"]),
        (short_column, ["differ in length", "'dob': 2"]),
        (nothing_passes, ["left after the filter", "1 without a clear face", "1 with a bad date"]),
        (empty_table, ["left after the filter", "empty"]),
        (no_files, ["no image that can be used", "45 missing", "list says"]),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(make: Callable[[Path], None], words: list[str], tmp_path: Path) -> None:
    make(tmp_path / "faces")
    with pytest.raises(DataError) as error:
        update_index("imdb-wiki", tmp_path / "faces", tmp_path / "cache")
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "cache").exists()


def test_path_that_is_empty_counts_as_missing(tmp_path: Path) -> None:
    photos = odd_photos(20)
    imdb_wiki_folder(tmp_path, photos)
    paths: list[Any] = [photo.path for photo in photos]
    paths[0] = np.array([], dtype="<U1")
    write_table(tmp_path / "wiki.mat", photos, full_path=cell(paths))
    index, _ = update_index("imdb-wiki", tmp_path, tmp_path / "cache")
    assert index.counts["missing"] == 2
    assert read_table(tmp_path / "wiki.mat").full_path[0] == ""
