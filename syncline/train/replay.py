"""Batches of a replayed run: nothing is loaded, the recorded time is slept."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from syncline.workload.replay import Timeline
from syncline.workload.sharding import Shard
from syncline.workload.tasks import classification


class ReplayedBatches:
    """One made-up sample for ReplayedModel, whatever the shard."""

    task = classification(1, (1,))
    num_test = 0

    def __init__(self, data_s: float, *, num_train: int = 1, source: str = "") -> None:
        self.num_train = num_train
        self.source = source
        self._data_s = data_s
        self._timeline = Timeline()
        self._sample = torch.zeros(1), torch.zeros(1, dtype=torch.int64)

    def train(self, shard: Shard) -> tuple[Tensor, Tensor]:
        self._timeline.sleep(self._data_s)
        return self._sample

    def test(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self._sample

    def in_dtype(self, dtype: torch.dtype) -> Self:
        return self
