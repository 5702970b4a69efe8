"""Schedule: a collective as data, before it is action.

A buffer is cut into chunks. A schedule is rounds of transfers; in a round, all transfers are in flight together and
send what the source held when the round began. What runs, what is drawn and what is priced is this one object.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Op = Literal["add", "copy"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """`source`'s chunk goes to `target`, where it is added to the chunk or takes its place."""

    source: int
    target: int
    chunk: int
    op: Op


Round = tuple[Transfer, ...]


@dataclass(frozen=True)
class Schedule:
    name: str
    world_size: int
    num_chunks: int
    rounds: tuple[Round, ...]

    def chunks_sent(self, rank: int) -> int:
        """Chunks that a rank sends in all; times the bytes of a chunk, what its link carries."""
        return sum(transfer.source == rank for transfers in self.rounds for transfer in transfers)


def chunk_bounds(num_elements: int, num_chunks: int) -> list[tuple[int, int]]:
    """Where each chunk starts and ends; sizes differ by at most one, and chunks may be empty."""
    size, extra = divmod(num_elements, num_chunks)
    edges = [0]
    for chunk in range(num_chunks):
        edges.append(edges[-1] + size + (chunk < extra))
    return list(pairwise(edges))


class ScheduleError(ValueError):
    """A schedule that does not compute the sum; says where it goes wrong."""


def check(schedule: Schedule) -> None:
    """Prove on integers that every rank ends with the full sum and no chunk is used before it arrives.

    Rank r starts with (n+1)^r: in that base, the digits of any result say how often each rank was counted.
    """
    world_size = schedule.world_size
    held = [[(world_size + 1) ** rank] * schedule.num_chunks for rank in range(world_size)]
    for number, transfers in enumerate(schedule.rounds):
        _check_round(schedule, number, transfers)
        before = [list(chunks) for chunks in held]
        for transfer in transfers:
            value = before[transfer.source][transfer.chunk]
            if transfer.op == "add":
                held[transfer.target][transfer.chunk] += value
            else:
                held[transfer.target][transfer.chunk] = value
    full = sum((world_size + 1) ** rank for rank in range(world_size))
    for rank, chunks in enumerate(held):
        for chunk, value in enumerate(chunks):
            if value != full:
                raise ScheduleError(f"{schedule.name}: rank {rank} ends with {value} in chunk {chunk}, not {full}")


def _check_round(schedule: Schedule, number: int, transfers: Round) -> None:
    where = f"{schedule.name}, round {number}"
    ranks, chunks = range(schedule.world_size), range(schedule.num_chunks)
    sent = {(transfer.source, transfer.chunk) for transfer in transfers}
    received = [(transfer.target, transfer.chunk) for transfer in transfers]
    copied = {(transfer.target, transfer.chunk) for transfer in transfers if transfer.op == "copy"}
    for transfer in transfers:
        if transfer.source not in ranks or transfer.target not in ranks or transfer.chunk not in chunks:
            raise ScheduleError(f"{where}: {transfer} names a rank or chunk that does not exist")
        if transfer.source == transfer.target:
            raise ScheduleError(f"{where}: rank {transfer.source} sends to itself")
    if clash := sent & set(received):
        rank, chunk = min(clash)
        raise ScheduleError(f"{where}: rank {rank} sends chunk {chunk} before what it receives into it has arrived")
    for place in copied:
        if received.count(place) > 1:
            raise ScheduleError(f"{where}: rank {place[0]} receives chunk {place[1]} twice and keeps one")


@dataclass(frozen=True)
class Message:
    """Elements start to stop of the buffer, to or from a peer."""

    peer: int
    start: int
    stop: int
    op: Op


@dataclass(frozen=True)
class RankRound:
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


def rank_rounds(schedule: Schedule, rank: int, num_elements: int) -> tuple[RankRound, ...]:
    """One rank's messages, round by round; rounds without any are left out."""
    bounds = chunk_bounds(num_elements, schedule.num_chunks)
    rounds = []
    for transfers in schedule.rounds:
        sends = [(t.target, *bounds[t.chunk], t.op) for t in transfers if t.source == rank]
        receives = [(t.source, *bounds[t.chunk], t.op) for t in transfers if t.target == rank]
        messages = RankRound(_merged(sends), _merged(receives))
        if messages.sends or messages.receives:
            rounds.append(messages)
    return tuple(rounds)


def _merged(parts: list[tuple[int, int, int, Op]]) -> tuple[Message, ...]:
    """Chunks that lie side by side and go the same way become one message; empty ones are dropped."""
    messages: list[Message] = []
    for peer, start, stop, op in sorted(parts):
        last = messages[-1] if messages else None
        if last and last.peer == peer and last.stop == start and last.op == op:
            messages[-1] = Message(peer, last.start, stop, op)
        elif stop > start:
            messages.append(Message(peer, start, stop, op))
    return tuple(messages)
