"""Batches made ahead of time by loader processes: the same samples in the same order with any number of them.

The processes are those of torch's DataLoader. A batch is cut into pieces, so that all loaders work on the batch that
is needed next; DataLoader returns the pieces in order, so the batch does not depend on the number of loaders.

Loaders are forked: they share what the rank holds (images in memory, an index) and start in milliseconds. A rank has
threads (Gloo's, the watcher's) that a fork does not copy, but a loader needs nothing that these may have locked. It
leaves samples in anonymous shared memory: DataLoader's own way, files in /dev/shm, ends at 64 MB in many containers.
"""

from __future__ import annotations

import fcntl
import gc
import itertools
import mmap
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.context import ForkContext
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from syncline.errors import SynclineError
from syncline.machine import end_with, signal_name
from syncline.workload.data.batches import Batches, sample_numbers
from syncline.workload.sharding import Shard

BATCHES_AHEAD = 2
PIECES_PER_LOADER = 2
"""Of a batch: smaller pieces share the work more evenly, larger ones cost less talk."""

Request = Shard | range
"""Training samples, or the numbers of test samples."""
SomeRequest = TypeVar("SomeRequest", Shard, range)
Piece = tuple[int, Request]
"""A slot of the shared memory, and what to leave there."""
Made = tuple[int, int, float]
"""The slot, how many samples it holds, and how many seconds they took."""


class LoaderLost(SynclineError):
    """A loader process ended although nobody asked it to."""


class AheadBatches:
    """`shard_size`: samples in the usual shard. `pinned`: in memory that a GPU can read by itself.

    All calls come from the thread that made this object: its end is the loaders' end.
    """

    def __init__(self, inner: Batches, *, num_loaders: int, shard_size: int, pinned: bool = False) -> None:
        self.task = inner.task
        self.source = inner.source
        self.num_train = inner.num_train
        self.num_test = inner.num_test
        self._inner = inner
        self._num_loaders = num_loaders
        self._pinned = pinned
        self._num_samples, self._busy_s = 0, 0.0
        self._piece_size = max(2, -(-shard_size // (PIECES_PER_LOADER * num_loaders)))  # two: see sample_numbers
        prefetch = PIECES_PER_LOADER * BATCHES_AHEAD
        # One slot more than pieces in the making: DataLoader asks for the next piece before it returns one.
        self._num_slots = num_loaders * prefetch + 1
        stand_ins = inner.train(Shard(0, 0, np.zeros(0, np.int64), 1, 1))
        self._memory = [_shared_like(tensor, self._num_slots * self._piece_size) for tensor in stand_ins]
        self._pieces = _Pieces()
        self._asked: deque[Request] = deque()
        """Batches that the loaders make now or have made, in order."""
        self._num_taken = 0
        maker = _Maker(inner, self._memory, self._piece_size)
        options = {"num_workers": num_loaders, "prefetch_factor": prefetch}
        self._loader, self._returned, self._processes = _started(maker, self._pieces, **options)
        self._is_open = True

    def in_dtype(self, dtype: torch.dtype) -> Batches:
        """Made in this process: who needs another type needs few of them."""
        return self._inner.in_dtype(dtype)

    def announce(self, requests: Iterable[SomeRequest], parts: int = 1) -> Iterator[SomeRequest]:
        """The same requests; while one is used, loaders make the next ones. Shards are used in `parts` parts."""
        used, upcoming = itertools.tee(requests)
        asked = self._asked = deque()
        self._num_taken = 0
        self._pieces.upcoming = self._cut(upcoming, parts, asked)
        with self._loss_named():
            self._returned = iter(self._loader) if self._is_open else iter(())
        for number, request in enumerate(used, start=1):
            yield request
            while asked and self._asked is asked and self._num_taken < number * parts:
                self._next_batch()  # which the caller did not want after all

    def train(self, shard: Shard) -> tuple[Tensor, Tensor]:
        if self._is_open and not self._asked:  # nothing is under way, as in a comparison: all loaders make this one
            next(self.announce([shard]))
        return self._next_batch() if self._is_next(shard) else self._inner.train(shard)

    def test(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        samples = range(start, min(stop, self.num_test))
        return self._next_batch() if self._is_next(samples) else self._inner.test(start, stop)

    def throughput(self) -> dict[str, Any]:
        """What the loaders made so far, and how fast while they were at it."""
        rate = self._num_samples / self._busy_s * self._num_loaders if self._busy_s else None
        figures = {"samples": self._num_samples, "busy_s": self._busy_s, "samples_per_s": rate}
        return {"loaders": self._num_loaders, **figures}

    def close(self) -> None:
        """End the loaders. Safe to call twice."""
        self._asked = deque()
        if self._is_open and all(process.exitcode is None for process in self._processes):
            # By name, because DataLoader's own end comes with the last reference, and a traceback may hold one.
            self._returned._shutdown_workers()
        for process in self._processes:  # beside a lost one: DataLoader would wait for a lock that it may have held
            process.kill()
        self._is_open = False

    def _cut(self, requests: Iterable[Request], parts: int, asked: deque[Request]) -> Iterator[Piece]:
        slots = itertools.cycle(range(self._num_slots))
        for request in requests:
            for part in self._parts(request, parts):
                asked.append(part)
                for start in range(0, _num_samples(part), self._piece_size):
                    yield next(slots), _cut_out(part, slice(start, start + self._piece_size))

    def _parts(self, request: Request, parts: int) -> Sequence[Request]:
        if isinstance(request, Shard):
            return request.split(parts)
        return [range(request.start, min(request.stop, self.num_test))]

    def _is_next(self, request: Request) -> bool:
        return bool(self._asked) and _is_same(self._asked[0], request)

    def _next_batch(self) -> tuple[Tensor, Tensor]:
        """Copied, because a step may hold on to it for as long as it likes."""
        size = _num_samples(self._asked.popleft())
        self._num_taken += 1
        inputs, targets = batch = tuple(_room_like(tensor, size, pinned=self._pinned) for tensor in self._memory)
        start = 0
        while start < size:
            slot, count = self._next_piece()
            for whole, part in zip(batch, _slot(self._memory, slot * self._piece_size, count), strict=True):
                whole[start : start + count] = part
            start += count
        return inputs, targets

    def _next_piece(self) -> tuple[int, int]:
        with self._loss_named():
            made = next(self._returned)
        if isinstance(made, SynclineError):
            raise made
        slot, count, seconds = made
        self._num_samples += count
        self._busy_s += seconds
        return slot, count

    @contextmanager
    def _loss_named(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError:  # DataLoader's for a lost loader, or one that a sample raised
            for number, process in enumerate(self._processes):
                code = process.exitcode
                if code is not None:
                    how = f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
                    action = "If memory is short, set loaders to a smaller number, or to 0."
                    raise LoaderLost(f"loader process {number} of this rank ended: {how}.", action=action) from None
            raise


def announced(batches: Batches, requests: Iterable[SomeRequest], parts: int = 1) -> Iterator[SomeRequest]:
    """The requests, made known ahead of time where loaders can use that."""
    return batches.announce(requests, parts) if isinstance(batches, AheadBatches) else iter(requests)


class _Pieces:
    """What DataLoader asks its loaders for: its `sampler`."""

    upcoming: Iterator[Piece] = iter(())

    def __iter__(self) -> Iterator[Piece]:
        return self.upcoming


class _Maker(Dataset[Any]):
    """What a loader does with a piece."""

    def __init__(self, inner: Batches, memory: Sequence[Tensor], piece_size: int) -> None:
        self._inner, self._memory, self._piece_size = inner, memory, piece_size

    def __getitem__(self, piece: Piece) -> Made | SynclineError:
        slot, request = piece
        started = time.perf_counter()
        try:
            if isinstance(request, Shard):
                made = self._inner.train(request)
            else:
                made = self._inner.test(request.start, request.stop)
        except SynclineError as error:  # as it is; DataLoader adds a traceback to others
            return error
        count = len(made[0])
        for place, tensor in zip(_slot(self._memory, slot * self._piece_size, count), made, strict=True):
            place.copy_(tensor)
        return slot, count, time.perf_counter() - started


class _NamelessContext(ForkContext):
    """As "fork", but without semaphores: these are files of /dev/shm for a moment, and a rank that is killed at that
    moment leaves them there. It has what the queues and the event of DataLoader need."""

    def Lock(self) -> Any:
        return _FileLock()

    def BoundedSemaphore(self, value: int = 1) -> Any:
        """A queue counts with it, but those of DataLoader hold any number."""
        return threading.Semaphore(value)

    def Event(self) -> Any:
        return _Flag()


class _FileLock:
    """Between the processes that inherit it, each of which uses it in one thread. It ends with who holds it."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("loaders")
        else:
            with tempfile.TemporaryFile() as file:
                self._file = os.dup(file.fileno())

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Others hold it only while they write a message, so no time limit is needed."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN)

    def __del__(self) -> None:
        os.close(self._file)


class _Flag:
    def __init__(self) -> None:
        self._byte = mmap.mmap(-1, 1)

    def set(self) -> None:
        self._byte[0] = 1

    def is_set(self) -> bool:
        return self._byte[0] == 1


def _started(maker: _Maker, pieces: _Pieces, **options: Any) -> tuple[DataLoader[Made], Any, list[BaseProcess]]:
    """Loaders forked now, while the rank is small, rather than at the first batch."""
    before = multiprocessing.active_children()
    with warnings.catch_warnings(), _sigchld_kept():
        # Of forks beside threads (see the top of this file), and of more loaders than cores.
        warnings.simplefilter("ignore")
        loader = DataLoader(
            maker,
            sampler=cast(Sampler[Any], pieces),
            batch_size=None,
            collate_fn=lambda made: made,
            persistent_workers=True,
            multiprocessing_context=_NamelessContext(),
            worker_init_fn=partial(_begin_loader, os.getpid()),
            generator=torch.Generator(),  # its own: otherwise it draws from the stream of the dropout masks
            **options,
        )
        returned = iter(loader)
    processes = [process for process in multiprocessing.active_children() if process not in before]
    return loader, returned, sorted(processes, key=lambda process: process.pid or 0)


@contextmanager
def _sigchld_kept() -> Iterator[None]:
    """DataLoader's handler raises wherever the rank happens to be; the next batch notices a loss soon enough."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, handler)


def _begin_loader(rank_pid: int, _number: int) -> None:
    """A loader ends with its rank, however that ends: DataLoader looks for it only every five seconds."""
    end_with(rank_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the rank, which ends its loaders
    gc.freeze()  # what the rank holds, such as its connections, must not be collected here
    warnings.simplefilter("ignore")  # Pillow warns of what is odd but readable


def _num_samples(request: Request) -> int:
    return len(sample_numbers(request)) if isinstance(request, Shard) else len(request)


def _cut_out(request: Request, part: slice) -> Request:
    return replace(request, indices=request.indices[part]) if isinstance(request, Shard) else request[part]


def _is_same(announced: Request, asked: Request) -> bool:
    if isinstance(announced, Shard) and isinstance(asked, Shard):
        same_step = (announced.epoch, announced.step) == (asked.epoch, asked.step)
        return same_step and np.array_equal(announced.indices, asked.indices)
    return announced == asked


def _shared_like(tensor: Tensor, num_samples: int) -> Tensor:
    """Room for samples like these in memory that loaders share with the rank."""
    dense = torch.empty_like(tensor)
    size = num_samples * dense[0].numel() * dense.element_size()
    memory = torch.frombuffer(mmap.mmap(-1, size), dtype=dense.dtype)
    return memory.as_strided((num_samples, *dense.shape[1:]), dense.stride())


def _room_like(tensor: Tensor, num_samples: int, *, pinned: bool) -> Tensor:
    shape = (num_samples, *tensor.shape[1:])
    return torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, pin_memory=pinned)


def _slot(memory: Sequence[Tensor], start: int, count: int) -> list[Tensor]:
    return [tensor[start : start + count] for tensor in memory]
