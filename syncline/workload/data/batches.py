"""Batches: from sample numbers to tensors on the CPU. What a source of data must give, and images in memory."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from syncline.workload.data.images import ImageSet, Pixels
from syncline.workload.sharding import Shard, mix, word
from syncline.workload.tasks import Task, classification


@dataclass(frozen=True)
class Augment:
    """Random crop, flip and normalisation of a whole batch at once.

    A sample's crop and flip follow from (seed, epoch, sample index) through a hash, not from a generator that
    moves on: at any world size, in any batch, after any restart, the sample is the same to the last bit.
    `mean` and `deviation` are per channel, for pixels scaled to 0..1.
    """

    mean: Sequence[float]
    deviation: Sequence[float]
    padding: int = 4
    seed: int = 0
    channels_last: bool = False
    """Give tensors in torch's channels_last memory format; the values are the same."""

    def train(
        self,
        images: Pixels | torch.Tensor,
        epoch: int,
        indices: npt.NDArray[np.int64] | torch.Tensor | Sequence[int],
    ) -> torch.Tensor:
        """Crop out of the zero-padded image, flip, normalise. `indices`: the samples' places in the set."""
        pixels = np.asarray(images)
        samples = np.asarray(indices, dtype=np.int64)
        if samples.shape != pixels.shape[:1]:
            raise ValueError(f"{len(pixels)} images but {len(samples)} sample indices")
        down, right, flip = draw(self.seed, epoch, samples, self.padding)
        return self._normalise(crop_and_flip(pixels, down, right, flip, self.padding))

    def test(self, images: Pixels | torch.Tensor) -> torch.Tensor:
        """Only normalise. The given images are not changed."""
        return self._normalise(np.asarray(images))

    def _normalise(self, pixels: Pixels) -> torch.Tensor:
        # Subtract, then multiply: each rounds once for each element, so that neither the place in the batch
        # nor the machine's vector width can change a bit. A fused multiply-add would not give that.
        shift = np.array([255 * value for value in self.mean], np.float32)
        scale = np.array([1 / (255 * value) for value in self.deviation], np.float32)
        if not self.channels_last:
            values = pixels.astype(np.float32, order="C")
            values -= shift[:, None, None]
            values *= scale[:, None, None]
            return torch.from_numpy(values)
        values = np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)).astype(np.float32)
        count, height, width, channels = values.shape
        # One image row at a time: numpy is slow where the innermost run is only the three channels long.
        rows = values.reshape(count, height, width * channels)
        rows -= np.tile(shift, width)
        rows *= np.tile(scale, width)
        return torch.from_numpy(values).permute(0, 3, 1, 2)


def draw(
    seed: int, epoch: int, samples: npt.NDArray[np.int64], padding: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Per sample: at which row and column of the padded image the crop starts, and whether to flip."""
    bits = mix(mix(mix(word(seed)) + word(epoch)) + samples.astype(np.uint64))
    places = np.uint64(2 * padding + 1)
    rest = bits >> np.uint64(1)
    down, right = rest % places, rest // places % places
    return down.astype(np.int64), right.astype(np.int64), (bits & np.uint64(1)).astype(np.bool_)


def crop_and_flip(
    pixels: Pixels,
    down: npt.NDArray[np.int64],
    right: npt.NDArray[np.int64],
    flip: npt.NDArray[np.bool_],
    padding: int,
) -> Pixels:
    """A new uint8 batch of the same shape; what lies outside an image is black."""
    count, channels, height, width = pixels.shape
    padded = np.zeros((count, channels, height + 2 * padding, width + 2 * padding), np.uint8)
    padded[:, :, padding : padding + height, padding : padding + width] = pixels
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
    cropped: Pixels = windows[np.arange(count), :, down, right]
    cropped[flip] = cropped[flip, :, :, ::-1]
    return cropped


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
