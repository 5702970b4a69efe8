"""A folder of class folders in the layouts of ImageNet, Imagenette and Tiny-ImageNet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from image_folders import class_folder, picture

from syncline.errors import DataError
from syncline.workload.data.class_folders import list_class_folders
from syncline.workload.data.image_index import update_index


def tiny_imagenet(folder: Path) -> Path:
    """Its images lie in an `images` folder; the classes of val stand in a file; test has no labels."""
    class_folder(folder, {"train": {"n2/images": 3, "n1/images": 2}, "val": {"images": 3}, "test": {"images": 2}})
    (folder / "train" / "n1" / "n1_boxes.txt").write_text("n1_0.JPEG\t0\t0\t10\t10\n")
    lines = ["0.JPEG\tn2\t0\t0\t62\t57", "1.JPEG\tn1\t0\t0\t62\t57", "2.JPEG\tn2"]
    (folder / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    return folder


def test_classes_are_numbered_by_name(tmp_path: Path) -> None:
    class_folder(tmp_path, {"train": {"dog": 2, "cat": 1, "Eel": 1}, "val": {"cat": 1, "dog": 1}})
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / "train" / "LICENSE").write_text("not a class")
    (tmp_path / "train" / ".cache").mkdir()
    listing = list_class_folders(tmp_path)
    assert listing.class_names == ("Eel", "cat", "dog")
    assert list(listing.paths) == [
        *("train/Eel/0.JPEG", "train/cat/0.JPEG", "train/dog/0.JPEG", "train/dog/1.JPEG"),
        *("val/cat/0.JPEG", "val/dog/0.JPEG"),
    ]
    assert listing.labels.tolist() == [0, 1, 2, 2, 1, 2]
    assert listing.is_test.tolist() == [False] * 4 + [True] * 2


def test_tiny_imagenet_layout(tmp_path: Path) -> None:
    listing = list_class_folders(tiny_imagenet(tmp_path))
    assert listing.class_names == ("n1", "n2")
    assert listing.paths[0] == "train/n1/images/0.JPEG"
    assert list(listing.paths[5:]) == [f"val/images/{number}.JPEG" for number in range(3)]
    assert listing.labels.tolist() == [0, 0, 1, 1, 1, 1, 0, 1]
    assert listing.is_test.sum() == 3


@pytest.mark.parametrize("part", ["", "train"])
def test_without_a_test_part_one_image_in_ten_is_kept_for_it(part: str, tmp_path: Path) -> None:
    folder = class_folder(tmp_path, {part: {"a": 12, "b": 19}}, suffix=".jpg")
    listing = list_class_folders(folder)
    assert (len(listing.paths), listing.is_test.sum()) == (31, 3)
    assert np.array_equal(list_class_folders(folder).is_test, listing.is_test)


def test_broken_images_are_left_out_and_counted(tmp_path: Path) -> None:
    folder = class_folder(tmp_path / "set", {"train": {"a": 3, "b": 3}, "val": {"a": 2, "b": 1}})
    (folder / "train" / "a" / "1.JPEG").write_text("not an image")
    picture(folder / "val" / "a" / "1.JPEG", size=(1, 1), format="JPEG")
    index, _ = update_index("folder", folder, tmp_path / "cache")
    assert index.counts == {"unreadable": 1, "1x1 placeholders": 1}
    assert (len(index.train), len(index.test)) == (5, 2)
    assert [index.train.path(number) for number in range(2)] == ["train/a/0.JPEG", "train/a/2.JPEG"]
    assert "Images of 2 classes" in index.source


def nothing(folder: Path) -> None:
    folder.mkdir()


def one_class(folder: Path) -> None:
    class_folder(folder, {"": {"only": 3}})


def empty_class(folder: Path) -> None:
    class_folder(folder, {"train": {"a": 1, "b": 0}})


def unknown_class(folder: Path) -> None:
    class_folder(folder, {"train": {"a": 1, "b": 1}, "val": {"a": 1, "c": 1}})


def flat_validation(folder: Path) -> None:
    class_folder(folder, {"train": {"a": 1, "b": 1}, "": {"val": 2}})


def no_train(folder: Path) -> None:
    class_folder(folder, {"val": {"a": 1}, "test": {"a": 1}})


def odd_annotation(folder: Path) -> None:
    tiny_imagenet(folder)
    (folder / "val" / "val_annotations.txt").write_text("0.JPEG\tn2\nimage without class\n")


def only_broken(folder: Path) -> None:
    class_folder(folder, {"train": {"a": 1, "b": 1}, "val": {"a": 1}})
    for path in folder.rglob("*.JPEG"):
        path.write_text("not an image")


def nothing_to_test(folder: Path) -> None:
    class_folder(folder, {"train": {"a": 1, "b": 1}, "val": {"a": 1}})
    (folder / "val" / "a" / "0.JPEG").write_text("not an image")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda _: None, ["is not a folder"]),
        (nothing, ["one folder per class", "none", "--data-dir"]),
        (one_class, ["at least two", "only 'only'"]),
        (empty_class, ["train/b", "holds no image"]),
        (unknown_class, ["val/c", "does not have"]),
        (flat_validation, ["val", "no folder per class"]),
        (no_train, ["test, val", "no train"]),
        (odd_annotation, ["val_annotations.txt", "line 2", "image without class"]),
        (only_broken, ["no image that can be used", "3 unreadable"]),
        (nothing_to_test, ["no test image", "1 unreadable"]),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(make: Callable[[Path], None], words: list[str], tmp_path: Path) -> None:
    make(tmp_path / "set")
    with pytest.raises(DataError) as error:
        update_index("folder", tmp_path / "set", tmp_path / "cache")
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)
    assert "\n" not in str(error.value)
