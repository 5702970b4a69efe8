"""Reading CIFAR-10 folders: layouts, partial sets, damage, hostile pickles. Small made files, patched hashes."""

from __future__ import annotations

import hashlib
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from syncline.errors import DataError
from syncline.workload.data import cifar10
from syncline.workload.data.cifar10 import TEST_BATCH, TRAIN_BATCHES, find_folder, read_cifar10
from syncline.workload.data.images import ImageSet
from syncline.workload.data.sources import check_images, choose_images, load_images

BATCH = 3
Arrays = dict[str, np.ndarray]


def find_images(name: str, data_dir: Path | None) -> tuple[str, Path | None]:
    """What the launcher does before it starts ranks: choose, fetch if need be, check."""
    choice = choose_images(name, data_dir)
    check_images(choice)
    return choice.name, choice.folder


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.astype(np.uint8).tobytes()).hexdigest()


@pytest.fixture
def official(monkeypatch: pytest.MonkeyPatch) -> Arrays:
    """A tiny CIFAR-10 of three images per batch that counts as the official one."""
    random = np.random.default_rng(0)
    arrays: Arrays = {}
    for part, count in (("train", 5 * BATCH), ("test", BATCH)):
        arrays[f"{part}_images"] = random.integers(0, 256, size=(count, 3, 32, 32), dtype=np.uint8)
        arrays[f"{part}_labels"] = random.integers(0, 10, size=count, dtype=np.uint8)
    for name in arrays:
        monkeypatch.setitem(cifar10.WHOLE_SHA256, name, digest(arrays[name]))
    for name in (*TRAIN_BATCHES, TEST_BATCH):
        pixels, labels = batch_of(arrays, name)
        monkeypatch.setitem(cifar10.BATCH_SHA256, name, (digest(pixels), digest(labels)))
    return arrays


def batch_of(arrays: Arrays, name: str) -> tuple[np.ndarray, np.ndarray]:
    if name == TEST_BATCH:
        return arrays["test_images"], arrays["test_labels"]
    start = TRAIN_BATCHES.index(name) * BATCH
    return arrays["train_images"][start : start + BATCH], arrays["train_labels"][start : start + BATCH]


def old_pickle(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    """The opcodes of the official files, which Python 2 wrote."""
    raw = pixels.tobytes()
    listed = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    kind = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = b"K" + bytes([len(pixels)]) + b"M" + struct.pack("<H", 3072) + b"\x86"
    empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
    state = b"(K\x01" + shape + kind + b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
    return b"\x80\x02}(U\x06labels" + listed + b"U\x04data" + empty + state + b"u."


def new_pickle(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    return pickle.dumps({"data": pixels.reshape(len(pixels), 3072), "labels": labels.tolist()}, protocol=2)


def write_batches(folder: Path, arrays: Arrays, names: tuple[str, ...] = (*TRAIN_BATCHES, TEST_BATCH)) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(old_pickle(*batch_of(arrays, name)))
    return folder


def assert_same(images: ImageSet, arrays: Arrays, num_train: int = 5 * BATCH) -> None:
    np.testing.assert_array_equal(images.train_images, arrays["train_images"][:num_train])
    np.testing.assert_array_equal(images.train_labels, arrays["train_labels"][:num_train])
    np.testing.assert_array_equal(images.test_images, arrays["test_images"])
    np.testing.assert_array_equal(images.test_labels, arrays["test_labels"])
    assert images.train_images.dtype == images.test_images.dtype == np.uint8
    assert images.train_labels.dtype == images.test_labels.dtype == np.int64
    assert images.train_images.flags.writeable
    assert images.test_images.flags.writeable


@pytest.mark.parametrize("inside", ["", "cifar-10-batches-py"])
def test_reads_the_batches_folder_or_its_parent(official: Arrays, tmp_path: Path, inside: str) -> None:
    write_batches(tmp_path / inside, official)
    images = read_cifar10(tmp_path)
    assert_same(images, official)
    assert "15 training and 3 test images" in images.source


def test_reads_pickles_of_today_too(official: Arrays, tmp_path: Path) -> None:
    for name in (*TRAIN_BATCHES, TEST_BATCH):
        (tmp_path / name).write_bytes(new_pickle(*batch_of(official, name)))
    assert_same(read_cifar10(tmp_path), official)


def test_reads_the_arrays_of_the_cache(official: Arrays, tmp_path: Path) -> None:
    for name, array in official.items():
        np.save(tmp_path / f"{name}.npy", array)
    assert_same(read_cifar10(tmp_path), official)


def test_a_partial_folder_works_and_says_so(official: Arrays, tmp_path: Path) -> None:
    write_batches(tmp_path, official, ("data_batch_1", "data_batch_2", TEST_BATCH))
    images = read_cifar10(tmp_path)
    assert_same(images, official, num_train=2 * BATCH)
    assert "6 training (without data_batch_3, data_batch_4, data_batch_5)" in images.source


@pytest.mark.parametrize(
    ("names", "missing"),
    [(("data_batch_1",), "lacks test_batch"), ((TEST_BATCH,), "lacks every training batch")],
)
def test_a_folder_without_one_part_is_refused(
    official: Arrays, tmp_path: Path, names: tuple[str, ...], missing: str
) -> None:
    write_batches(tmp_path, official, names)
    with pytest.raises(DataError, match=missing):
        read_cifar10(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    assert find_folder(tmp_path) is None
    with pytest.raises(DataError, match="holds no CIFAR-10"):
        read_cifar10(tmp_path)


def damage(raw: bytes, how: str) -> bytes:
    return {
        "empty": b"",
        "truncated": raw[: len(raw) // 2],
        "one pixel": raw[:-100] + bytes([raw[-100] ^ 1]) + raw[-99:],
        "web page": b"<html>Not found</html>",
        "other object": pickle.dumps([1, 2, 3]),
        "other numbers": pickle.dumps({"data": np.zeros((3, 3072)), "labels": [0, 0, 0]}, protocol=2),
    }[how]


@pytest.mark.parametrize("how", ["empty", "truncated", "one pixel", "web page", "other object", "other numbers"])
def test_a_damaged_batch_is_named_with_what_to_do(official: Arrays, tmp_path: Path, how: str) -> None:
    path = write_batches(tmp_path, official) / "data_batch_4"
    path.write_bytes(damage(path.read_bytes(), how))
    with pytest.raises(DataError, match=r"data_batch_4.*Delete it and run `syncline data cifar10`"):
        read_cifar10(tmp_path)


def test_batches_under_wrong_names_are_refused(official: Arrays, tmp_path: Path) -> None:
    write_batches(tmp_path, official)
    (tmp_path / "data_batch_1").write_bytes((tmp_path / "data_batch_2").read_bytes())
    with pytest.raises(DataError, match=r"data_batch_1 \(pixels\) differs from the official"):
        read_cifar10(tmp_path)


@pytest.mark.parametrize("how", ["truncated", "other shape", "one label", "pickle"])
def test_a_damaged_array_is_named(official: Arrays, tmp_path: Path, how: str) -> None:
    for name, array in official.items():
        np.save(tmp_path / f"{name}.npy", array)
    path = tmp_path / "train_labels.npy"
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-4])
    elif how == "other shape":
        np.save(path, official["train_labels"][:, None])
    elif how == "one label":
        np.save(path, (official["train_labels"] + 1) % 10)
    else:
        np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"train_labels\.npy.*Delete it"):
        read_cifar10(tmp_path)


class Hostile:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, (f"touch {self.target}",))


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_runs_a_command_is_refused(official: Arrays, tmp_path: Path, protocol: int) -> None:
    write_batches(tmp_path, official)
    evil = {"data": Hostile(tmp_path / "ran"), "labels": []}
    (tmp_path / "data_batch_2").write_bytes(pickle.dumps(evil, protocol=protocol))
    with pytest.raises(DataError, match=r"data_batch_2 was refused: its pickle asks for (posix|nt)\.system"):
        read_cifar10(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_dotted_way_around_the_list_is_refused(official: Arrays, tmp_path: Path) -> None:
    write_batches(tmp_path, official)
    (tmp_path / "data_batch_2").write_bytes(b"\x80\x04\x8c\x05numpy\x8c\x0cndarray.dump\x93.")
    with pytest.raises(DataError, match=r"asks for numpy\.ndarray\.dump"):
        read_cifar10(tmp_path)


def test_data_dir_comes_before_the_variable(
    official: Arrays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write_batches(tmp_path / "whole", official)
    part = write_batches(tmp_path / "part", official, ("data_batch_1", TEST_BATCH))
    monkeypatch.setenv("SYNCLINE_DATA", str(part))
    for name in ("cifar10", "auto"):
        assert find_images(name, whole) == ("cifar10", whole.resolve())
        assert find_images(name, None) == ("cifar10", part.resolve())
    assert_same(load_images("cifar10", None), official, num_train=BATCH)
    assert "because it is here" in load_images("auto", whole).source


@pytest.mark.parametrize("name", ["cifar10", "auto"])
def test_a_named_folder_without_the_data_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"--data-dir .* the folder holds none"):
        load_images(name, tmp_path)
    monkeypatch.setenv("SYNCLINE_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"SYNCLINE_DATA .* no such folder"):
        find_images(name, None)


def test_find_images_reports_damage_before_ranks_start(official: Arrays, tmp_path: Path) -> None:
    (write_batches(tmp_path, official) / TEST_BATCH).write_bytes(b"")
    with pytest.raises(DataError, match=TEST_BATCH):
        find_images("auto", tmp_path)


def test_data_is_checked_without_loading_torch() -> None:
    code = "import sys, syncline.workload.data.sources; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.skipif("SYNCLINE_DATA" not in os.environ, reason="SYNCLINE_DATA names no folder with CIFAR-10")
def test_the_real_files_pass() -> None:
    images = load_images("cifar10", None)
    assert len(images.train_images) % 10_000 == 0
    assert len(images.test_images) == 10_000
    assert abs(images.train_images.mean() / 255 - np.mean(images.mean)) < 0.01
