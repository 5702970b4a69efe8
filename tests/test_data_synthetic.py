"""Made images: shape, determinism, and that a small network learns them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from syncline.errors import DataError
from syncline.workload.data.batches import Augment
from syncline.workload.data.sources import choose_images, load_images
from syncline.workload.data.synthetic import synthetic_images


def test_shape_and_kind() -> None:
    images = load_images("synthetic", None)
    assert images.train_images.shape == (10_000, 3, 32, 32)
    assert images.test_images.shape == (2_000, 3, 32, 32)
    assert images.train_images.dtype == np.uint8
    assert images.train_labels.dtype == np.int64
    assert set(images.train_labels.tolist()) == set(range(images.num_classes))
    assert "Synthetic" in images.source
    assert "10,000 training and 2,000 test" in images.source


def test_the_seed_decides_everything() -> None:
    first, again, other = synthetic_images(70, 30), synthetic_images(70, 30), synthetic_images(70, 30, seed=-1)
    np.testing.assert_array_equal(first.train_images, again.train_images)
    np.testing.assert_array_equal(first.test_labels, again.test_labels)
    assert (first.mean, first.deviation) == (again.mean, again.deviation)
    assert not np.array_equal(first.train_images, other.train_images)
    assert not np.array_equal(first.train_images[:30], first.test_images)


def test_a_smaller_set_is_the_beginning_of_a_larger_one() -> None:
    small, large = synthetic_images(50, 10), synthetic_images(1_500, 10)
    np.testing.assert_array_equal(small.train_images, large.train_images[:50])
    np.testing.assert_array_equal(small.train_labels, large.train_labels[:50])
    assert small.mean == large.mean


def test_normalised_pixels_are_centred() -> None:
    images = synthetic_images(2_000, 10)
    values = Augment(images.mean, images.deviation).test(images.train_images)
    assert values.mean(dim=(0, 2, 3)).abs().max() < 0.05
    assert (values.std(dim=(0, 2, 3)) - 1).abs().max() < 0.05


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads that wait for a busy core cost more than they give on so small a model."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_a_small_network_learns_but_not_at_once() -> None:
    torch.manual_seed(0)
    images = synthetic_images(3_200, 500)
    augment = Augment(images.mean, images.deviation)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train_then_test(steps: range) -> float:
        for step in steps:
            part = np.arange(step * 64, (step + 1) * 64)
            optimizer.zero_grad()
            labels = torch.from_numpy(images.train_labels[part])
            nn.functional.cross_entropy(model(augment.train(images.train_images[part], 0, part)), labels).backward()
            optimizer.step()
        correct = model(augment.test(images.test_images)).argmax(1).numpy() == images.test_labels
        return float(correct.mean())

    assert train_then_test(range(1)) < 0.5
    assert train_then_test(range(1, 50)) > 0.5


def test_names_are_checked() -> None:
    assert choose_images("synthetic", Path("ignored")).folder is None
    with pytest.raises(DataError, match="cifar10, synthetic, auto"):
        load_images("cifar100", None)
