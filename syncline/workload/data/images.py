"""Images: labelled ones in memory, and from an image file to pixels of one size. Loads no torch.

Pixels in memory stay uint8 and channel-first until a batch is augmented: a quarter of the memory of float32, and the
bytes can be compared with the published ones.

A file is decoded with Pillow, cut and resized. A training image is a random part of the picture, flipped or not,
scaled to the size asked for; which part follows from (seed, epoch, sample) through a hash, as in batches.py. A test
image is the middle of the picture. Greyscale, palette and other pictures become RGB.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from syncline.files import read_regular
from syncline.workload.sharding import mix, word

Pixels = npt.NDArray[np.uint8]
"""Images as [count, channel, row, column]."""

Labels = npt.NDArray[np.int64]


class Progress(Protocol):
    """Called with what is being done, how much of it so far and in total (None: unknown), and what is counted."""

    def __call__(self, what: str, done: int, total: int | None, unit: str = "bytes", /) -> None: ...


CIFAR10_MEAN = (125.3 / 255, 123.0 / 255, 113.9 / 255)
CIFAR10_DEVIATION = (63.0 / 255, 62.1 / 255, 66.7 / 255)


@dataclass(frozen=True)
class ImageSet:
    """A training and a test part. `mean` and `deviation` are per channel, for pixels scaled to 0..1."""

    name: str
    source: str
    """One sentence for people: where the images come from and how many there are."""
    train_images: Pixels
    train_labels: Labels
    test_images: Pixels
    test_labels: Labels
    num_classes: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __post_init__(self) -> None:
        for part, images, labels in (
            ("training", self.train_images, self.train_labels),
            ("test", self.test_images, self.test_labels),
        ):
            if len(images) != len(labels):
                raise ValueError(f"{self.name}: {len(images)} {part} images but {len(labels)} labels")


Box = tuple[float, float, float, float]
"""Left, top, right and bottom edge in pixels."""

Bytes = npt.NDArray[np.uint8]

TEST_MARGIN = 0.875
"""Of the shorter side a test image shows this much: 224 of 256 pixels."""
DRAWS = 4
"""Numbers that a sample needs: area, shape, place across, place down; the flip is one bit more."""


@dataclass(frozen=True)
class Crops:
    """How much of a picture a random part shows: a share of its area, and the bounds of width over height."""

    least_area: float = 0.08
    widest: float = 4 / 3


def draw_numbers(seed: int, epoch: int, sample: int) -> tuple[list[float], bool]:
    """Numbers from 0 to 1 for one sample, and whether to flip."""
    start = mix(mix(mix(word(seed)) + word(epoch)) + word(sample))
    words = mix(np.add(start, np.arange(DRAWS + 1, dtype=np.uint64), dtype=np.uint64))
    return [int(word >> np.uint64(11)) / 2**53 for word in words[:DRAWS]], bool(words[DRAWS] & np.uint64(1))


def random_box(width: int, height: int, numbers: list[float], crops: Crops) -> Box:
    """A part of a picture of the drawn area and shape, clipped to the picture."""
    area, shape, across, down = numbers
    pixels = width * height * (crops.least_area + (1 - crops.least_area) * area)
    ratio = math.exp((2 * shape - 1) * math.log(crops.widest))
    wide = min(float(width), math.sqrt(pixels * ratio))
    high = min(float(height), math.sqrt(pixels / ratio))
    left, top = across * (width - wide), down * (height - high)
    return left, top, left + wide, top + high


def middle_box(width: int, height: int) -> Box:
    side = min(width, height) * TEST_MARGIN
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def decode(path: Path, size: int, choose: Callable[[int, int], Box], *, flip: bool = False) -> Bytes:
    """The chosen part as [row, column, RGB] with `size` pixels a side. Raises what Pillow raises."""
    with Image.open(io.BytesIO(read_regular(path))) as image:
        width, height = image.size
        left, top, right, bottom = choose(width, height)
        # A JPEG can be decoded at a half, a quarter or an eighth of its size in much less time.
        shrink = min((right - left) / size, (bottom - top) / size)
        if shrink >= 2:
            image.draft("RGB", (math.ceil(width / shrink), math.ceil(height / shrink)))
        across, down = image.width / width, image.height / height
        box = (left * across, top * down, min(right * across, image.width), min(bottom * down, image.height))
        whole = image.convert("RGB") if image.mode != "RGB" else image
        part = whole.resize((size, size), Image.Resampling.BILINEAR, box=box, reducing_gap=2.0)
        if flip:
            part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.asarray(part)


def train_image(path: Path, size: int, crops: Crops, *, seed: int, epoch: int, sample: int) -> Bytes:
    numbers, flip = draw_numbers(seed, epoch, sample)
    return decode(path, size, lambda width, height: random_box(width, height, numbers, crops), flip=flip)


def middle_image(path: Path, size: int) -> Bytes:
    return decode(path, size, middle_box)


def measure(path: Path) -> tuple[int, int]:
    """Width and height, after decoding all of it once, if coarsely: a file that is cut short raises."""
    with Image.open(io.BytesIO(read_regular(path))) as image:
        size = image.size
        image.draft("L", (1, 1))
        image.load()
        return size
