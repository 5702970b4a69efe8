"""Image files to pixels: what a sample shows follows from seed, epoch and number alone; every kind becomes RGB."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from image_folders import cut_short, picture
from PIL import Image

from syncline.workload.data.images import (
    Crops,
    draw_numbers,
    measure,
    middle_box,
    middle_image,
    random_box,
    train_image,
)


@pytest.mark.parametrize("size", [(1, 2), (2, 1), (5, 300), (300, 5), (333, 217), (500, 500)])
@pytest.mark.parametrize("crops", [Crops(), Crops(0.7, 8 / 7), Crops(1.0, 1.0)])
def test_random_part_lies_inside_and_is_not_empty(size: tuple[int, int], crops: Crops) -> None:
    for sample in range(200):
        left, top, right, bottom = random_box(*size, draw_numbers(1, 2, sample)[0], crops)
        assert 0 <= left < right <= size[0] + 1e-9
        assert 0 <= top < bottom <= size[1] + 1e-9


def test_random_parts_have_the_area_and_shape_asked_for() -> None:
    boxes = [random_box(400, 400, draw_numbers(0, 0, sample)[0], Crops(0.25, 2.0)) for sample in range(2000)]
    sides = np.array([(right - left, bottom - top) for left, top, right, bottom in boxes])
    shares = sides.prod(1) / 400**2
    assert 0.24 < shares.min() < 0.3
    assert 0.5 < np.median(shares) < 0.65
    assert sides[:, 0].min() / sides[:, 1].max() >= 0.25
    assert ((sides[:, 0] / sides[:, 1]).min(), (sides[:, 0] / sides[:, 1]).max()) == pytest.approx(
        (0.5, 2.0), rel=0.05
    )


def test_draws_differ_by_seed_epoch_and_sample_and_repeat() -> None:
    places = [(seed, epoch, sample) for seed in (0, 1, 2**63 - 1) for epoch in (0, 1) for sample in range(50)]
    numbers = {tuple(draw_numbers(*place)[0]) for place in places}
    assert len(numbers) == len(places)
    assert draw_numbers(5, 6, 7) == draw_numbers(5, 6, 7)
    assert 70 < sum(draw_numbers(*place)[1] for place in places) / len(places) * 200 < 130
    assert all(0 <= value < 1 for values in numbers for value in values)


def test_middle_is_the_middle() -> None:
    assert middle_box(256, 256) == (16, 16, 240, 240)
    assert middle_box(512, 256) == (144, 16, 368, 240)


def striped(path: Path, size: int = 400) -> Path:
    """Red in the left half, blue in the right."""
    pixels = np.zeros((size, size, 3), np.uint8)
    pixels[:, : size // 2, 0] = 255
    pixels[:, size // 2 :, 2] = 255
    Image.fromarray(pixels).save(path, quality=95)
    return path


@pytest.mark.parametrize("size", [8, 24, 96, 400])
def test_reduced_decoding_shows_the_same_picture(size: int, tmp_path: Path) -> None:
    """A JPEG that is decoded at an eighth of its size must be cut at the right place all the same."""
    image = middle_image(striped(tmp_path / "a.jpg"), size).astype(int)
    assert image.shape == (size, size, 3)
    assert (image[:, : size // 2 - 2, 0] > 200).all()
    assert (image[:, size // 2 + 2 :, 2] > 200).all()
    assert (image[:, size // 2 + 2 :, 0] < 50).all()


def test_flip_mirrors(tmp_path: Path) -> None:
    path = striped(tmp_path / "a.png")
    whole = Crops(1.0, 1.0)
    shown = {
        draw_numbers(0, 0, sample)[1]: train_image(path, 16, whole, seed=0, epoch=0, sample=sample)
        for sample in range(9)
    }
    assert np.array_equal(shown[True], shown[False][:, ::-1])
    assert not np.array_equal(shown[True], shown[False])


@pytest.mark.parametrize(
    ("mode", "suffix"), [("L", "jpg"), ("CMYK", "jpg"), ("P", "png"), ("RGBA", "png"), ("1", "png")]
)
def test_every_kind_becomes_rgb(mode: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{suffix}"
    picture(path, mode=mode, size=(50, 40))
    image = train_image(path, 12, Crops(), seed=0, epoch=0, sample=0)
    assert (image.shape, image.dtype) == ((12, 12, 3), np.uint8)
    if mode == "L":
        assert np.array_equal(image[:, :, 0], image[:, :, 2])
    assert measure(path) == (50, 40)


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_file_that_is_cut_short_is_found_out(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{suffix}"
    picture(path, size=(200, 200))
    cut_short(path)
    with pytest.raises(OSError, match=r"truncated|broken|cut"):
        measure(path)
