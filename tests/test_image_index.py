"""The index: only what changed is looked at again, ranks read what the launcher found, a spoilt cache is no harm."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from image_folders import class_folder, picture

from syncline.errors import DataError
from syncline.workload.data import image_index
from syncline.workload.data.file_batches import FileBatches
from syncline.workload.data.image_index import digest, read_index, update_index

Looked = list[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return class_folder(tmp_path / "set", {"train": {"a": 4, "b": 3}, "val": {"a": 2, "b": 2}})


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Looked:
    """The names of the files that were decoded."""
    names: Looked = []
    original = image_index.look_at

    def look_at(path: Path) -> int:
        names.append(f"{path.parent.name}/{path.name}")
        return original(path)

    monkeypatch.setattr(image_index, "look_at", look_at)
    return names


def test_second_time_nothing_is_decoded(folder: Path, cache: Path, looked: Looked) -> None:
    first, _ = update_index("folder", folder, cache)
    assert len(looked) == 11
    second, done = update_index("folder", folder, cache)
    assert len(looked) == 11
    assert "No file has changed" in done
    assert digest(first) == digest(second)
    assert first.source == second.source


def test_only_what_changed_is_looked_at_again(folder: Path, cache: Path, looked: Looked) -> None:
    first, _ = update_index("folder", folder, cache)
    looked.clear()
    (folder / "train" / "a" / "1.JPEG").write_text("spoilt")
    picture(folder / "train" / "b" / "9.JPEG", seed=99)
    (folder / "val" / "a" / "0.JPEG").unlink()
    index, _ = update_index("folder", folder, cache)
    assert sorted(looked) == ["a/1.JPEG", "b/9.JPEG"]
    assert (len(index.train), len(index.test), index.counts) == (7, 3, {"unreadable": 1})
    assert digest(index) != digest(first)
    assert digest(read_index("folder", folder, cache)) == digest(index)


def test_file_of_the_same_size_but_another_time_is_looked_at(folder: Path, cache: Path, looked: Looked) -> None:
    update_index("folder", folder, cache)
    looked.clear()
    os.utime(folder / "train" / "a" / "0.JPEG", ns=(1, 1))
    update_index("folder", folder, cache)
    assert looked == ["a/0.JPEG"]


def test_file_that_goes_missing_from_a_table_is_remembered_as_missing(tmp_path: Path, cache: Path) -> None:
    from image_folders import imdb_wiki_folder, odd_photos

    faces = imdb_wiki_folder(tmp_path / "faces", odd_photos(20))
    before, _ = update_index("imdb-wiki", faces, cache)
    (faces / before.train.path(3)).unlink()
    update_index("imdb-wiki", faces, cache)
    after = read_index("imdb-wiki", faces, cache)
    assert len(after.train) == len(before.train) - 1
    assert after.counts["missing"] == before.counts["missing"] + 1


def test_ranks_read_what_the_launcher_found_and_look_at_no_file(folder: Path, cache: Path, looked: Looked) -> None:
    index, _ = update_index("folder", folder, cache)
    looked.clear()
    (folder / "train" / "a" / "1.JPEG").write_text("spoilt in between")
    read = read_index("folder", folder, cache)
    assert (digest(read), looked) == (digest(index), [])


def test_rank_on_a_machine_without_the_cache_finds_the_same(folder: Path, tmp_path: Path) -> None:
    index, _ = update_index("folder", folder, tmp_path / "one")
    assert digest(read_index("folder", folder, tmp_path / "other")) == digest(index)


@pytest.mark.parametrize("damage", [b"", b"junk", None])
def test_damaged_cache_is_replaced(damage: bytes | None, folder: Path, cache: Path, looked: Looked) -> None:
    index, _ = update_index("folder", folder, cache)
    (kept,) = cache.iterdir()
    kept.write_bytes(kept.read_bytes()[:200] if damage is None else damage)
    looked.clear()
    again, _ = update_index("folder", folder, cache)
    assert (digest(again), len(looked)) == (digest(index), 11)
    assert list(cache.iterdir()) == [kept]


def test_cache_that_cannot_be_written_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="XDG_CACHE_HOME"):
        update_index("folder", folder, tmp_path / "file" / "cache")


def test_pipe_among_the_images_is_left_out_and_not_waited_for(folder: Path, cache: Path) -> None:
    os.mkfifo(folder / "train" / "a" / "pipe.png")
    index, _ = update_index("folder", folder, cache)
    assert len(index.train) == 7
    assert index.counts == {"unreadable": 1}


def test_image_that_rots_unnoticed_becomes_grey_is_marked_and_keeps_its_number(folder: Path, cache: Path) -> None:
    index, _ = update_index("folder", folder, cache)
    path = folder / index.test.path(1)
    before = path.stat()
    path.write_bytes(bytes(before.st_size))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    batches = FileBatches(index, size=8, seed=0, channels_last=False)
    with pytest.warns(UserWarning, match="was good and cannot be read now"):
        images, labels = batches.test(0, 4)
    assert images[1].abs().max() < 0.02
    assert images[0].abs().max() > 0.1
    assert torch.equal(batches.test(0, 4)[1], labels)  # and no second warning
    again, done = update_index("folder", folder, cache)
    assert "No file has changed" in done
    assert digest(again) == digest(index)
    assert f"Grey stands for {index.test.path(1)}, no longer readable" in again.source
    picture(path)
    assert "Grey" not in update_index("folder", folder, cache)[0].source
