"""Which samples each rank takes at each step, so that the world size never changes what is learned from.

Same global batch: the batch of step k follows from (seed, epoch, step) alone, and every rank takes a
contiguous part of it. The union of the ranks' shards is the batch that one worker would see.

The shards of a batch may differ in size. To make the average over ranks the mean over the global batch, scale
a shard's mean loss by its `weight`:

    mean over batch = 1/N * sum_r n_r * loss_r = 1/R * sum_r (n_r * R / N) * loss_r,   weight_r = n_r * R / N
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from syncline.errors import UsageError

Indices = npt.NDArray[np.int64]


def part_of(batch_size: int, rank: int, world_size: int) -> slice:
    """Where a rank's samples are in a batch. Parts differ by at most one; the larger ones come first."""
    size, extra = divmod(batch_size, world_size)
    start = rank * size + min(rank, extra)
    return slice(start, start + size + (rank < extra))


@dataclass(frozen=True)
class Shard:
    """One rank's part of one global batch."""

    epoch: int
    step: int
    indices: Indices
    num_global: int
    """Samples in the whole global batch."""
    world_size: int

    @property
    def weight(self) -> float:
        """Factor for the shard's mean loss; 0 for an empty shard, whose mean does not exist."""
        return len(self.indices) * self.world_size / self.num_global

    def split(self, count: int) -> list[Shard]:
        """In `count` parts, the first ones larger by at most one sample; their weights add up to the whole's."""
        return [replace(self, indices=part) for part in np.array_split(self.indices, count)]


@dataclass(frozen=True)
class Sharding:
    """Pure: ask for any (epoch, step) in any order; a resumed run continues as if never stopped."""

    num_samples: int
    global_batch: int
    seed: int
    rank: int = 0
    world_size: int = 1
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_samples < 0 or self.global_batch < 1:
            sizes = f"{self.num_samples} samples in batches of {self.global_batch}"
            raise UsageError(f"Cannot shard {sizes}.", action="Give a global batch of at least 1.")
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"Rank {self.rank} is not one of {self.world_size} ranks (counted from 0).")

    @property
    def steps_per_epoch(self) -> int:
        """The last batch counts even where it is smaller than the others."""
        return -(-self.num_samples // self.global_batch)

    def batch(self, epoch: int, step: int) -> Indices:
        """Sample indices of the whole global batch; the same on every rank."""
        start = step * self.global_batch
        stop = start + self.batch_size(step)
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        # A copy, because the cached order is shared and torch does not take read-only arrays.
        return epoch_order(self.num_samples, self.seed, epoch)[start:stop].copy()

    def batch_size(self, step: int) -> int:
        if not 0 <= step < self.steps_per_epoch:
            raise IndexError(f"step {step} is outside the epoch's {self.steps_per_epoch} steps")
        return min(self.global_batch, self.num_samples - step * self.global_batch)

    def shard_sizes(self, step: int) -> list[int]:
        """Samples per rank; they differ by at most one, and the first ranks take the larger shards."""
        parts = [part_of(self.batch_size(step), rank, self.world_size) for rank in range(self.world_size)]
        return [part.stop - part.start for part in parts]

    def shard(self, epoch: int, step: int) -> Indices:
        """This rank's part of the batch; empty where a small last batch does not reach this rank."""
        return self.batch(epoch, step)[part_of(self.batch_size(step), self.rank, self.world_size)]

    def weight(self, step: int) -> float:
        """Factor for this rank's mean loss at a step, the same in every epoch; see the top of this file."""
        return self.shard_sizes(step)[self.rank] * self.world_size / self.batch_size(step)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Shard]:
        """This rank's shards in order. Every rank gets the same number of shards, empty ones included."""
        for step in range(start_step, self.steps_per_epoch):
            yield Shard(epoch, step, self.shard(epoch, step), self.batch_size(step), self.world_size)


@lru_cache(maxsize=4)
def epoch_order(num_samples: int, seed: int, epoch: int) -> Indices:
    """A permutation that follows from (seed, epoch) alone: nothing to advance, nothing to checkpoint.

    Sorting raw Philox output instead of calling `permutation`: numpy promises the same raw output in every
    version, but not the same permutations. The array is shared and read-only.
    """
    key = np.array([seed % 2**64, epoch % 2**64], dtype=np.uint64)
    raw = np.random.Philox(key=key).random_raw(num_samples)
    order = np.argsort(raw, kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order


class ShardedBatchSampler:
    """For loops that weigh the loss themselves: `DataLoader(dataset, batch_sampler=ShardedBatchSampler(sharding))`.
    `syncline.loader` does all this by itself.

    Each pass over the loader is the next epoch; set `epoch` to continue a stopped run. Scale the loss of the
    k-th batch by `sharding.weight(k)`. The last batch can be smaller than the world: ranks that it does not
    reach get an empty list, which torch's default collate refuses, so give `drop_last=True` there.
    """

    def __init__(self, sharding: Sharding, *, epoch: int = 0, drop_last: bool = False) -> None:
        self.sharding = sharding
        self.epoch = epoch
        """The epoch that the next pass yields."""
        self.num_steps = sharding.steps_per_epoch
        if drop_last and sharding.num_samples % sharding.global_batch:
            self.num_steps -= 1

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[list[int]]:
        # Not a generator function: the epoch must advance when the pass starts, not at its first batch.
        epoch, self.epoch = self.epoch, self.epoch + 1
        return (self.sharding.shard(epoch, step).tolist() for step in range(self.num_steps))


Words = npt.NDArray[np.uint64]


def word(value: int) -> Words:
    return np.array([value % 2**64], dtype=np.uint64)


def mix(words: Words) -> Words:
    """The splitmix64 hash: neighbouring inputs give unrelated outputs. Arithmetic is modulo 2^64."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
