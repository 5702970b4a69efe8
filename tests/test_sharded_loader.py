"""loader: any data, divided among ranks into the batches of one worker, whatever the sizes, from any step on."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

import syncline
from syncline import world
from syncline.comm.threads import ThreadCommunicator, ThreadWorld
from syncline.errors import UsageError
from syncline.shares import current_share


class At:
    """Inside, this thread is a rank of a world; it talks to nobody."""

    def __init__(self, rank: int, world_size: int, model: nn.Module | None = None) -> None:
        self.backend = ThreadCommunicator(ThreadWorld(world_size), rank)
        self.model = model

    def __enter__(self) -> None:
        world.enter(self.backend, self.model)

    def __exit__(self, *_: object) -> None:
        world.leave(self.backend)


class Numbers(IterableDataset[int]):
    """A stream; its workers share it out among themselves."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(self.count) if info is None else range(info.id, self.count, info.num_workers))


class Noisy(Dataset[tuple[int, int, float]]):
    """A transform that draws from all three generators."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> tuple[Tensor, ...]:
        draws = (torch.rand(()), torch.tensor(random.random()), torch.tensor(np.random.rand()))
        return (torch.tensor(number), *draws)


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def parts(data: Any, rank: int, world_size: int, epochs: int = 1, **options: Any) -> list[list[int]]:
    """A rank's batches, without those that do not count."""
    with At(rank, world_size):
        loader = syncline.loader(data, **options)
        got = []
        for _ in range(epochs):
            for batch in loader:
                share = current_share()
                assert share is not None
                values = (batch[0] if isinstance(batch, list) else batch).tolist()
                got.append(values[: share.num_samples])
        return got


def union(data: Any, world_size: int, **options: Any) -> list[list[int]]:
    """The global batches, put together from the ranks' parts."""
    by_rank = [parts(data, rank, world_size, **options) for rank in range(world_size)]
    assert len({len(batches) for batches in by_rank}) == 1, "every rank has every step"
    return [[*chain(*step)] for step in zip(*by_rank, strict=True)]


@pytest.mark.parametrize("last", ["uneven", "drop", "pad"])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 21, 24])
def test_ranks_together_see_the_batches_of_one_worker(count: int, last: str) -> None:
    alone = parts(numbers(count), 0, 1, epochs=2, global_batch=8, last=last)
    for world_size in (2, 3, 5, 8):
        assert union(numbers(count), world_size, epochs=2, global_batch=8, last=last) == alone
    flat = [*chain(*alone)]
    if last == "uneven":
        assert sorted(flat) == sorted([*range(count)] * 2)
    elif last == "drop":
        assert len(flat) == 2 * (count // 8 * 8)
        assert len(set(flat[: len(flat) // 2])) == len(flat) // 2
    else:
        assert all(len(batch) == 8 for batch in alone)
        assert set(flat) == set(range(count))


def test_every_pass_is_another_order_and_shuffling_can_be_turned_off() -> None:
    first, second, third, fourth = parts(numbers(8), 0, 1, epochs=4, global_batch=8)
    assert sorted(first) == sorted(second)
    assert len({tuple(first), tuple(second), tuple(third), tuple(fourth)}) == 4
    assert parts(numbers(8), 0, 1, global_batch=8, seed=1) != [first]
    assert parts(numbers(8), 1, 2, epochs=2, global_batch=4, shuffle=False) == [[2, 3], [6, 7]] * 2


def test_weights_make_the_average_over_ranks_the_mean_over_the_batch() -> None:
    """Five samples on four ranks, then two."""
    expected = [[8 / 5, 2.0], [4 / 5, 2.0], [4 / 5, 0.0], [4 / 5, 0.0]]
    for rank, weights in enumerate(expected):
        with At(rank, 4):
            loader = syncline.loader(numbers(7), global_batch=5)
            assert [share.weight for _ in loader if (share := current_share())] == weights


def test_last_batch_smaller_than_the_world_gives_stand_ins_of_weight_0_while_training() -> None:
    with At(2, 4):
        loader = syncline.loader(numbers(9), global_batch=8, shuffle=False)
        seen = []
        for (values,) in loader:
            share = current_share()
            assert share is not None
            seen.append((values.tolist(), share.weight, share.everywhere))
    assert seen == [([4, 5], 1.0, True), ([8, 8], 0.0, True)]


@pytest.mark.parametrize("evaluating", ["no_grad", "eval"])
def test_in_evaluation_a_rank_without_samples_is_not_given_the_batch(evaluating: str) -> None:
    def evaluate(rank: int) -> list[int]:
        model = nn.Linear(1, 1).train(evaluating == "no_grad")
        with At(rank, 4, model), torch.set_grad_enabled(evaluating != "no_grad"):
            loader = syncline.loader(numbers(9), global_batch=8, shuffle=False)
            values = [value for (batch,) in loader for value in batch.tolist()]
            assert (loader.epoch, loader.step) == (1, 0)
            return values

    for rank, expected in ((0, [0, 1, 8]), (1, [2, 3]), (3, [6, 7])):
        with ThreadPoolExecutor(1) as fresh:  # models that other tests wrapped on this thread would count too
            assert fresh.submit(evaluate, rank).result() == expected


def test_mean_inside_a_batch_that_some_ranks_do_not_have_is_an_error_and_not_a_wait() -> None:
    with At(0, 4), torch.no_grad():
        loader = iter(syncline.loader(numbers(9), global_batch=8))
        next(loader)
        next(loader)
        for call in (syncline.mean, syncline.sum, syncline.gather):
            with pytest.raises(UsageError, match="not all of the 4 ranks"):
                call(1.0)


# Where a pass begins and ends.


def position(loader: syncline.Loader) -> tuple[int, int]:
    return loader.epoch, loader.step


@pytest.mark.parametrize("data", [numbers(21), Numbers(21)], ids=["numbered", "stream"])
@pytest.mark.parametrize("stop", [1, 2, 6, 7])
def test_loader_goes_on_in_the_middle_of_an_epoch(data: Any, stop: int) -> None:
    whole = parts(data, 1, 3, epochs=3, global_batch=4)
    with At(1, 3):
        before, after = (syncline.loader(data, global_batch=4) for _ in range(2))
        for step, _ in enumerate(batch for _ in range(3) for batch in before):
            if step + 1 == stop:
                state = before.state_dict()
                break
        after.load_state_dict(state)
        rest = []
        while after.epoch < 3:
            for batch in after:
                share = current_share()
                assert share is not None
                rest.append((batch[0] if isinstance(batch, list) else batch).tolist()[: share.num_samples])
    assert rest == whole[stop:]


def test_state_at_the_last_batch_leaves_an_empty_pass() -> None:
    """So that what a loop does at the end of an epoch is still done."""
    loader, again = (syncline.loader(numbers(8), global_batch=4) for _ in range(2))
    for _ in loader:
        state = loader.state_dict()
    assert state == {"epoch": 0, "step": 2, "seed": 0, "global_batch": 4}
    again.load_state_dict(state)
    assert list(again) == []
    assert len(list(again)) == 2
    assert position(again) == (2, 0)


def test_position_of_another_loader_is_refused() -> None:
    state = syncline.loader(numbers(8), global_batch=4).state_dict()
    with pytest.raises(UsageError, match="global_batch is 2, but the saved position is of one with 4"):
        syncline.loader(numbers(8), global_batch=2).load_state_dict(state)
    with pytest.raises(UsageError, match="seed=0"):
        syncline.loader(numbers(8), global_batch=4, seed=1).load_state_dict(state)


def test_peeking_does_not_count_and_breaking_off_does() -> None:
    loader = syncline.loader(numbers(12), global_batch=4)
    first = next(iter(loader))[0].tolist()
    assert position(loader) == (0, 0)
    for step, (batch,) in enumerate(loader):
        if step == 0:
            assert batch.tolist() == first
        else:
            break
    assert position(loader) == (0, 2)
    again = [batch.tolist() for (batch,) in loader]
    assert again == parts(numbers(12), 0, 1, epochs=2, global_batch=4)[3:]
    loader.set_epoch(0)
    assert next(iter(loader))[0].tolist() == first


def test_set_epoch_of_older_scripts_keeps_a_position_that_was_loaded() -> None:
    loader = syncline.loader(numbers(12), global_batch=4)
    loader.load_state_dict({"epoch": 5, "step": 2, "seed": 0, "global_batch": 4})
    loader.set_epoch(5)
    assert len(list(loader)) == 1
    loader.set_epoch(6)
    assert position(loader) == (6, 0)


def test_share_is_that_of_the_innermost_loop_of_this_thread() -> None:
    outer, inner = syncline.loader(numbers(6), global_batch=5), syncline.loader(numbers(4), global_batch=3)
    assert current_share() is None
    elsewhere: list[object] = []
    for _ in outer:
        at_outer = current_share()
        for _ in inner:
            assert current_share() is not at_outer
        assert current_share() is at_outer
        thread = threading.Thread(target=lambda: elsewhere.append(current_share()))
        thread.start()
        thread.join()
        break
    for _ in zip(outer, inner, strict=False):
        pass
    assert current_share() is None
    assert elsewhere == [None]


def test_a_loop_that_a_traceback_keeps_is_over_when_the_next_begins() -> None:
    """As in a notebook after an interruption."""
    loader = syncline.loader(numbers(20), global_batch=4)
    kept = iter(loader)
    for _ in range(3):
        next(kept)
    second = iter(loader)
    next(second)
    assert position(loader) == (1, 1)
    del kept
    assert position(loader) == (1, 1)
    rest = [batch.tolist() for (batch,) in second]
    assert rest == parts(numbers(20), 0, 1, epochs=2, global_batch=4)[6:]
    assert current_share() is None


# What people have today.


def test_a_data_loader_keeps_what_it_says() -> None:
    plain = DataLoader(numbers(10), batch_size=4, collate_fn=lambda rows: torch.stack([row[0] for row in rows]) + 100)
    assert union(plain, 3) == [[100, 101, 102, 103], [104, 105, 106, 107], [108, 109]]
    assert len(syncline.loader(plain)) == 3
    dropping = DataLoader(numbers(10), batch_size=4, shuffle=True, drop_last=True)
    assert len(syncline.loader(dropping)) == 2
    assert union(dropping, 2) == parts(numbers(10), 0, 1, global_batch=4, last="drop")
    assert union(dropping, 2, global_batch=5, shuffle=False, last="uneven") == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_a_data_loader_of_one_rank_of_several_has_the_batch_of_all() -> None:
    sampler = DistributedSampler(numbers(24), num_replicas=3, rank=1, seed=7)
    theirs = DataLoader(numbers(24), batch_size=4, sampler=sampler)
    assert syncline.loader(theirs).global_batch == 12
    assert union(theirs, 3) == parts(numbers(24), 0, 1, global_batch=12, seed=7)


def test_samplers_of_ones_own_are_drawn_alike_on_all_ranks() -> None:
    def weighted(generator: torch.Generator | None = None) -> DataLoader[Any]:
        sampler = WeightedRandomSampler([1.0] * 5 + [9.0] * 5, 11, generator=generator)
        return DataLoader(numbers(10), batch_size=4, sampler=sampler)

    torch.manual_seed(1)
    before = torch.get_rng_state()
    got = union(weighted(), 3, epochs=2)
    assert torch.equal(torch.get_rng_state(), before), "the script's own draws are as if nothing was drawn here"
    assert [len(batch) for batch in got] == [4, 4, 3] * 2
    assert got[:3] != got[3:]
    own = weighted(torch.Generator().manual_seed(4))
    assert union(own, 2) == union(own, 3)
    with pytest.raises(UsageError, match="the sampler decides the order"):
        syncline.loader(weighted(), shuffle=False)


def test_batches_of_a_batch_sampler_are_the_global_batches() -> None:
    class ByLength:
        def __iter__(self) -> Iterator[list[int]]:
            yield from ([0, 1, 2, 3, 4], [5], [6, 7, 8])

        def __len__(self) -> int:
            return 3

    theirs = DataLoader(numbers(9), batch_sampler=ByLength())  # type: ignore[arg-type]
    assert union(theirs, 2) == [[0, 1, 2, 3, 4], [5], [6, 7, 8]]
    assert len(syncline.loader(theirs)) == 3
    torchs = DataLoader(numbers(9), batch_sampler=BatchSampler(SequentialSampler(numbers(9)), 4, drop_last=False))
    assert union(torchs, 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    with pytest.raises(UsageError, match="batch sampler of its own"):
        syncline.loader(theirs, global_batch=4)


@pytest.mark.parametrize("last", ["uneven", "drop", "pad"])
@pytest.mark.parametrize("count", [0, 3, 16, 21])
def test_a_stream_gives_the_batches_of_one_worker(count: int, last: str) -> None:
    expected = [[*range(start, min(start + 8, count))] for start in range(0, count, 8)]
    if last == "drop":
        expected = [batch for batch in expected if len(batch) == 8]
    elif last == "pad":
        expected = [(batch * 8)[:8] for batch in expected]
    for world_size in (1, 2, 3, 8):
        stream = Numbers(count)
        assert union(stream, world_size, global_batch=8, last=last) == expected
        assert stream.epochs == [0] * world_size
    assert union(DataLoader(Numbers(count), batch_size=8, drop_last=last == "drop"), 3, last=last) == expected


class Shuffling(IterableDataset[int]):
    """Draws at its start and on the way, without a seed."""

    def __iter__(self) -> Iterator[int]:
        numbers = [*range(30)]
        random.shuffle(numbers)
        return (number + 100 * int(torch.randint(9, ())) + 1000 * np.random.randint(9) for number in numbers)


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1, "multiprocessing_context": "fork"}], ids=["here", "worker"]
)
def test_a_stream_that_shuffles_itself_is_the_same_on_every_rank(options: dict[str, Any]) -> None:
    def on_rank(rank: int) -> list[list[int]]:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(rank)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        got = parts(Shuffling(), rank, 3, epochs=2, global_batch=8, **options)
        after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        assert torch.equal(before[0], after[0])
        assert before[1:] == after[1:], "the script's own draws are as if nothing was drawn here"
        return got

    together = [[*chain(*step)] for step in zip(*map(on_rank, range(3)), strict=True)]
    assert sorted(number % 100 for batch in together[:4] for number in batch) == [*range(30)]
    assert together[:4] != together[4:]
    assert together == parts(Shuffling(), 0, 1, epochs=2, global_batch=8, **options)


def test_a_dataset_of_whole_batches_is_cut_into_rows() -> None:
    class Batches(Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, number: int) -> dict[str, Any]:
            values = torch.arange(5) + 5 * number
            return {"x": values, "name": [f"row {value}" for value in values], "pair": (values.numpy(), 3.5)}

    got = []
    for rank in range(2):
        with At(rank, 2):
            loader = syncline.loader(DataLoader(Batches(), batch_size=None))
            assert len(loader) == 2
            got.append(list(loader))
    assert [batch["x"].tolist() for batch in got[0]] == [[0, 1, 2], [5, 6, 7]]
    assert [batch["name"] for batch in got[1]] == [["row 3", "row 4"], ["row 8", "row 9"]]
    assert got[1][1]["pair"][0].tolist() == [8, 9]
    assert got[1][1]["pair"][1] == 3.5
    with pytest.raises(UsageError, match="no rows"):
        list(syncline.loader(DataLoader([1.0, 2.0], batch_size=None)))  # type: ignore[arg-type]


def test_worker_processes_change_neither_batches_nor_draws() -> None:
    """Also from the middle of an epoch on; and the script's own generators are left alone."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    runs = {}
    for workers in (1, 2):
        with At(1, 2):
            options = {"num_workers": workers, "persistent_workers": workers == 2, "multiprocessing_context": "fork"}
            loader = syncline.loader(Noisy(), global_batch=4, **options)
            runs[workers] = [torch.stack(batch).tolist() for _ in range(2) for batch in loader]
            loader.load_state_dict({"epoch": 1, "step": 1, "seed": 0, "global_batch": 4})
            assert [torch.stack(batch).tolist() for batch in loader] == runs[workers][4:]
    assert runs[1] == runs[2]
    assert torch.equal(torch.get_rng_state(), before)
    stream = syncline.loader(Numbers(20), global_batch=4, num_workers=2, multiprocessing_context="fork")
    assert [batch.tolist() for batch in stream][:2] == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "Give global_batch"),
        ({"global_batch": 0}, "global_batch 0"),
        ({"global_batch": 4, "last": "keep"}, "Choose uneven, drop or pad"),
        ({"global_batch": 4, "seed": -1}, "seed -1"),
        ({"global_batch": 4, "batch_size": 4}, "Give global_batch, the samples of all ranks together"),
        ({"global_batch": 4, "drop_last": True}, 'last="drop"'),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        syncline.loader(numbers(8), **options)


def test_more_refusals() -> None:
    with pytest.raises(UsageError, match="stream comes in its own order"):
        syncline.loader(Numbers(8), global_batch=4, shuffle=True)
    with At(0, 5), pytest.raises(UsageError, match="smaller than the 5 ranks"):
        next(iter(syncline.loader(numbers(8), global_batch=4)))
    with pytest.raises(UsageError, match="no length"):
        syncline.loader(iter(()), global_batch=4)  # type: ignore[arg-type]
