"""mean, sum and gather: weighted by samples, the same on every rank, whoever has nothing to say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import on_threads
from torch import Tensor
from torch.utils.data import TensorDataset

import syncline
from syncline import world
from syncline.comm import Communicator
from syncline.errors import ContractError, UsageError


def on_ranks(world_size: int, function: Callable[[int], Any]) -> list[Any]:
    """function(rank) on every rank, each a thread."""

    def live(communicator: Communicator, _log: object) -> Any:
        world.enter(communicator)
        return function(communicator.rank)

    return on_threads(world_size, live)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_numbers_and_tensors_over_ranks(world_size: int) -> None:
    def figures(rank: int) -> list[Any]:
        grown = torch.tensor([1.0, rank], requires_grad=True)
        return [
            syncline.mean(float(rank)), syncline.mean(rank), syncline.sum(rank + 1), syncline.sum(0.5),
            syncline.mean(grown), syncline.sum(torch.tensor([rank, 2])), syncline.sum(torch.tensor([True, rank > 0])),
            syncline.mean(torch.tensor(rank)), syncline.gather(rank), syncline.gather(rank / 2),
        ]  # fmt: skip

    ranks = range(world_size)
    middle, total = sum(ranks) / world_size, sum(ranks)
    for got in on_ranks(world_size, figures):
        assert got[:4] == [middle, middle, total + world_size, world_size / 2]
        assert [type(value) for value in got[:4]] == [float, float, int, float]
        assert torch.equal(got[4], torch.tensor([1.0, middle]))
        assert not got[4].requires_grad
        assert torch.equal(got[5], torch.tensor([total, 2 * world_size]))
        assert torch.equal(got[6], torch.tensor([world_size, world_size - 1]))
        assert torch.equal(got[7], torch.tensor(middle))
        assert got[8] == list(ranks)
        assert got[9] == [rank / 2 for rank in ranks]


def test_mean_counts_each_rank_by_its_weight() -> None:
    got = on_ranks(3, lambda rank: syncline.mean([2.0, 5.0, math.nan][rank], weight=[1, 3, 0][rank]))
    assert got == [4.25] * 3
    assert all(math.isnan(value) for value in on_ranks(2, lambda _: syncline.mean(1.0, weight=0)))
    with pytest.raises(UsageError, match="weight -1"):
        syncline.mean(1.0, weight=-1)


def test_mean_in_a_loop_is_over_the_global_batch() -> None:
    """Seven samples in batches of five on three ranks: 2, 2, 1, then 1, 1 and a stand-in."""
    values = torch.arange(7.0) ** 2
    expected = [values[:5].mean().item(), values[5:].mean().item()]

    def losses(_rank: int) -> list[float]:
        loader = syncline.loader(TensorDataset(values), global_batch=5, shuffle=False)
        return [syncline.mean(batch.mean().item()) for (batch,) in loader]

    for got in on_ranks(3, losses):
        assert got == pytest.approx(expected)
    unweighted = [sum([0.5, (4 + 9) / 2, 16.0]) / 3]
    assert unweighted[0] != pytest.approx(expected[0]), "equal weights would be wrong here"


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_evaluation_on_uneven_shards_counts_every_sample_once(world_size: int) -> None:
    """Nine samples in batches of eight: of the last batch most ranks have nothing, and some ranks never had any."""
    dataset = TensorDataset(torch.arange(9), torch.arange(9) % 2)

    @torch.no_grad()
    def evaluate(_rank: int) -> tuple[Any, ...]:
        correct: Tensor | int = 0
        count, seen = 0, [torch.empty(0, dtype=torch.int64)]
        for samples, parity in syncline.loader(dataset, global_batch=8, shuffle=False):
            correct = correct + (parity == 0).sum()
            count += len(samples)
            seen.append(samples)
        accuracy = syncline.mean(float(correct) / count if count else math.nan, weight=count)
        every = torch.cat(syncline.gather(torch.cat(seen)))
        return float(syncline.sum(correct)), syncline.sum(count), accuracy, sorted(every.tolist())

    for got in on_ranks(world_size, evaluate):
        assert got == (5.0, 9, pytest.approx(5 / 9), list(range(9)))


def test_a_rank_that_has_only_a_number_goes_with_others_that_have_a_tensor() -> None:
    """A rank without a batch has never added a tensor to its 0."""
    got = on_ranks(3, lambda rank: float(syncline.sum(torch.tensor(rank) if rank else 0)))
    assert got == [3.0] * 3


def test_tensors_of_any_type_and_shape_are_gathered() -> None:
    def given(rank: int, kind: torch.dtype) -> Tensor:
        return (torch.arange(6 * rank) % 2).reshape(rank, 3, 2).to(kind).transpose(1, 2)

    kinds = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool)
    for kind in kinds:
        for parts in on_ranks(3, lambda rank, kind=kind: syncline.gather(given(rank, kind))):  # type: ignore[misc]
            for rank, part in enumerate(parts):
                assert part.dtype == kind
                assert torch.equal(part, given(rank, kind))
    with pytest.raises(UsageError, match="9 dimensions"):
        syncline.gather(torch.zeros([1] * 9))


def test_ranks_that_give_different_shapes_are_told() -> None:
    with pytest.raises(ContractError, match="all_reduce"):
        on_ranks(2, lambda rank: syncline.sum(torch.zeros(rank + 1)))


def test_alone_nothing_is_needed() -> None:
    assert syncline.mean(2.5) == 2.5
    assert syncline.sum(3) == 3
    assert torch.equal(syncline.gather(torch.ones(2))[0], torch.ones(2))
