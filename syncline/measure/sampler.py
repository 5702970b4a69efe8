"""What a sampler gives a rank from epoch to epoch, with and without being told the epoch: an experiment.

torch's DistributedSampler shuffles by seed + epoch, and its epoch stays 0 until somebody calls set_epoch: then every
epoch hands each rank the same samples in the same order. Syncline's own sharding takes the epoch as an argument.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from syncline.workload.sharding import Sharding

EPOCHS = 3
SAMPLES = 10_000

Order = Callable[[int], list[int]]
"""This rank's samples of an epoch, in order."""


def epochs_of_samplers(rank: Any) -> list[dict[str, Any]]:
    """A study's rows, one for each way of sampling: the mean over ranks of what `compare_epochs` finds."""
    communicator, batch = rank.communicator, max(1, rank.plan.global_batch // rank.communicator.world_size)
    rows = []
    for name, order in orders(communicator.rank, communicator.world_size, rank.plan.seed, rank.plan.global_batch):
        found = compare_epochs([order(epoch) for epoch in range(EPOCHS)], batch, SAMPLES)
        parts: list[Tensor] = communicator.all_gather(torch.tensor(list(found.values())), label=f"epochs of {name}")
        means = torch.stack(parts).mean(0).tolist()
        rows.append({"point": {"sampler": name, "method": name}, **dict(zip(found, means, strict=True))})
    return rows


def orders(rank: int, world_size: int, seed: int, global_batch: int) -> list[tuple[str, Order]]:
    def make() -> DistributedSampler[int]:
        return DistributedSampler(range(SAMPLES), world_size, rank, seed=seed % 2**31)  # type: ignore[arg-type]

    left_alone, told = make(), make()

    def without_set_epoch(_: int) -> list[int]:
        return list(left_alone)

    def with_set_epoch(epoch: int) -> list[int]:
        told.set_epoch(epoch)
        return list(told)

    def sharded(epoch: int) -> list[int]:
        sharding = Sharding(SAMPLES, global_batch, seed, rank, world_size)
        return [index for shard in sharding.epoch(epoch) for index in shard.indices.tolist()]

    return [
        ("DistributedSampler", without_set_epoch),
        ("DistributedSampler, set_epoch", with_set_epoch),
        ("Syncline", sharded),
    ]


def compare_epochs(epochs: Sequence[Sequence[int]], batch: int, num_samples: int) -> dict[str, float]:
    """Of one rank: batches and samples that are those of the epoch before, and how much of the set it saw in all."""
    pairs = list(itertools.pairwise(epochs))
    same_batches = [_same(_batches(one, batch), _batches(other, batch)) for one, other in pairs]
    same_shard = [len(set(one) & set(other)) / len(set(one)) for one, other in pairs]
    return {
        "same_batches": sum(same_batches) / len(pairs),
        "same_shard": sum(same_shard) / len(pairs),
        "seen": len({index for epoch in epochs for index in epoch}) / num_samples,
    }


def _batches(order: Sequence[int], batch: int) -> list[tuple[int, ...]]:
    return [tuple(order[start : start + batch]) for start in range(0, len(order), batch)]


def _same(one: Sequence[Any], other: Sequence[Any]) -> float:
    return sum(bool(a == b) for a, b in zip(one, other, strict=False)) / len(one)
