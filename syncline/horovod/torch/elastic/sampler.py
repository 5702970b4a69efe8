"""A sampler that shares out what is left of an epoch when the number of ranks changes in the middle of it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sized
from typing import Any

import torch.utils.data

from syncline.horovod.torch.mpi_ops import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Each rank's samples of an epoch, in turn: sample i of the shuffled rest belongs to rank i modulo their number.

    So what all ranks have processed is always a front part of the epoch, and its length is all there is to remember.
    The last round is filled up by repeating samples, fewer than there are ranks. Call `record_batch` after each batch
    and `set_epoch` at the end of an epoch, and give the sampler to a TorchState.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.rank = 0
        self.num_replicas = 1
        self.remaining_indices: list[int] = []
        self.num_samples = 0
        self.total_size = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch, with nothing processed. At the end of the one before: at the beginning of a training
        function it would forget what was processed before a reset."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Every rank has processed a batch of this size."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Share out what is left among the ranks that there are now."""
        self.num_replicas, self.rank = size(), rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        # There may be fewer samples left than it takes to fill up the round.
        filled = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        return iter(list(itertools.islice(filled, self.rank, None, self.num_replicas)))

    def __len__(self) -> int:
        return self.num_samples
