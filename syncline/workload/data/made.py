"""Data made up for a model, one sample at a time: images of any size and number of classes, ages, and texts.

Nothing is kept but a few numbers per class. As in synthetic.py, a class is a smooth coloured pattern, and an image
shows it shifted, mixed with another class's and covered with noise. An age is a point on the way from one pattern to
another. A sample follows from its number; its shift, mixture and noise also from the seed and the epoch, which stands
for augmentation. A text counts up with a stride of its own, so that its neighbours tell a masked token.

Texts, made or read from a file, have tokens to guess: which ones follows from (seed, epoch, sample, place), never
from the rank. As in the BERT paper, of the chosen tokens 80 % are shown as MASK, 10 % as another token, 10 % as they
are. The number of chosen tokens is the same in every text, so that texts weigh the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from syncline.plan import Plan
from syncline.workload.data.batches import Batches, sample_numbers
from syncline.workload.data.text import FIRST, MASK, read_text
from syncline.workload.inputs import image_size, sequence_length, usual_input
from syncline.workload.models import num_masked
from syncline.workload.sharding import Indices, Shard, Words, mix, word
from syncline.workload.tasks import NO_ANSWER, Task, age_estimation, classification, masked_language

Values = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]
"""[texts, places]"""

NUM_TRAIN, NUM_TEST = 10_000, 100
KNOTS = 6
SHIFT = 0.25
"""Of the pattern, how far an image may lie from its start."""
NOISE_MARGIN = 64
NOISE = 0.5
TRAIN, TEST = 1, 2
PERIOD = 61
"""So many tokens occur, however large the vocabulary: others would hardly ever be seen."""
STRIDES = 8
SHOWN, REPLACED = 90, 80
"""Per cent of the chosen tokens: below 80 masked, below 90 replaced, otherwise shown."""
TEST_EPOCH = -1


class MadeImages:
    """Batches of made images for a task: classes, or ages."""

    def __init__(self, task: Task, *, seed: int, channels_last: bool) -> None:
        self.task = task
        self.num_train, self.num_test = NUM_TRAIN, NUM_TEST
        size = "x".join(map(str, task.input_shape[1:]))
        what = f"ages 0 to {task.num_classes - 1}" if task.name == "age" else f"{task.num_classes:,} classes"
        self.source = (
            f"Synthetic images of {size}, {what}: {NUM_TRAIN:,} training and {NUM_TEST:,} test images, "
            "made when they are needed."
        )
        self._seed, self._channels_last = seed, channels_last
        self._dtype = torch.float32
        stream = np.random.Generator(np.random.Philox(key=np.array([0, 10], dtype=np.uint64)))
        channels, rows, columns = task.input_shape
        self._patterns = stream.uniform(-1, 1, (self._num_patterns, channels, KNOTS, KNOTS)).astype(np.float32)
        noise = (channels, rows + NOISE_MARGIN, columns + NOISE_MARGIN)
        self._noise = stream.uniform(-NOISE, NOISE, noise).astype(np.float32)

    @property
    def _num_patterns(self) -> int:
        return 2 if self.task.name == "age" else self.task.num_classes

    def in_dtype(self, dtype: torch.dtype) -> Self:
        other = copy.copy(self)
        other._dtype = dtype
        return other

    def train(self, shard: Shard) -> tuple[Tensor, Tensor]:
        numbers = sample_numbers(shard)
        return self._samples(numbers, TRAIN, mix(mix(word(self._seed)) + word(shard.epoch)))

    def test(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self._samples(np.arange(start, min(stop, self.num_test), dtype=np.int64), TEST, word(0))

    def _samples(self, numbers: Indices, part: int, variation: Words) -> tuple[Tensor, Tensor]:
        own = mix(mix(word(part)) + numbers.astype(np.uint64))
        labels = (own % np.uint64(self.task.num_classes)).astype(np.int64)
        draws = _Draws(mix(variation + own))
        images = smooth(self._knots(labels, draws), self.task.input_shape[1:], draws.share(), draws.share())
        for image, down, right in zip(images, draws.below(NOISE_MARGIN), draws.below(NOISE_MARGIN), strict=True):
            rows, columns = image.shape[1:]
            image += self._noise[:, down : down + rows, right : right + columns]
        tensor = torch.from_numpy(images).to(self._dtype)
        if self._channels_last:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor, torch.from_numpy(labels)

    def _knots(self, labels: npt.NDArray[np.int64], draws: _Draws) -> Values:
        """Each sample's own pattern: its class's with something of another's."""
        strength, other_strength = 0.5 + 0.5 * draws.share(), 0.5 * draws.share()
        if self.task.name == "age":
            way = (labels / (self.task.num_classes - 1)).astype(np.float32)[:, None, None, None]
            own, other = (1 - way) * self._patterns[0] + way * self._patterns[1], 0.0
        else:
            step = 1 + draws.below(self._num_patterns - 1)
            own, other = self._patterns[labels], self._patterns[(labels + step) % self._num_patterns]
        mixed = strength[:, None, None, None] * own + other_strength[:, None, None, None] * other
        knots: Values = mixed.astype(np.float32)
        return knots


class _Draws:
    """Numbers for each sample, one kind after the other."""

    def __init__(self, state: Words) -> None:
        self._state = state

    def share(self) -> Values:
        """Between 0 and 1."""
        self._state = mix(self._state)
        return (self._state >> np.uint64(40)).astype(np.float32) / np.float32(2**24)

    def below(self, limit: int) -> npt.NDArray[np.int64]:
        self._state = mix(self._state)
        return (self._state % np.uint64(limit)).astype(np.int64)


def smooth(knots: Values, sides: tuple[int, ...], down: Values, right: Values) -> Values:
    """Patterns of any size from few knots, linear between neighbours, each from its own start.

    Sums in a fixed order instead of a matrix product, whose rounding may depend on the company of a sample.
    """
    rows, columns = sides
    across, along = _weights(columns, right), _weights(rows, down)
    strips = sum(knots[..., k, None] * across[:, None, None, k] for k in range(KNOTS))
    image = along[:, None, 0, :, None] * strips[:, :, 0, None, :]  # type: ignore[index]
    for k in range(1, KNOTS):
        image += along[:, None, k, :, None] * strips[:, :, k, None, :]  # type: ignore[index]
    return image


def _weights(side: int, start: Values) -> Values:
    """[sample, knot, position]: how much a knot counts at a position."""
    position = np.arange(side, dtype=np.float32) / np.float32(side) * np.float32(1 - SHIFT)
    place = (position + np.float32(SHIFT) * start[:, None]) * np.float32(KNOTS - 1)
    apart = np.abs(place[:, None] - np.arange(KNOTS, dtype=np.float32)[:, None])
    weights: Values = np.maximum(np.float32(0), np.float32(1) - apart)
    return weights


def made_texts(task: Task, *, seed: int) -> MaskedTexts:
    length, vocabulary = task.input_shape[0], task.num_classes

    def texts(numbers: Indices, part: int) -> Tokens:
        bits = mix(mix(word(part)) + numbers.astype(np.uint64))
        start, stride = bits % np.uint64(PERIOD), 1 + bits // np.uint64(PERIOD) % np.uint64(STRIDES)
        counted = start[:, None] + stride[:, None] * np.arange(length, dtype=np.uint64)
        return FIRST + (counted % np.uint64(min(PERIOD, vocabulary - FIRST))).astype(np.int64)

    return MaskedTexts(
        task,
        train=lambda numbers: texts(numbers, TRAIN),
        test=lambda numbers: texts(numbers, TEST),
        num_train=NUM_TRAIN,
        num_test=NUM_TEST,
        source=f"Synthetic texts of {length} tokens: {NUM_TRAIN:,} to train and {NUM_TEST:,} to test on.",
        seed=seed,
    )


SHAPES = ("synthetic", "synthetic-ages", "text")


def synthetic_task(plan: Plan) -> Task:
    """The model's usual one, changed as the plan says."""
    usual = usual_input(plan.model)
    classes = plan.num_classes or usual.num_classes
    if usual.unit == "tokens":
        length = sequence_length(plan)
        return masked_language(classes, length, num_masked(length))
    shape = (3, image_size(plan), image_size(plan))
    return age_estimation(shape) if plan.data == "synthetic-ages" else classification(classes, shape)


def made_batches(plan: Plan) -> Batches:
    """Data made up for the model: images, ages or texts."""
    task = synthetic_task(plan)
    if task.unit == "tokens":
        return made_texts(task, seed=plan.seed)
    return MadeImages(task, seed=plan.seed, channels_last=plan.channels_last)


def text_batches(plan: Plan) -> Batches:
    """The plan's text file, in texts of its sequence length."""
    length = sequence_length(plan)
    text = read_text(Path(plan.data_dir or ""), length)
    train, test = text.windows(length)
    return MaskedTexts(
        masked_language(text.vocabulary, length, num_masked(length)),
        train=lambda numbers: train[numbers].astype("int64"),
        test=lambda numbers: test[numbers].astype("int64"),
        num_train=len(train),
        num_test=len(test),
        source=f"{text.source}; {len(train):,} texts of {length} tokens to train and {len(test):,} to test on.",
        seed=plan.seed,
    )


def mask(
    tokens: Tokens, numbers: Indices, *, seed: int, epoch: int, count: int, vocabulary: int
) -> tuple[Tokens, Tokens]:
    """What is shown, and what is asked: NO_ANSWER at the places that are not."""
    places = np.arange(tokens.shape[1], dtype=np.uint64)
    bits = mix(mix(mix(mix(word(seed)) + word(epoch)) + numbers.astype(np.uint64))[:, None] + places)
    chosen = np.zeros(tokens.shape, dtype=np.bool_)
    np.put_along_axis(chosen, np.argsort(bits, axis=1, kind="stable")[:, :count], True, axis=1)
    fate = mix(bits)
    percent = fate % np.uint64(100)
    other = FIRST + (mix(fate) % np.uint64(vocabulary - FIRST)).astype(np.int64)
    shown = np.where(chosen & (percent < REPLACED), MASK, tokens)
    shown = np.where(chosen & (percent >= REPLACED) & (percent < SHOWN), other, shown)
    return shown, np.where(chosen, tokens, NO_ANSWER)


class MaskedTexts:
    """Batches for masked-language modelling, from functions that give the tokens of texts by number."""

    def __init__(
        self,
        task: Task,
        *,
        train: Callable[[Indices], Tokens],
        test: Callable[[Indices], Tokens],
        num_train: int,
        num_test: int,
        source: str,
        seed: int,
    ) -> None:
        self.task = task
        self.num_train, self.num_test, self.source = num_train, num_test, source
        self._train, self._test = train, test
        self._seed = seed

    def in_dtype(self, dtype: torch.dtype) -> Self:
        return copy.copy(self)  # tokens are whole numbers whatever the model computes in

    def train(self, shard: Shard) -> tuple[Tensor, Tensor]:
        numbers = sample_numbers(shard)
        return self._masked(self._train(numbers), numbers, self._seed, shard.epoch)

    def test(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The same masks whenever it is asked, at any seed."""
        numbers = np.arange(start, min(stop, self.num_test), dtype=np.int64)
        return self._masked(self._test(numbers), numbers, 0, TEST_EPOCH)

    def _masked(self, tokens: Tokens, numbers: Indices, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        count, vocabulary = self.task.answers_per_sample, self.task.num_classes
        shown, asked = mask(tokens, numbers, seed=seed, epoch=epoch, count=count, vocabulary=vocabulary)
        return torch.from_numpy(shown), torch.from_numpy(asked)
