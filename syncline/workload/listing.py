"""Listing: the image files that a data set names, with their labels, before anyone has looked at the files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from syncline.workload.images import Labels

TEST_SHARE = 10
"""Where a data set has no test part of its own, one image in ten is kept for the test."""


@dataclass(frozen=True)
class Listing:
    kind: str
    folder: Path
    paths: Sequence[str]
    """Relative to the folder."""
    labels: Labels
    is_test: npt.NDArray[np.bool_]
    class_names: tuple[str, ...]
    dropped: dict[str, int]
    """How many images the data set's own description ruled out, by reason."""


def files_for_test(paths: Sequence[str]) -> npt.NDArray[np.bool_]:
    """One file in ten, at least one, by a hash of its path: the same ones wherever and whenever it is asked."""
    hashes = [hashlib.blake2b(os.fsencode(path), digest_size=8).digest() for path in paths]
    order = sorted(range(len(paths)), key=hashes.__getitem__)
    chosen = np.zeros(len(paths), np.bool_)
    chosen[order[: max(1, len(paths) // TEST_SHARE)]] = True
    return chosen
