"""Texts with tokens to guess: which ones follows from (seed, epoch, sample, place), never from the rank.

As in the BERT paper: of the chosen tokens 80 % are shown as MASK, 10 % as another token, 10 % as they are. The number
of chosen tokens is the same in every text, so that texts weigh the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from syncline.workload.data.batches import sample_numbers
from syncline.workload.data.text import FIRST, MASK
from syncline.workload.sharding import Indices, Shard, mix, word
from syncline.workload.tasks import NO_ANSWER, Task

Tokens = npt.NDArray[np.int64]
"""[texts, places]"""

SHOWN, REPLACED = 90, 80
"""Per cent: below 80 masked, below 90 replaced, otherwise shown."""
TEST_EPOCH = -1


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
