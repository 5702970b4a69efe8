"""Images that stay in their files: each is decoded, cut and resized when its batch is made."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from syncline.workload.data.batches import Augment, sample_numbers
from syncline.workload.data.image_index import ImageIndex
from syncline.workload.data.images import Bytes, Crops, middle_image, train_image
from syncline.workload.data.listing import Files, mark_rotten
from syncline.workload.models import BUILDERS, usual_task
from syncline.workload.sharding import Shard
from syncline.workload.tasks import age_estimation, classification

MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)
"""Of ImageNet's pixels, per channel, scaled to 0..1: what photos are usually normalised with."""
GREY = tuple(round(255 * mean) for mean in MEAN)
"""What an image that rots becomes: nothing, once it is normalised."""
USUAL_SIZE = 224
CROPS = {"folder": Crops(), "imdb-wiki": Crops(least_area=0.7, widest=8 / 7)}
"""A face must stay a face; an object may be shown in part."""


def usual_image_size(model: str) -> int:
    """What a model is known for; ImageNet's usual size for a user's own."""
    return usual_task(model).input_shape[-1] if model in BUILDERS else USUAL_SIZE


class FileBatches:
    """Batches of an indexed folder, made in this process. Memory holds one batch at a time."""

    def __init__(self, index: ImageIndex, *, size: int, seed: int, channels_last: bool) -> None:
        shape = (3, size, size)
        is_age = index.kind == "imdb-wiki"
        self.task = age_estimation(shape) if is_age else classification(len(index.class_names), shape)
        self.source = index.source
        self._index = index
        self._crops = CROPS[index.kind]
        self._size = size
        self._seed = seed
        self._augment = Augment(MEAN, DEVIATION, channels_last=channels_last)
        self._dtype = torch.float32
        self._made_so_far = [0, 0.0]
        self._rotten: set[str] = set()

    def in_dtype(self, dtype: torch.dtype) -> Self:
        other = copy.copy(self)
        other._dtype = dtype
        return other

    @property
    def num_train(self) -> int:
        return len(self._index.train)

    @property
    def num_test(self) -> int:
        return len(self._index.test)

    def train(self, shard: Shard) -> tuple[Tensor, Tensor]:
        def one(path: Path, sample: int) -> Bytes:
            place = {"seed": self._seed, "epoch": shard.epoch, "sample": sample}
            return train_image(path, self._size, self._crops, **place)

        return self._made(self._index.train, sample_numbers(shard), one)

    def test(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        numbers = np.arange(start, min(stop, self.num_test))
        return self._made(self._index.test, numbers, lambda path, _: middle_image(path, self._size))

    def throughput(self) -> dict[str, Any]:
        """What was made so far in this process, and how fast."""
        made, busy_s = self._made_so_far
        return {"loaders": 0, "samples": made, "busy_s": busy_s, "samples_per_s": made / busy_s if busy_s else None}

    def _mark(self, name: str, error: Exception) -> None:
        """A file that was good when the folder was checked: a run that has come this far goes on without it. It keeps
        its number, so that all other samples keep theirs, also after a restart."""
        if name not in self._rotten:
            self._rotten.add(name)
            path = self._index.folder / name
            mark_rotten(self._index.place, path, name)
            warnings.warn(f"{path} was good and cannot be read now ({error}): grey stands for it", stacklevel=2)

    def _made(
        self, files: Files, numbers: npt.NDArray[np.int64], make: Callable[[Path, int], Bytes]
    ) -> tuple[Tensor, Tensor]:
        started = time.perf_counter()
        pixels = np.empty((len(numbers), self._size, self._size, 3), np.uint8)
        for place, number in enumerate(numbers.tolist()):
            name = files.path(number)
            try:
                pixels[place] = make(self._index.folder / name, number)
            except Exception as error:  # a damaged image can raise nearly anything
                pixels[place] = GREY
                self._mark(name, error)
        images = self._augment.test(pixels.transpose(0, 3, 1, 2))
        self._made_so_far[0] += len(numbers)
        self._made_so_far[1] += time.perf_counter() - started
        labels = torch.from_numpy(files.labels[numbers])
        return images.to(self._dtype), labels
