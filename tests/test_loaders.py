"""Loader processes: the same batches with any number of them, nothing left when a rank ends, whatever ends it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import synchronize
from pathlib import Path

import conftest
import numpy as np
import pytest
import torch
from helpers import images
from image_folders import imdb_wiki_folder, odd_photos
from torch import Tensor

from syncline.workload.data.batches import Batches, ImageBatches
from syncline.workload.data.file_batches import FileBatches
from syncline.workload.data.image_index import read_index, update_index
from syncline.workload.data.loading import AheadBatches, LoaderLost, announced
from syncline.workload.sharding import Shard, Sharding


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return imdb_wiki_folder(tmp_path_factory.mktemp("faces"), odd_photos(40))


def face_batches(folder: Path, *, channels_last: bool = True) -> FileBatches:
    index, _ = update_index("imdb-wiki", folder, folder.parent / "cache")
    return FileBatches(index, size=24, seed=5, channels_last=channels_last)


def memory_batches(channels_last: bool = False) -> ImageBatches:
    return ImageBatches(images(), seed=3, channels_last=channels_last)


@contextmanager
def loading(inner: Batches, num_loaders: int, shard_size: int = 8) -> Iterator[AheadBatches]:
    batches = AheadBatches(inner, num_loaders=num_loaders, shard_size=shard_size)
    try:
        yield batches
    finally:
        batches.close()


def use(batches: AheadBatches, shards: Iterable[Shard]) -> None:
    for shard in announced(batches, shards):
        batches.train(shard)


def pids(batches: AheadBatches) -> list[int]:
    return [process.pid for process in batches._processes if process.pid is not None]


def same(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    equal = [torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(one, other, strict=True)]
    return all(equal)


@pytest.mark.parametrize("num_loaders", [1, 2, 3])
@pytest.mark.parametrize("channels_last", [False, True])
def test_images_in_memory_are_the_same_with_any_number_of_loaders(num_loaders: int, channels_last: bool) -> None:
    inner = memory_batches(channels_last)
    sharding = Sharding(inner.num_train, 36, 3, 1, 2)
    with loading(inner, num_loaders, shard_size=18) as batches:
        for epoch in range(2):
            for shard in announced(batches, sharding.epoch(epoch)):
                assert same(batches.train(shard), inner.train(shard))
        for samples in announced(batches, [range(start, start + 10) for start in range(0, inner.num_test, 10)]):
            assert same(batches.test(samples.start, samples.stop), inner.test(samples.start, samples.stop))
    assert batches.throughput()["samples"] == 2 * 100 + inner.num_test


@pytest.mark.parametrize("num_loaders", [1, 2])
def test_files_are_the_same_with_any_number_of_loaders(num_loaders: int, faces: Path) -> None:
    inner = face_batches(faces)
    sharding = Sharding(inner.num_train, 10, 3, 0, 1)
    with loading(inner, num_loaders, shard_size=10) as batches:
        assert (batches.task, batches.num_train, batches.num_test) == (inner.task, 36, 4)
        for shard in announced(batches, sharding.epoch(1)):
            assert same(batches.train(shard), inner.train(shard))
        for _ in announced(batches, [range(4)]):
            assert same(batches.test(0, 4), inner.test(0, 4))
        assert same(batches.test(0, 250), inner.test(0, 250))


def test_union_of_the_shards_is_the_batch_of_one_worker_at_any_world_size(faces: Path) -> None:
    inner = face_batches(faces, channels_last=False)
    whole = inner.train(next(Sharding(36, 11, 9, 0, 1).epoch(3)))
    for world_size in (2, 3, 5):
        parts = [inner.train(next(Sharding(36, 11, 9, rank, world_size).epoch(3))) for rank in range(world_size)]
        for position in range(2):
            assert torch.equal(torch.cat([part[position] for part in parts]), whole[position])


def test_epochs_and_seeds_show_other_parts_of_the_pictures(faces: Path) -> None:
    inner = face_batches(faces)
    shard = next(Sharding(36, 6, 9, 0, 1).epoch(0))
    first, again, later = inner.train(shard), inner.train(shard), inner.train(replace(shard, epoch=1))
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], later[0])
    assert torch.equal(first[1], later[1])


def test_empty_shard_gets_stand_ins(faces: Path) -> None:
    inner = face_batches(faces)
    empty = Shard(0, 0, np.zeros(0, np.int64), 1, 2)
    with loading(inner, 2) as batches:
        for shard in announced(batches, [empty, empty]):
            inputs, labels = batches.train(shard)
            assert (len(inputs), len(labels), shard.weight) == (2, 2, 0)
            assert same((inputs, labels), inner.train(shard))


def test_shard_that_was_not_announced_and_one_that_is_larger_than_all_slots() -> None:
    inner = memory_batches()
    everything = Shard(0, 0, np.arange(inner.num_train), inner.num_train, 1)
    with loading(inner, 2, shard_size=4) as batches:
        upcoming = announced(batches, Sharding(inner.num_train, 4, 3, 0, 1).epoch(0))
        first = next(upcoming)
        assert same(batches.train(everything), inner.train(everything))
        assert same(batches.test(0, 47), inner.test(0, 47))
        assert same(batches.train(first), inner.train(first))
        assert same(
            batches.train(next(upcoming)), inner.train(list(Sharding(inner.num_train, 4, 3, 0, 1).epoch(0))[1])
        )


def test_batches_that_nobody_announced_are_made_by_loaders_where_they_are_free() -> None:
    inner = memory_batches()
    with loading(inner, 2) as batches:
        for shard in Sharding(inner.num_train, 8, 3, 0, 1).epoch(0):
            assert same(batches.train(shard), inner.train(shard))
        assert batches.throughput()["samples"] == inner.num_train
    assert same(batches.train(shard), inner.train(shard)), "in this process once they are closed"


def test_leaving_the_epoch_early_frees_what_was_made_ahead() -> None:
    inner = memory_batches()
    sharding = Sharding(inner.num_train, 8, 3, 0, 1)
    with loading(inner, 2) as batches:
        for epoch in range(30):  # more often than there are slots
            for shard in announced(batches, sharding.epoch(epoch)):
                if shard.step == epoch % 3:
                    assert same(batches.train(shard), inner.train(shard))
                    break


def test_other_types_of_number() -> None:
    inner = memory_batches()
    shard = next(Sharding(inner.num_train, 8, 3, 0, 1).epoch(0))
    with loading(inner, 1) as batches:
        inputs, labels = batches.in_dtype(torch.float64).train(shard)
        assert (inputs.dtype, labels.dtype) == (torch.float64, torch.int64)
        assert torch.equal(inputs.float(), inner.train(shard)[0])


def test_memory_that_a_step_holds_is_not_written_again() -> None:
    inner = memory_batches()
    sharding = Sharding(inner.num_train, 8, 3, 0, 1)
    with loading(inner, 2) as batches:
        kept = [batches.train(shard) for shard in announced(batches, sharding.epoch(0))]
    assert all(same(one, inner.train(shard)) for one, shard in zip(kept, sharding.epoch(0), strict=True))


def test_image_that_breaks_after_the_check_is_marked_and_the_run_goes_on(faces: Path, tmp_path: Path) -> None:
    folder = imdb_wiki_folder(tmp_path / "faces", odd_photos(20))
    inner = face_batches(folder)
    index, _ = update_index("imdb-wiki", folder, folder.parent / "cache")
    (folder / index.train.path(1)).write_text("spoilt")
    with loading(inner, 1) as batches:
        use(batches, [Shard(0, 0, np.arange(4), 4, 1)])
    marked = read_index("imdb-wiki", folder, folder.parent / "cache")
    assert f"Grey stands for {index.train.path(1)}" in marked.source


class Failing(ImageBatches):
    """Fails at one sample, as `fail` does."""

    def __init__(self, fail: Callable[[], None]) -> None:
        super().__init__(images(), seed=3, channels_last=False)
        self.fail = fail

    def train(self, shard: Shard) -> tuple[Tensor, Tensor]:
        if 5 in shard.indices:
            self.fail()
        return super().train(shard)


def test_mistake_in_a_loader_comes_with_its_traceback() -> None:
    def mistake() -> None:
        raise ArithmeticError("my own mistake")

    with loading(Failing(mistake), 2) as batches, pytest.raises(ArithmeticError, match="my own mistake") as error:
        use(batches, Sharding(100, 8, 3, 0, 1, shuffle=False).epoch(0))
    assert "in mistake" in str(error.value)


def test_loader_that_is_killed_is_named_and_the_others_end() -> None:
    inner, message = (
        Failing(lambda: os.kill(os.getpid(), signal.SIGKILL)),
        "process 0 of this rank ended: killed by SIG",
    )
    with loading(inner, 2) as batches, pytest.raises(LoaderLost, match=message):
        use(batches, Sharding(100, 8, 3, 0, 1, shuffle=False).epoch(0))
    conftest.wait_until(lambda: not conftest.any_alive(pids(batches)), 60, "the loaders end")


def test_loaders_leave_the_ranks_random_stream_and_signals_as_they_were() -> None:
    inner = memory_batches()
    before, handler = torch.get_rng_state(), signal.getsignal(signal.SIGCHLD)
    with loading(inner, 2) as batches:
        for epoch in range(2):
            for shard in announced(batches, Sharding(inner.num_train, 8, 3, 0, 1).epoch(epoch)):
                batches.train(shard)
        assert torch.equal(before, torch.get_rng_state())
        assert signal.getsignal(signal.SIGCHLD) is handler


def test_loaders_need_no_semaphore_that_a_killed_rank_could_leave_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("this semaphore is a file of /dev/shm until it is unlinked")

    monkeypatch.setattr(synchronize._multiprocessing, "SemLock", refuse)  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="/dev/shm"):
        multiprocessing.get_context("fork").Queue()
    inner = memory_batches()
    with loading(inner, 2) as batches:
        use(batches, Sharding(inner.num_train, 8, 3, 0, 1).epoch(0))
    assert batches.throughput()["samples"] == inner.num_train


def test_parts_of_a_shard_are_made_ahead_too() -> None:
    inner = memory_batches()
    with loading(inner, 2) as batches:
        for shard in announced(batches, Sharding(inner.num_train, 9, 3, 0, 1).epoch(0), parts=2):
            for part in shard.split(2):
                assert same(batches.train(part), inner.train(part))
    assert batches.throughput()["samples"] == inner.num_train


def test_evaluation_in_the_middle_of_an_epoch_does_not_mix_batches() -> None:
    inner = memory_batches()
    with loading(inner, 2) as batches:
        for shard in announced(batches, Sharding(inner.num_train, 8, 3, 0, 1).epoch(0)):
            assert same(batches.train(shard), inner.train(shard))
            if shard.step == 1:
                for samples in announced(batches, [range(10), range(10, 20)]):
                    assert same(batches.test(samples.start, samples.stop), inner.test(samples.start, samples.stop))


RANK = """
import sys, time
sys.path[:0] = {path!r}
from helpers import images
import torch
from syncline.workload.data.loading import AheadBatches
from syncline.workload.data.batches import ImageBatches
from syncline.workload.sharding import Sharding
inner = ImageBatches(images(), seed=3, channels_last=False)
batches = AheadBatches(inner, num_loaders=2, shard_size=8)
upcoming = batches.announce(Sharding(200, 8, 3, 0, 1).epoch(0))
batches.train(next(upcoming))
print(*[process.pid for process in batches._processes], flush=True)
{then}
"""


@pytest.mark.parametrize(
    ("then", "number"),
    [("time.sleep(60)", signal.SIGKILL), ("time.sleep(60)", signal.SIGTERM), ("", None), ("1 / 0", None)],
)
def test_loaders_end_with_their_rank(then: str, number: signal.Signals | None) -> None:
    code = RANK.format(path=[str(Path(__file__).parent), str(Path(__file__).parent.parent)], then=then)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as rank:
        assert rank.stdout is not None
        loaders = [int(word) for word in rank.stdout.readline().split()]
        assert len(loaders) == 2
        if number is not None:
            assert all(conftest.is_alive(pid) for pid in loaders)
            rank.send_signal(number)
        rank.wait(30)
        conftest.wait_until(lambda: not conftest.any_alive(loaders), 60, "the loaders end")


def test_loader_ignores_the_terminals_ctrl_c() -> None:
    inner = memory_batches()
    shard = next(Sharding(inner.num_train, 8, 3, 0, 1).epoch(0))
    with loading(inner, 1) as batches:
        next(batches.announce([shard]))
        batches.train(shard)
        os.kill(pids(batches)[0], signal.SIGINT)
        time.sleep(0.05)
        for _ in announced(batches, [shard]):
            assert same(batches.train(shard), inner.train(shard))
