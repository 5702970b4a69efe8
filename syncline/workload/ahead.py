"""Any batches, made ahead of time in loader processes: the same samples in the same order with any number of them."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from syncline.workload.batches import Batches
from syncline.workload.loaders import ALIGNMENT, Loaders, Made, Request, Ticket
from syncline.workload.sharding import Shard

BATCHES_AHEAD = 2
PIECES_PER_LOADER = 2
"""Of a batch: smaller pieces share the work more evenly, larger ones cost less talk."""


class AheadBatches:
    """`shard_size`: samples in the usual shard. `pinned`: in memory that a GPU can read by itself."""

    def __init__(self, inner: Batches, *, num_loaders: int, shard_size: int, pinned: bool = False) -> None:
        self.task = inner.task
        self.source = inner.source
        self.num_train = inner.num_train
        self.num_test = inner.num_test
        self._pinned = pinned
        self._dtype = torch.float32
        self._piece = max(2, -(-shard_size // (PIECES_PER_LOADER * num_loaders)))  # two: an empty shard's stand-ins
        pieces = -(-max(2, shard_size) // self._piece)
        self._loaders = Loaders(
            _Maker(inner),
            num_loaders=num_loaders,
            slot_bytes=self._piece * _sample_bytes(inner) + 2 * ALIGNMENT,
            num_slots=pieces * (BATCHES_AHEAD + 1) + 2 * num_loaders,
        )
        self._announced: dict[bytes, Ticket] = {}
        self._tests: dict[tuple[int, int], Ticket] = {}
        self._last_test = 0

    def in_dtype(self, dtype: torch.dtype) -> Self:
        other = copy.copy(self)
        other._dtype = dtype
        return other

    def announce(self, shards: Iterable[Shard]) -> Iterator[Shard]:
        """The same shards; while one is used, the next ones are being made."""
        self._forget(self._announced)
        waiting: deque[Shard] = deque()
        source = iter(shards)
        try:
            while True:
                for shard in source:
                    waiting.append(shard)
                    self._announced[_name(shard)] = self._loaders.ask(self._train_pieces(shard))
                    if len(waiting) > BATCHES_AHEAD:
                        break
                if not waiting:
                    return
                yield waiting.popleft()
        finally:
            self._forget(self._announced)

    def train(self, shard: Shard) -> tuple[Tensor, Tensor]:
        ticket = self._announced.pop(_name(shard), None) or self._loaders.ask(self._train_pieces(shard))
        return self._taken(ticket, len(shard.indices) or 2)

    def test(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        stop = min(stop, self.num_test)
        ticket = self._tests.pop((start, stop), None) or self._loaders.ask(self._test_pieces(start, stop))
        self._foresee_test(start, stop)
        return self._taken(ticket, stop - start)

    def throughput(self) -> dict[str, Any]:
        """What the loaders made so far, and how fast while they were at it."""
        made, busy_s = self._loaders.num_samples, self._loaders.busy_s
        rate = made / busy_s * self._loaders.num_loaders if busy_s else None
        return {"loaders": self._loaders.num_loaders, "samples": made, "busy_s": busy_s, "samples_per_s": rate}

    def close(self) -> None:
        self._loaders.close()

    def _foresee_test(self, start: int, stop: int) -> None:
        """A rank takes every n-th batch of the test: as far from this one as this is from the last."""
        distance, self._last_test = start - self._last_test, start
        upcoming = (start + distance, min(stop + distance, self.num_test))
        if distance > 0 and upcoming[0] < self.num_test and upcoming not in self._tests:
            self._forget(self._tests)
            self._tests[upcoming] = self._loaders.ask(self._test_pieces(*upcoming))

    def _train_pieces(self, shard: Shard) -> list[Request]:
        starts = range(0, max(1, len(shard.indices)), self._piece)
        return [("train", replace(shard, indices=shard.indices[at : at + self._piece])) for at in starts]

    def _test_pieces(self, start: int, stop: int) -> list[Request]:
        return [("test", at, min(at + self._piece, stop)) for at in range(start, stop, self._piece)]

    def _taken(self, ticket: Ticket, num_samples: int) -> tuple[Tensor, Tensor]:
        batch: list[Tensor] = []

        def put(piece: int, made: Made) -> None:
            if not batch:
                batch.extend(self._room(tensor, num_samples) for tensor in made)
            start = piece * self._piece
            for whole, part in zip(batch, made, strict=True):
                whole[start : start + len(part)] = part

        self._loaders.take(ticket, put)
        inputs, targets = batch
        dtype = self._dtype if inputs.is_floating_point() else inputs.dtype
        return inputs.to(dtype), targets

    def _room(self, like: Tensor, num_samples: int) -> Tensor:
        """For a whole batch, laid out like one of its pieces."""
        is_last = (
            like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous()
        )
        layout = torch.channels_last if is_last else torch.contiguous_format
        shape = (num_samples, *like.shape[1:])
        return torch.empty(shape, dtype=like.dtype, memory_format=layout, pin_memory=self._pinned)

    def _forget(self, tickets: dict[Any, Ticket]) -> None:
        for ticket in tickets.values():
            self._loaders.abandon(ticket)
        tickets.clear()


class _Maker:
    """What a loader does with a request."""

    def __init__(self, inner: Batches) -> None:
        self._inner = inner

    def __call__(self, request: Request) -> Made:
        if request[0] == "train":
            return self._inner.train(request[1])
        return self._inner.test(request[1], request[2])


def announced(batches: Batches, shards: Iterable[Shard]) -> Iterator[Shard]:
    """The shards, made known ahead of time where loaders can use that."""
    return batches.announce(shards) if isinstance(batches, AheadBatches) else iter(shards)


def _name(shard: Shard) -> bytes:
    return np.array([shard.epoch, shard.step], np.int64).tobytes() + shard.indices.tobytes()


def _sample_bytes(inner: Batches) -> int:
    one = inner.train(Shard(0, 0, np.zeros(1, np.int64), 1, 1))
    return sum(tensor.numel() * tensor.element_size() for tensor in one)
