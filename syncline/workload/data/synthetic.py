"""Made images of CIFAR-10's shape, for machines without the data set and for quick tries.

Each class is a smooth coloured pattern. An image shows its class's pattern shifted, mixed with another
class's pattern and covered with noise: a small network learns it in a few dozen steps, not in one.
The images follow from the seed alone, so every rank makes the same set by itself.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from syncline.workload.data.images import ImageSet, Labels, Pixels

NUM_CLASSES = 10
SIZE = 32
MAX_SHIFT = 8
KNOTS = 6
CHUNK = 1000

Patterns = npt.NDArray[np.int16]


def synthetic_images(num_train: int = 10_000, num_test: int = 2_000, seed: int = 0) -> ImageSet:
    """The same seed gives the same patterns; training and test images differ in shift, mixture and noise."""
    patterns = _patterns(_stream(seed, 0))
    train_images, train_labels = _samples(patterns, num_train, _stream(seed, 1))
    test_images, test_labels = _samples(patterns, num_test, _stream(seed, 2))
    reference = _samples(patterns, CHUNK, _stream(seed, 1))[0] / 255.0
    return ImageSet(
        name="synthetic",
        source=f"Synthetic images (seed {seed}): {num_train:,} training and {num_test:,} test images.",
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
        num_classes=NUM_CLASSES,
        mean=tuple(float(value) for value in reference.mean(axis=(0, 2, 3))),
        deviation=tuple(float(value) for value in reference.std(axis=(0, 2, 3))),
    )


def _stream(seed: int, part: int) -> np.random.Generator:
    key = np.array([seed % 2**64, part], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def _patterns(stream: np.random.Generator) -> Patterns:
    """One pattern per class, between -64 and 64, with a margin on each side to shift within."""
    side = SIZE + 2 * MAX_SHIFT
    knots = stream.integers(-64, 65, size=(NUM_CLASSES, 3, KNOTS, KNOTS)).astype(np.float64)
    weights = _interpolation(side)
    smooth = np.zeros((NUM_CLASSES, 3, side, side))
    # Sums in a fixed order instead of a matrix product, whose rounding depends on the machine's library.
    for row, column in np.ndindex(KNOTS, KNOTS):
        smooth += np.outer(weights[:, row], weights[:, column]) * knots[:, :, row, column, None, None]
    return np.rint(smooth).astype(np.int16)


def _interpolation(side: int) -> npt.NDArray[np.float64]:
    """Weight of each knot at each position: linear between neighbours."""
    position = np.arange(side)[:, None] * (KNOTS - 1) / (side - 1)
    return np.maximum(0.0, 1.0 - np.abs(position - np.arange(KNOTS)))


def _samples(patterns: Patterns, count: int, stream: np.random.Generator) -> tuple[Pixels, Labels]:
    images = np.empty((count, 3, SIZE, SIZE), np.uint8)
    labels = np.empty(count, np.int64)
    for start in range(0, count, CHUNK):  # whole chunks, so that the first images do not depend on the count
        stop = min(start + CHUNK, count)
        chunk_images, chunk_labels = _chunk(patterns, stream)
        images[start:stop], labels[start:stop] = chunk_images[: stop - start], chunk_labels[: stop - start]
    return images, labels


def _chunk(patterns: Patterns, stream: np.random.Generator) -> tuple[Pixels, Labels]:
    labels = stream.integers(0, NUM_CLASSES, size=CHUNK)
    others = (labels + stream.integers(1, NUM_CLASSES, size=CHUNK)) % NUM_CLASSES
    shift = stream.integers(0, 2 * MAX_SHIFT + 1, size=(4, CHUNK))
    strength = stream.integers(4, 9, size=CHUNK).astype(np.int16)[:, None, None, None]
    other_strength = stream.integers(0, 5, size=CHUNK).astype(np.int16)[:, None, None, None]
    views = np.lib.stride_tricks.sliding_window_view(patterns, (SIZE, SIZE), axis=(2, 3))
    mixed = views[labels, :, shift[0], shift[1]] * strength
    mixed += views[others, :, shift[2], shift[3]] * other_strength
    mixed >>= 3
    noise = np.frombuffer(stream.bytes(mixed.size), np.uint8).reshape(mixed.shape)
    mixed += (noise >> 1) + np.uint8(64)  # a grey of 128 on average
    return np.clip(mixed, 0, 255).astype(np.uint8), labels.astype(np.int64)
