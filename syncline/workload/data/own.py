"""A user's own data: datasets with numbered samples, and what is asked about them.

    def flowers(data_dir):
        return syncline.Data(train=FlowerSet(data_dir, "train"), test=FlowerSet(data_dir, "test"), num_classes=102)

    syncline train --data mydata:flowers --data-dir flowers --model resnet18

Whatever a dataset draws at random for a sample follows from (seed, epoch, sample), so that neither the number of
workers nor a restart changes what is learned from.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import default_collate

from syncline.errors import DataError
from syncline.plan import Plan
from syncline.workload.data.batches import sample_numbers
from syncline.workload.shard_sources import Samples, seed_all, seeded
from syncline.workload.sharding import Indices, Shard, epoch_order, mix, word
from syncline.workload.tasks import Task, right_answers
from syncline.workload.user_code import accepted, load_callable

HELD_OUT = 10
"""Without a test part, one sample in so many is kept for the test."""
TEST_EPOCH = 2**63 - 1
"""Stands for 'not an epoch' where draws for test samples are seeded."""


@dataclass(frozen=True)
class Data:
    """What a `--data` callable returns."""

    train: Samples
    """Pairs (input, target)."""
    test: Samples | None = None
    """Without one, a tenth of `train` is kept for the test."""
    loss: Callable[[Any, Tensor], Tensor] | None = None
    """loss(outputs, targets): the mean over these samples. Default: cross entropy where targets are whole numbers,
    mean squared error where they are not."""
    metric: Callable[[Any, Tensor], Tensor | float] | None = None
    """metric(outputs, targets): the mean over these samples, shown under the function's name. Default: accuracy, or
    the mean absolute error."""
    num_classes: int | None = None
    """Width of the model's answer. Default: the dataset's `classes`, or the number of values in a target."""
    collate: Callable[[list[Any]], tuple[Tensor, Tensor]] = default_collate
    """From samples to a batch of inputs and targets."""
    draws: bool = True
    """False: no sample draws at random. It is then made without seeding, and all samples of a batch at once where the
    dataset has `__getitems__`."""


class OwnBatches:
    """Batches of a user's datasets."""

    def __init__(self, data: Data, *, name: str, seed: int, channels_last: bool) -> None:
        self._data, self._seed, self._channels_last = data, seed, channels_last
        self._dtype: torch.dtype | None = None
        self._train_part, self._test_part = _split(data, name)
        self.num_train, self.num_test = len(self._train_part), len(self._test_part)
        self.source = f"Your data {name}: {self.num_train:,} training and {self.num_test:,} test samples."
        self.task = task_of(data, self._batch(data.train, self._train_part[:1], 0), name)

    def in_dtype(self, dtype: torch.dtype) -> Self:
        other = copy.copy(self)
        other._dtype = dtype
        return other

    def train(self, shard: Shard) -> tuple[Tensor, Tensor]:
        return self._batch(self._data.train, self._train_part[sample_numbers(shard)], shard.epoch)

    def test(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self._batch(self._data.test or self._data.train, self._test_part[start:stop], TEST_EPOCH)

    def digest(self) -> bytes:
        """Of how much there is and of the first sample: what copies of the data on other hosts must have too."""
        inputs, targets = self._batch(self._data.train, self._train_part[:1], 0)
        content = [inputs.float().numpy().tobytes(), targets.float().numpy().tobytes()]
        content.append(f"{self.num_train} {self.num_test}".encode())
        return hashlib.blake2b(b"".join(content), digest_size=8).digest()

    def _batch(self, samples: Samples, numbers: Indices, epoch: int) -> tuple[Tensor, Tensor]:
        batch = self._data.collate(self._samples(samples, numbers, epoch))
        if not (isinstance(batch, tuple | list) and len(batch) == 2 and all(isinstance(p, Tensor) for p in batch)):
            raise DataError(
                f"a batch of your data is a {_kind(batch)}, not a pair of tensors.",
                action="Let samples be pairs (input, target), or give a collate that returns inputs and targets.",
            )
        inputs, targets = batch
        if self._dtype is not None and inputs.is_floating_point():
            inputs = inputs.to(self._dtype)
        if self._channels_last and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs, targets

    def _samples(self, samples: Samples, numbers: Indices, epoch: int) -> list[Any]:
        if not self._data.draws:
            at_once: Callable[[list[int]], list[Any]] | None = getattr(samples, "__getitems__", None)
            return at_once(numbers.tolist()) if at_once else [samples[number] for number in numbers.tolist()]
        made = []
        seeds = mix(mix(mix(word(self._seed)) + word(epoch)) + numbers.astype(np.uint64))
        with seeded(0):
            for number, seed in zip(numbers.tolist(), seeds.tolist(), strict=True):
                seed_all(seed)
                made.append(samples[number])
        return made


def own_batches(plan: Plan) -> OwnBatches:
    """The plan's data, as its callable makes it."""
    function = load_callable(plan.data, "data")
    folder = Path(plan.data_dir) if plan.data_dir else None
    data = function(**accepted(function, {"data_dir": folder, "seed": plan.seed}))
    if isinstance(data, tuple) and len(data) == 2:
        data = Data(*data)
    elif not isinstance(data, Data):
        data = Data(data)
    for part in (data.train, data.test):
        if part is not None and not (hasattr(part, "__len__") and hasattr(part, "__getitem__")):
            raise DataError(
                f"data {plan.data!r} gave a {_kind(part)}, whose samples have no numbers.",
                action="Return a dataset with __len__ and __getitem__, a pair (train, test), or a syncline.Data.",
            )
    return OwnBatches(data, name=plan.data, seed=plan.seed, channels_last=plan.channels_last)


def task_of(data: Data, example: tuple[Tensor, Tensor], name: str) -> Task:
    """What is asked: as the data says, and otherwise as its first sample suggests."""
    inputs, targets = example
    shape = tuple(int(size) for size in inputs.shape[1:])
    whole_numbers = not targets.is_floating_point()
    loss, metric = data.loss, data.metric
    if not whole_numbers:
        loss, metric = loss or squared_error, metric or mean_absolute_error
    per_target = math.prod(targets.shape[1:])
    return Task(
        name=name,
        num_classes=data.num_classes or (per_target if loss is not None else _num_classes(data, name)),
        input_shape=shape,
        score=_summed(metric) if metric else right_answers,
        metric=getattr(metric, "__name__", "metric") if metric else "accuracy",
        unit="samples",
        answers_per_sample=1 if metric else per_target,
        own_loss=loss,
        own_metric=metric is not None,
        input_dtype=inputs.dtype,
    )


def squared_error(outputs: Any, targets: Tensor) -> Tensor:
    return mse_loss(outputs.reshape(targets.shape), targets)


def mean_absolute_error(outputs: Any, targets: Tensor) -> Tensor:
    distance: Tensor = (outputs.reshape(targets.shape) - targets).abs()
    return distance.mean()


def _summed(metric: Callable[[Any, Tensor], Tensor | float]) -> Callable[[Any, Tensor], Tensor]:
    return lambda outputs, targets: torch.as_tensor(metric(outputs, targets), dtype=torch.float64) * len(targets)


def _num_classes(data: Data, name: str) -> int:
    classes: Sequence[Any] | None = getattr(data.train, "classes", None)
    if classes is None:
        raise DataError(
            f"data {name!r} does not say how many classes it has.",
            action="Return syncline.Data(train, test, num_classes=…), or give the dataset an attribute `classes`.",
        )
    return len(classes)


def _split(data: Data, name: str) -> tuple[Indices, Indices]:
    """Numbers of the training and of the test samples."""
    count = len(data.train)
    if data.test is not None and count and len(data.test):
        return np.arange(count), np.arange(len(data.test))
    if count < 2 or data.test is not None:
        raise DataError(f"data {name!r} has too few samples: there must be some to train and some to test on.")
    order = epoch_order(count, 0, 0)
    held_out = max(1, count // HELD_OUT)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def _kind(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {', '.join(type(part).__name__ for part in value)}"
    return type(value).__name__
