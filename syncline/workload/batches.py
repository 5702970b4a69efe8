"""Batches: from sample numbers to tensors on the CPU. What a source of data must give, and images in memory."""

from __future__ import annotations

import copy
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from syncline.workload.augment import Augment
from syncline.workload.images import ImageSet
from syncline.workload.sharding import Shard
from syncline.workload.tasks import Task, classification


class Batches(Protocol):
    """A rank's view of a data set. A sample follows from (seed, epoch, its number) alone, never from the rank."""

    @property
    def task(self) -> Task: ...
    @property
    def source(self) -> str:
        """One sentence for people: where the data comes from and how much there is."""

    @property
    def num_train(self) -> int: ...
    @property
    def num_test(self) -> int: ...

    def train(self, shard: Shard) -> tuple[Tensor, Tensor]:
        """The shard's inputs, augmented, and targets.

        An empty shard gets two stand-ins (see `sample_numbers`).
        """

    def test(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Test samples start to stop, or to the last one."""

    def in_dtype(self, dtype: torch.dtype) -> Batches:
        """The same batches, with floating-point inputs of another type."""


def device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def on_device(batch: tuple[Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Where the model is. From pinned memory the copy runs beside what the GPU is doing."""
    inputs, targets = batch
    return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


def sample_numbers(shard: Shard) -> npt.NDArray[np.int64]:
    """The shard's samples; two stand-ins for an empty one, which must still take part in the step, with weight 0.

    Two, because batch norm cannot take one; and none would make the loss NaN.
    """
    return shard.indices if len(shard.indices) else np.zeros(2, dtype=np.int64)


class ImageBatches:
    """An image set in memory."""

    def __init__(self, images: ImageSet, *, seed: int, channels_last: bool, task: Task | None = None) -> None:
        shape = tuple(int(size) for size in images.train_images.shape[1:])
        self.task = task or classification(images.num_classes, shape)
        self._images = images
        self._augment = Augment(images.mean, images.deviation, seed=seed, channels_last=channels_last)
        self._dtype = torch.float32

    def in_dtype(self, dtype: torch.dtype) -> Self:
        other = copy.copy(self)
        other._dtype = dtype
        return other

    @property
    def source(self) -> str:
        return self._images.source

    @property
    def num_train(self) -> int:
        return len(self._images.train_labels)

    @property
    def num_test(self) -> int:
        return len(self._images.test_labels)

    def train(self, shard: Shard) -> tuple[Tensor, Tensor]:
        indices = sample_numbers(shard)
        images = self._augment.train(self._images.train_images[indices], shard.epoch, indices)
        return images.to(self._dtype), torch.from_numpy(self._images.train_labels[indices])

    def test(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        images = self._augment.test(self._images.test_images[start:stop])
        return images.to(self._dtype), torch.from_numpy(self._images.test_labels[start:stop])
