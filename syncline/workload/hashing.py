"""Numbers for a sample from (seed, epoch, sample) alone: a hash, not a generator that moves on."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]


def word(value: int) -> Words:
    return np.array([value % 2**64], dtype=np.uint64)


def mix(words: Words) -> Words:
    """The splitmix64 hash: neighbouring inputs give unrelated outputs. Arithmetic is modulo 2^64."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
