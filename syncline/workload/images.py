"""ImageSet: labelled images in memory, the form in which every data source hands them over.

Pixels stay uint8 and channel-first until a batch is augmented: a quarter of the memory of float32, and the
bytes can be compared with the published ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

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
