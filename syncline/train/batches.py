"""Batches: from sample numbers to tensors on the device."""

from __future__ import annotations

import copy

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from syncline.workload.augment import Augment
from syncline.workload.images import ImageSet
from syncline.workload.sharding import Shard


class Batches:
    """A rank's view of an image set in memory."""

    def __init__(self, images: ImageSet, *, seed: int, device: torch.device, channels_last: bool) -> None:
        self._images = images
        self._augment = Augment(images.mean, images.deviation, seed=seed, channels_last=channels_last)
        self._device = device
        self._dtype = torch.float32

    def in_dtype(self, dtype: torch.dtype) -> Batches:
        """The same batches, with images of another floating-point type."""
        other = copy.copy(self)
        other._dtype = dtype
        return other

    @property
    def num_test(self) -> int:
        return len(self._images.test_labels)

    def train(self, shard: Shard) -> tuple[Tensor, Tensor]:
        """The shard's images, augmented, and labels.

        An empty shard gets two stand-ins: it must still take part in the step, with weight 0. Two, because batch norm
        cannot take one; and none would make the loss NaN.
        """
        indices = shard.indices if len(shard.indices) else np.zeros(2, dtype=np.int64)
        images = self._augment.train(self._images.train_images[indices], shard.epoch, indices)
        return self._to_device(images, self._images.train_labels[indices])

    def test(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        images = self._augment.test(self._images.test_images[start:stop])
        return self._to_device(images, self._images.test_labels[start:stop])

    def _to_device(self, images: Tensor, labels: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        return images.to(self._device, self._dtype), torch.from_numpy(labels).to(self._device)
