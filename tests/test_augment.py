"""Augmentation against a slow loop over samples, and its independence of the batch a sample is in."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from syncline.workload.data.batches import Augment, crop_and_flip, draw, mix
from syncline.workload.data.images import CIFAR10_DEVIATION, CIFAR10_MEAN, Pixels

MASK = 2**64 - 1


def some_images(count: int) -> Pixels:
    return np.random.default_rng(0).integers(0, 256, size=(count, 3, 32, 32), dtype=np.uint8)


def make(**options: object) -> Augment:
    return Augment(CIFAR10_MEAN, CIFAR10_DEVIATION, **{"seed": 11, **options})  # type: ignore[arg-type]


def slow_mix(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) & MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def slow_train(image: Pixels, seed: int, epoch: int, index: int, padding: int) -> npt.NDArray[np.float32]:
    bits = slow_mix((slow_mix((slow_mix(seed) + epoch) & MASK) + index) & MASK)
    down, right = (bits >> 1) % (2 * padding + 1), (bits >> 1) // (2 * padding + 1) % (2 * padding + 1)
    result = np.empty(image.shape, np.float32)
    for channel, row, column in np.ndindex(*image.shape):
        source_column = (31 - column if bits & 1 else column) + right - padding
        source_row = row + down - padding
        inside = 0 <= source_row < 32 and 0 <= source_column < 32
        pixel = np.float32(image[channel, source_row, source_column] if inside else 0)
        shift, scale = CIFAR10_MEAN[channel] * 255, 1 / (CIFAR10_DEVIATION[channel] * 255)
        result[channel, row, column] = (pixel - np.float32(shift)) * np.float32(scale)
    return result


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("channels_last", [False, True])
def test_equals_a_slow_loop_to_the_last_bit(padding: int, channels_last: bool) -> None:
    images, indices = some_images(6), np.array([0, 1, 49_999, 7, 2**40, 3])
    result = make(padding=padding, channels_last=channels_last).train(images, 2, indices)
    expected = [slow_train(image, 11, 2, int(index), padding) for image, index in zip(images, indices, strict=True)]
    assert result.dtype == torch.float32
    assert torch.equal(result, torch.from_numpy(np.stack(expected)))


def test_matches_the_usual_formula() -> None:
    images = some_images(5)
    mean, deviation = (torch.tensor(value).view(3, 1, 1) for value in (CIFAR10_MEAN, CIFAR10_DEVIATION))
    expected = (torch.from_numpy(images).float() / 255 - mean) / deviation
    torch.testing.assert_close(make().test(images), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_sample_is_the_same_in_any_batch(channels_last: bool) -> None:
    augment, images, indices = make(channels_last=channels_last), some_images(37), np.arange(100, 137)
    whole = augment.train(images, 3, indices)
    for parts in (np.array_split(np.arange(37), 5), [np.arange(37)[::-1]], np.arange(37)[:, None]):
        for part in parts:
            assert torch.equal(augment.train(images[part], 3, indices[part]), whole[part.copy()])
    assert torch.equal(augment.test(images)[5:6], augment.test(images[5:6]))


@pytest.mark.parametrize("channels_last", [False, True])
def test_memory_format_and_empty_batches(channels_last: bool) -> None:
    augment = make(channels_last=channels_last)
    kind = torch.channels_last if channels_last else torch.contiguous_format
    assert augment.train(some_images(3), 0, [0, 1, 2]).is_contiguous(memory_format=kind)
    assert augment.test(some_images(3)).is_contiguous(memory_format=kind)
    empty = np.empty(0, np.int64)
    assert augment.train(some_images(3)[empty], 0, empty).shape == (0, 3, 32, 32)
    assert augment.test(some_images(0)).shape == (0, 3, 32, 32)


def test_takes_tensors_and_read_only_arrays_and_changes_neither() -> None:
    images, indices = some_images(4), np.arange(4)
    kept = images.copy()
    images.setflags(write=False)
    augment = make()
    expected = augment.train(images, 1, indices)
    assert torch.equal(augment.train(torch.tensor(images), 1, torch.arange(4)), expected)
    augment.test(images).zero_()
    np.testing.assert_array_equal(images, kept)


def test_epochs_seeds_and_samples_draw_differently_and_evenly() -> None:
    samples = np.arange(50_000)
    down, right, flip = draw(0, 0, samples, 4)
    counts = np.bincount(down * 9 + right, minlength=81)
    assert len(counts) == 81
    assert abs(counts - 50_000 / 81).max() < 150  # six standard deviations
    assert abs(flip.mean() - 0.5) < 0.015
    for other in (draw(0, 1, samples, 4), draw(1, 0, samples, 4), draw(0, 0, samples + 1, 4)):
        same = (other[0] == down) & (other[1] == right) & (other[2] == flip)
        assert same.mean() < 0.01


def test_mix_is_splitmix64() -> None:
    # The first outputs of the published generator started at 0; its state grows by the same constant.
    states = np.array([0, 0x9E3779B97F4A7C15], dtype=np.uint64)
    assert [hex(value) for value in mix(states)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4"]


def test_outside_the_image_is_black() -> None:
    white = np.full((1, 3, 32, 32), 255, np.uint8)
    zero, no = np.zeros(1, np.int64), np.zeros(1, np.bool_)
    cropped = crop_and_flip(white, zero, zero, no, 4)
    assert cropped[0, :, :4].max() == 0
    assert cropped[0, :, :, :4].max() == 0
    assert cropped[0, :, 4:, 4:].min() == 255


def test_images_and_indices_must_match() -> None:
    with pytest.raises(ValueError, match="3 images but 2"):
        make().train(some_images(3), 0, [0, 1])
