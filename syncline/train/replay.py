"""Batches of a replayed run: nothing is loaded, the recorded time is slept."""

from __future__ import annotations

import torch
from torch import Tensor

from syncline.train.batches import Batches
from syncline.workload.replay import Timeline
from syncline.workload.sharding import Shard


class ReplayedBatches(Batches):
    """One made-up sample for ReplayedModel, whatever the shard."""

    def __init__(self, data_s: float) -> None:
        self._data_s = data_s
        self._timeline = Timeline()
        self._sample = torch.zeros(1), torch.zeros(1, dtype=torch.int64)

    @property
    def num_test(self) -> int:
        return 0

    def train(self, _shard: Shard) -> tuple[Tensor, Tensor]:
        self._timeline.sleep(self._data_s)
        return self._sample
