"""The same global batch at any world size: unions, weights, order and restarts of sharded epochs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from syncline.errors import UsageError
from syncline.workload.sharding import Shard, ShardedBatchSampler, Sharding

SIZES = [(0, 4), (1, 4), (4, 4), (5, 4), (23, 8), (23, 3), (100, 7), (10, 64)]


def ranks_of(sharding: Sharding, world_size: int) -> list[Sharding]:
    return [replace(sharding, rank=rank, world_size=world_size) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", range(1, 6))
@pytest.mark.parametrize(("num_samples", "global_batch"), SIZES)
def test_union_of_shards_is_the_batch_of_one_worker(num_samples: int, global_batch: int, world_size: int) -> None:
    alone = Sharding(num_samples, global_batch, seed=3)
    for step in range(alone.steps_per_epoch):
        shards = [rank.shard(2, step) for rank in ranks_of(alone, world_size)]
        np.testing.assert_array_equal(np.concatenate(shards), alone.batch(2, step))
        expected = [len(part) for part in np.array_split(alone.batch(2, step), world_size)]
        assert [len(shard) for shard in shards] == expected
        assert ranks_of(alone, world_size)[-1].shard_sizes(step) == expected


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 60), st.integers(1, 70), st.integers(1, 9), st.integers(-(2**70), 2**70), st.booleans())
def test_every_sample_comes_exactly_once_per_epoch(
    num_samples: int, global_batch: int, world_size: int, seed: int, shuffle: bool
) -> None:
    alone = Sharding(num_samples, global_batch, seed, shuffle=shuffle)
    shards = [shard for rank in ranks_of(alone, world_size) for shard in rank.epoch(5)]
    seen = np.concatenate([shard.indices for shard in shards]) if shards else np.empty(0)
    np.testing.assert_array_equal(np.sort(seen), np.arange(num_samples))


@pytest.mark.parametrize("world_size", range(1, 6))
@pytest.mark.parametrize(("num_samples", "global_batch"), SIZES[1:])
def test_weighted_shard_means_average_to_the_mean_of_the_batch(
    num_samples: int, global_batch: int, world_size: int
) -> None:
    loss = np.random.default_rng(0).normal(size=num_samples)
    alone = Sharding(num_samples, global_batch, seed=1)
    for step in range(alone.steps_per_epoch):
        ranks = ranks_of(alone, world_size)
        shards = [next(rank.epoch(0, start_step=step)) for rank in ranks]
        terms = [shard.weight * loss[shard.indices].mean() if len(shard.indices) else 0.0 for shard in shards]
        assert np.mean(terms) == pytest.approx(loss[alone.batch(0, step)].mean())
        assert [rank.weight(step) for rank in ranks] == [shard.weight for shard in shards]


def test_an_empty_shard_weighs_nothing() -> None:
    shard = Sharding(5, 4, seed=0, rank=2, world_size=3).epoch(0, start_step=1)
    assert [(len(part.indices), part.num_global, part.weight) for part in shard] == [(0, 1, 0.0)]


def test_epochs_and_seeds_differ_and_a_restart_repeats() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return Sharding(200, 200, seed).batch(epoch, 0).tolist()

    assert order(0, 1) == order(0, 1)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_the_order_is_pinned() -> None:
    # A checkpoint made with one version must continue on the same samples with the next.
    assert Sharding(8, 8, seed=7).batch(1, 0).tolist() == PINNED
    assert Sharding(8, 3, seed=7, shuffle=False).batch(1, 2).tolist() == [6, 7]


PINNED = [3, 1, 6, 2, 5, 4, 0, 7]


def test_resuming_in_the_middle_continues_the_epoch() -> None:
    sharding = Sharding(50, 8, seed=2, rank=1, world_size=3)
    whole, rest = list(sharding.epoch(4)), list(sharding.epoch(4, start_step=3))
    assert [shard.step for shard in rest] == [3, 4, 5, 6]
    for expected, shard in zip(whole[3:], rest, strict=True):
        np.testing.assert_array_equal(shard.indices, expected.indices)


def test_a_caller_may_change_what_it_got() -> None:
    sharding = Sharding(10, 10, seed=0)
    first = sharding.batch(0, 0)
    kept = first.copy()
    first[:] = -1
    np.testing.assert_array_equal(sharding.batch(0, 0), kept)
    torch.from_numpy(sharding.shard(0, 0))


@pytest.mark.parametrize("wrong", [{"global_batch": 0}, {"num_samples": -1}, {"rank": 2}, {"world_size": 0}])
def test_impossible_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        Sharding(**{"num_samples": 10, "global_batch": 4, "seed": 0, "rank": 0, "world_size": 2, **wrong})


def test_a_step_outside_the_epoch_is_refused() -> None:
    with pytest.raises(IndexError, match="3 steps"):
        Sharding(10, 4, seed=0).shard(0, 3)


def test_shard_is_a_plain_record() -> None:
    shard = Shard(epoch=0, step=0, indices=np.arange(3), num_global=12, world_size=2)
    assert shard.weight == pytest.approx(0.5)


def test_batch_sampler_feeds_a_data_loader_and_advances_by_itself() -> None:
    sharding = Sharding(10, 4, seed=5, rank=1, world_size=2)
    sampler = ShardedBatchSampler(sharding)
    loader = DataLoader(TensorDataset(torch.arange(10)), batch_sampler=sampler)
    for epoch in range(3):
        batches = [batch.tolist() for (batch,) in loader]
        assert batches == [sharding.shard(epoch, step).tolist() for step in range(3)]
    assert sampler.epoch == 3
    assert len(loader) == 3


def test_batch_sampler_resumes_and_drops_the_small_last_batch() -> None:
    sharding = Sharding(10, 4, seed=5, rank=2, world_size=3)
    assert [len(part) for part in ShardedBatchSampler(sharding)] == [1, 1, 0]
    sampler = ShardedBatchSampler(sharding, epoch=6, drop_last=True)
    assert list(sampler) == [sharding.shard(6, step).tolist() for step in range(2)]
    assert len(sampler) == 2
    assert len(ShardedBatchSampler(Sharding(8, 4, seed=0), drop_last=True)) == 2
