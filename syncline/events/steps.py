"""One step as typed data, and all steps of a method as a sequence that makes them when they are asked for.

A run of a night has a hundred thousand steps. What is asked of all of them (numbers, sessions, who took part, how
long they took) is held in arrays; a step's phases and transfers are read from its log when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from syncline.blocks import Ints


@dataclass(frozen=True)
class Phase:
    """data, copy, forward, backward, sync or update: what the step says it does."""

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class Transfer:
    """One operation between ranks. `ready` is when this rank had what it sends."""

    name: str
    label: str
    num_bytes: int
    ready: int
    start: int
    end: int


@dataclass(frozen=True)
class Pack:
    """Copying or dividing gradients on the computing thread: `busy` nanoseconds between start and end."""

    label: str
    start: int
    end: int
    busy: int


@dataclass(frozen=True)
class RankStep:
    """What one rank did in one step, in order of time."""

    rank: int
    start: int
    end: int
    phases: tuple[Phase, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    packs: tuple[Pack, ...] = ()
    carried: tuple[Transfer, ...] = ()
    """Transfers of the step before, which were still on their way when this one began."""
    stalls: tuple[Phase, ...] = ()
    """Where forward stood still for one of them, by its label."""

    @property
    def duration(self) -> int:
        return self.end - self.start

    def phase(self, name: str) -> Phase | None:
        """The last phase of that name: a user's step may have several backwards."""
        return next((phase for phase in reversed(self.phases) if phase.name == name), None)


@dataclass(frozen=True)
class Step:
    """One step on the ranks that took it to its end."""

    number: int
    session: int
    ranks: dict[int, RankStep]


@dataclass(frozen=True, eq=False)
class Steps(Sequence[Step]):
    """In order of their numbers. A part of them (`steps[3:]`, `chosen`) is Steps again."""

    numbers: Ints
    sessions: Ints
    durations: dict[int, Ints]
    """By rank: nanoseconds of each step, -1 where the rank did not finish it."""
    make: Callable[[int, int, Sequence[int]], Step]
    """From number, session and ranks."""

    @classmethod
    def of(cls, steps: Iterable[Step]) -> Steps:
        """Steps that exist already."""
        made = list(steps)
        ranks = sorted({rank for step in made for rank in step.ranks})
        durations = {
            rank: np.array([step.ranks[rank].duration if rank in step.ranks else -1 for step in made], np.int64)
            for rank in ranks
        }
        by_number = {step.number: step for step in made}
        numbers = np.array([step.number for step in made], np.int64)
        sessions = np.array([step.session for step in made], np.int64)
        return cls(numbers, sessions, durations, lambda number, _session, _ranks: by_number[number])

    @property
    def ranks(self) -> list[int]:
        """Those that take part in any of them."""
        return [rank for rank, own in sorted(self.durations.items()) if bool((own >= 0).any())]

    @property
    def longest(self) -> Ints:
        """The slowest rank's time of each step, in nanoseconds."""
        if not self.durations:
            return np.zeros(len(self), np.int64)
        longest: Ints = np.maximum.reduce(list(self.durations.values()))
        return longest

    def complete(self) -> Steps:
        """Those that every rank which takes part has finished."""
        finished = np.ones(len(self), bool)
        for rank in self.ranks:
            finished &= self.durations[rank] >= 0
        return self.chosen(finished)

    def chosen(self, which: NDArray[Any] | Sequence[int] | slice) -> Steps:
        """By indices or a mask."""
        own = {rank: durations[which] for rank, durations in self.durations.items()}
        return Steps(self.numbers[which], self.sessions[which], own, self.make)

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> Step: ...

    @overload
    def __getitem__(self, index: slice) -> Steps: ...

    def __getitem__(self, index: int | slice) -> Step | Steps:
        if isinstance(index, slice):
            return self.chosen(index)
        ranks = [rank for rank, own in sorted(self.durations.items()) if own[index] >= 0]
        return self.make(int(self.numbers[index]), int(self.sessions[index]), ranks)

    def __iter__(self) -> Iterator[Step]:
        return (self[index] for index in range(len(self)))


NO_STEPS = Steps.of(())


def joined(parts: Sequence[tuple[int, Mapping[int, tuple[Ints, Ints]]]], make: Callable[..., Step]) -> Steps:
    """From (session, by rank: numbers and durations) in order: of a step that was repeated, the last time counts."""
    last: dict[int, int] = {}
    for session, by_rank in parts:
        for numbers, _ in by_rank.values():
            last.update(dict.fromkeys(numbers.tolist(), session))
    numbers = np.array(sorted(last), np.int64)
    sessions = np.array([last[number] for number in numbers.tolist()], np.int64)
    durations: dict[int, Ints] = {}
    for session, by_rank in parts:
        for rank, (own, lengths) in by_rank.items():
            at = np.searchsorted(numbers, own)
            current = sessions[at] == session
            durations.setdefault(rank, np.full(len(numbers), -1, np.int64))[at[current]] = lengths[current]
    return Steps(numbers, sessions, durations, make)
