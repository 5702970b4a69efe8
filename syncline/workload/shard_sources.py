"""Where a loader's global batches come from, and how a rank gets its part of one: samples by number, or a stream.

Every rank must find the same global batches. An order that is drawn at random is therefore drawn from (seed, epoch)
alone, whoever draws it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from syncline.errors import UsageError
from syncline.workload.sharding import Sharding, part_of

Last = Literal["uneven", "drop", "pad"]
STAND_INS = 2
"""Samples for a rank that has none; two, because batch norm cannot take one."""
Part = tuple[Any, int, int]
"""A rank's batch, how many of its samples count, and how many the global batch has."""


class Samples(Protocol):
    """Samples by number: a map-style Dataset, or a list."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Order(Protocol):
    """The global batches of every epoch, as sample numbers: the same on every rank."""

    def batches(self, epoch: int, start: int) -> Iterator[Sequence[int]]:
        """Those of an epoch, from a step on."""

    def __len__(self) -> int:
        """Batches of an epoch."""


class ByNumber:
    """All samples, shuffled by (seed, epoch) or in order."""

    def __init__(self, num_samples: int, global_batch: int, *, seed: int, shuffle: bool, last: Last) -> None:
        self._sharding, self._last = Sharding(num_samples, global_batch, seed, shuffle=shuffle), last

    def __len__(self) -> int:
        return num_batches(self._sharding.num_samples, self._sharding.global_batch, self._last)

    def batches(self, epoch: int, start: int) -> Iterator[Sequence[int]]:
        for step in range(start, len(self)):
            batch: list[int] = self._sharding.batch(epoch, step).tolist()
            if self._last == "pad":
                batch = filled(batch, self._sharding.batch(epoch, 0).tolist(), self._sharding.global_batch)
            yield batch


class BySampler:
    """The order of a user's own sampler, in batches of a size; or the batches of a user's own batch sampler."""

    def __init__(self, sampler: Iterable[Any], global_batch: int | None, *, seed: int, last: Last) -> None:
        self._sampler, self._global_batch, self._seed, self._last = sampler, global_batch, seed, last

    def __len__(self) -> int:
        length = len(self._sampler)  # type: ignore[arg-type]
        return length if self._global_batch is None else num_batches(length, self._global_batch, self._last)

    def batches(self, epoch: int, start: int) -> Iterator[Sequence[int]]:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        with seeded(mixed_seed(self._seed, epoch), generators_of(self._sampler)):
            drawn = list(self._sampler)
        size = self._global_batch
        if size is None:
            yield from drawn[start:]
            return
        for step in range(start, num_batches(len(drawn), size, self._last)):
            batch = drawn[step * size : (step + 1) * size]
            yield filled(batch, drawn, size) if self._last == "pad" else batch


def num_batches(num_samples: int, size: int, last: Last) -> int:
    return num_samples // size if last == "drop" else math.ceil(num_samples / size)


def filled(batch: Sequence[Any], source: Sequence[Any], size: int) -> list[Any]:
    """Up to the size with samples from the beginning of the source, over and over where it is short."""
    missing = size - len(batch)
    return [*batch, *(source[number % len(source)] for number in range(missing))]


def own_part(batch: Sequence[Any], rank: int, world_size: int) -> tuple[list[Any], int]:
    """A rank's part of a global batch and how many of it count: none of the stand-ins that an empty part gets."""
    part = list(batch[part_of(len(batch), rank, world_size)])
    return (part, len(part)) if part else (filled([], batch, STAND_INS), 0)


class Indices(list[int]):
    """The sample numbers of one batch. A worker process seeds its random generators before it makes the batch: what a
    transform draws follows from the batch, not from the worker or from where a stopped run goes on."""

    place: tuple[int, ...] = (0,)
    """What the seed follows from."""

    @classmethod
    def of(cls, numbers: Iterable[int], *place: int) -> Self:
        made = cls(numbers)
        made.place = place
        return made

    def __iter__(self) -> Iterator[int]:
        if get_worker_info() is not None:
            seed_all(mixed_seed(*self.place))
        return super().__iter__()


@dataclass(frozen=True)
class TakePart:
    """As collate_fn of a stream's DataLoader: from the samples of a global batch to this rank's batch."""

    collate: Callable[[list[Any]], Any]
    rank: int
    world_size: int
    fill_to: int | None = None
    """Size to pad a short batch to."""

    def __call__(self, samples: list[Any]) -> Part:
        if self.fill_to is not None and len(samples) < self.fill_to:
            samples = filled(samples, samples, self.fill_to)
        part, counted = own_part(samples, self.rank, self.world_size)
        return self.collate(part), counted, len(samples)


@dataclass(frozen=True)
class CutPart:
    """As collate_fn where the dataset gives whole batches: this rank's rows of one."""

    collate: Callable[[Any], Any]
    rank: int
    world_size: int

    def __call__(self, batch: Any) -> Part:
        batch = self.collate(batch)
        size = num_rows(batch)
        rows, counted = own_part(range(size), self.rank, self.world_size)
        return cut_rows(batch, rows, size), counted, size


def num_rows(batch: Any) -> int:
    """Of the first column that has rows."""
    for column in _columns(batch):
        return len(column)
    raise UsageError(
        f"a batch of type {type(batch).__name__} has no rows to divide among ranks.",
        action="Let the dataset give samples, or batches of tensors.",
    )


def _columns(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor | np.ndarray):
        if value.ndim:
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _columns(item)
    elif isinstance(value, tuple | list):
        if _is_column(value):
            yield value
        for item in value:
            yield from _columns(item)


def _is_column(value: Sequence[Any]) -> bool:
    """A list of texts and such, one for each row."""
    nested = (Tensor, np.ndarray, Mapping, tuple, list)
    return isinstance(value, list) and not any(isinstance(item, nested) for item in value)


def cut_rows(value: Any, rows: list[int], size: int) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return value[rows] if value.ndim and len(value) == size else value
    if isinstance(value, Mapping):
        return {key: cut_rows(item, rows, size) for key, item in value.items()}
    if isinstance(value, list) and _is_column(value):
        return [value[row] for row in rows] if len(value) == size else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cut_rows(item, rows, size) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(cut_rows(item, rows, size) for item in value)
    return value


def mixed_seed(*numbers: int) -> int:
    """One seed from several numbers, unrelated to that of their neighbours."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


def seed_all(seed: int) -> None:
    """The CPU's generators: those that a dataset draws from."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def generators_of(sampler: Any) -> list[torch.Generator]:
    """The sampler's own, and that of the sampler in a batch sampler."""
    owners = [sampler, getattr(sampler, "sampler", None)]
    return [owner.generator for owner in owners if isinstance(getattr(owner, "generator", None), torch.Generator)]


@contextmanager
def seeded(seed: int, generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Inside, what is drawn follows from the seed. The process's generators are put back."""
    before = _states()
    try:
        seed_all(seed)
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        _set_states(before)


def drawn_apart(batches: Iterable[Any], seed: int) -> Iterator[Any]:
    """The same batches, made with random generators that start at the seed and are nobody else's: a stream that
    shuffles itself is the same on every rank, and the process's own draws are as if there were no stream."""
    outside = _states()
    seed_all(seed)
    upcoming = iter(batches)
    while True:
        try:
            batch = next(upcoming)
        except StopIteration:
            return
        finally:
            inside = _states()
            _set_states(outside)
        yield batch
        outside = _states()
        _set_states(inside)


def _states() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _set_states(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
