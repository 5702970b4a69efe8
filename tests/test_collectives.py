"""Collectives: every pattern is proven on integers, wrong schedules are caught, the executor does what they say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers import on_threads
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from syncline.collectives.execute import Executor
from syncline.collectives.patterns import PATTERNS, make_schedule
from syncline.collectives.schedule import Round, Schedule, ScheduleError, Transfer, check, chunk_bounds, rank_rounds
from syncline.comm import Communicator
from syncline.comm.communicator import Operation, Work, Wrapper
from syncline.comm.threads import run_threads
from syncline.measure.certify import judge_sum
from syncline.spans import EventLog

WORLD_SIZES = range(1, 18)
ELEMENT_COUNTS = [0, 1, 2, 7, 1000]
WIRES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern_is_proven(pattern: str, world_size: int) -> None:
    schedule = make_schedule(pattern, world_size)
    check(schedule)
    assert (schedule.name, schedule.world_size) == (pattern, world_size)
    assert (len(schedule.rounds) == 0) == (world_size == 1)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("pattern", ["ring", "direct"])
def test_every_rank_sends_the_least_that_is_possible(pattern: str, world_size: int) -> None:
    schedule = make_schedule(pattern, world_size)
    assert schedule.num_chunks == world_size
    assert {schedule.chunks_sent(rank) for rank in range(world_size)} == {2 * (world_size - 1)}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_number_of_rounds(world_size: int) -> None:
    assert len(make_schedule("ring", world_size).rounds) == 2 * (world_size - 1)
    assert len(make_schedule("direct", world_size).rounds) == (2 if world_size > 1 else 0)
    assert len(make_schedule("root", world_size).rounds) == (2 if world_size > 1 else 0)
    assert len(make_schedule("tree", world_size).rounds) == 2 * (world_size.bit_length() - 1)


@pytest.mark.parametrize("power", range(5))
def test_halving_doubling_takes_two_rounds_per_power_of_two(power: int) -> None:
    schedule = make_schedule("halving-doubling", 2**power)
    assert len(schedule.rounds) == 2 * power
    assert {schedule.chunks_sent(rank) for rank in range(2**power)} == {2 * (schedule.num_chunks - 1)}


@pytest.mark.parametrize("world_size", [3, 5, 6, 7, 9, 17])
def test_halving_doubling_folds_in_ranks_beyond_a_power_of_two(world_size: int) -> None:
    core = 1 << (world_size.bit_length() - 1)
    schedule = make_schedule("halving-doubling", world_size)
    assert len(schedule.rounds) == 2 * (core.bit_length() - 1) + 2
    assert {transfer.source for transfer in schedule.rounds[0]} == set(range(core, world_size))
    assert {transfer.target for transfer in schedule.rounds[-1]} == set(range(core, world_size))
    assert all(schedule.chunks_sent(rank) == schedule.num_chunks for rank in range(core, world_size))


# Wrong schedules.


def with_rounds(schedule: Schedule, rounds: list[Round]) -> Schedule:
    return replace(schedule, rounds=tuple(rounds))


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_transfer_can_be_left_out(pattern: str, world_size: int) -> None:
    schedule = make_schedule(pattern, world_size)
    for number, transfers in enumerate(schedule.rounds):
        for left_out in range(len(transfers)):
            rounds = list(schedule.rounds)
            rounds[number] = transfers[:left_out] + transfers[left_out + 1 :]
            with pytest.raises(ScheduleError):
                check(with_rounds(schedule, rounds))


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_addition_can_be_doubled_and_no_copy_can_clash(pattern: str, world_size: int) -> None:
    schedule = make_schedule(pattern, world_size)
    for number, transfers in enumerate(schedule.rounds):
        for doubled in transfers:
            rounds = list(schedule.rounds)
            rounds[number] = (*transfers, doubled)
            with pytest.raises(ScheduleError, match=r"ends with|twice and keeps one"):
                check(with_rounds(schedule, rounds))


@pytest.mark.parametrize("pattern", ["tree", "ring", "halving-doubling", "root", "direct"])
def test_two_rounds_cannot_be_one(pattern: str) -> None:
    """What the second round sends has not arrived when the first begins."""
    schedule = make_schedule(pattern, 8)
    for number in range(len(schedule.rounds) - 1):
        rounds = list(schedule.rounds)
        rounds[number : number + 2] = [rounds[number] + rounds[number + 1]]
        with pytest.raises(ScheduleError, match=r"before what it receives into it has arrived|ends with|keeps one"):
            check(with_rounds(schedule, rounds))


@pytest.mark.parametrize(
    ("transfers", "words"),
    [
        ([Transfer(0, 1, 0, "add"), Transfer(1, 0, 0, "copy")], "sends chunk 0 before"),
        ([Transfer(0, 2, 0, "copy"), Transfer(1, 2, 0, "copy")], "rank 2 receives chunk 0 twice and keeps one"),
        ([Transfer(0, 2, 0, "add"), Transfer(1, 2, 0, "copy")], "rank 2 receives chunk 0 twice and keeps one"),
        ([Transfer(0, 3, 0, "add")], "a rank or chunk that does not exist"),
        ([Transfer(-1, 0, 0, "add")], "a rank or chunk that does not exist"),
        ([Transfer(0, 1, 1, "add")], "a rank or chunk that does not exist"),
        ([Transfer(1, 1, 0, "add")], "rank 1 sends to itself"),
        ([], "rank 0 ends with 1 in chunk 0, not 21"),
    ],
)
def test_error_says_what_is_wrong_and_where(transfers: list[Transfer], words: str) -> None:
    with pytest.raises(ScheduleError, match=words) as error:
        check(Schedule("mine", 3, 1, (tuple(transfers),)))
    assert str(error.value).startswith("mine")


# Chunks.


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_chunks_cover_everything_once_and_differ_by_at_most_one(num_elements: int, num_chunks: int) -> None:
    bounds = chunk_bounds(num_elements, num_chunks)
    sizes = [stop - start for start, stop in bounds]
    assert len(bounds) == num_chunks
    assert [index for start, stop in bounds for index in range(start, stop)] == list(range(num_elements))
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 0


@pytest.mark.parametrize("num_elements", ELEMENT_COUNTS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_sends_and_receives_of_a_round_are_each_other_s_mirror(pattern: str, num_elements: int) -> None:
    """Rounds without a message are left out per rank, so pairs are compared in order, not by round number."""
    world_size = 5
    schedule = make_schedule(pattern, world_size)
    sent: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
    received: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
    for rank in range(world_size):
        for one in rank_rounds(schedule, rank, num_elements):
            for message in one.sends:
                sent.setdefault((rank, message.peer), []).append((message.start, message.stop, message.op))
            for message in one.receives:
                received.setdefault((message.peer, rank), []).append((message.start, message.stop, message.op))
    assert sent == received
    assert all(stop > start for messages in sent.values() for start, stop, _ in messages)


def test_chunks_that_lie_side_by_side_travel_as_one_message() -> None:
    first = rank_rounds(make_schedule("halving-doubling", 8), 0, 80)[0]
    assert [(message.start, message.stop) for message in first.sends] == [(40, 80)]


# The executor.


def own_integers(rank: int, num_elements: int) -> Tensor:
    return torch.randint(-1000, 1000, (num_elements,), generator=torch.Generator().manual_seed(rank))


def own_floats(rank: int, num_elements: int) -> Tensor:
    return torch.randn(num_elements, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_executor_sums_exactly_in_place(world_size: int) -> None:
    cases = [(pattern, count) for pattern in PATTERNS for count in ELEMENT_COUNTS]

    def live(comm: Communicator, _: EventLog) -> list[Tensor]:
        found = []
        for pattern, count in cases:
            executor = Executor(comm, make_schedule(pattern, world_size))
            with comm.scope(f"{pattern} {count}"):
                buffer = own_integers(comm.rank, count)
                place = buffer.data_ptr()
                executor.sum(buffer, label="numbers")
                assert buffer.data_ptr() == place
            found.append(buffer)
        return found

    for found in on_threads(world_size, live):
        for (pattern, count), total in zip(cases, found, strict=True):
            expected = torch.stack([own_integers(rank, count) for rank in range(world_size)]).sum(0)
            assert torch.equal(total, expected), (pattern, count)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_all_ranks_end_with_the_same_bits_also_over_a_16_bit_wire(world_size: int) -> None:
    cases = [(pattern, wire, count) for pattern in PATTERNS for wire in [None, *WIRES] for count in (3, 1000)]

    def live(comm: Communicator, _: EventLog) -> list[Tensor]:
        found = []
        for pattern, wire, count in cases:
            executor = Executor(comm, make_schedule(pattern, world_size), wire)
            buffer = own_floats(comm.rank, count)
            with comm.scope(f"{pattern} {wire} {count}"):
                executor.sum(buffer)
            found.append(buffer)
        return found

    first, *others = on_threads(world_size, live)
    for number, (pattern, wire, count) in enumerate(cases):
        parts = [own_floats(rank, count) for rank in range(world_size)]
        assert all(torch.equal(other[number], first[number]) for other in others), (pattern, wire, count)
        verdict = judge_sum(first[number] / world_size, parts, wire)
        assert verdict.passed, (pattern, wire, count, verdict)
        if wire is not None and world_size > 1 and count == 1000:
            assert verdict.status == "lossy", "the wire must have rounded"


class Counting(Wrapper):
    """Counts the bytes that a schedule's own messages carry."""

    sent = 0

    def split(self, name: str) -> Communicator:
        return Counting(self.inner.split(name))

    def run(self, operation: Operation, body: Callable[[Communicator], None]) -> None:
        body(self)

    def start(self, operation: Operation) -> Work:
        self.sent += operation.num_bytes * (operation.name == "send")
        return super().start(operation)


def test_16_bit_wire_carries_half_the_bytes() -> None:
    def live(backend: Communicator) -> dict[str, int]:
        sent = {}
        for name, wire in (("exact", None), ("bf16", torch.bfloat16)):
            counting = Counting(backend)
            Executor(counting, make_schedule("ring", 4), wire).sum(torch.ones(1000))
            sent[name] = counting.sent
        return sent

    for sent in run_threads(4, live):
        assert sent == {"exact": 6 * 250 * 4, "bf16": 6 * 250 * 2}


def test_executor_serves_many_sizes_one_after_the_other() -> None:
    """Scratch memory is kept: what an earlier, larger buffer left there must not show."""

    def live(comm: Communicator, _: EventLog) -> list[Tensor]:
        executor = Executor(comm, make_schedule("ring", 3))
        buffers = [own_integers(comm.rank, count) for count in (1000, 10, 5000, 1)]
        for number, buffer in enumerate(buffers):
            with comm.scope(f"turn {number}"):
                executor.sum(buffer)
        return buffers

    expected = [torch.stack([own_integers(rank, n) for rank in range(3)]).sum(0) for n in (1000, 10, 5000, 1)]
    for buffers in on_threads(3, live):
        assert all(torch.equal(one, right) for one, right in zip(buffers, expected, strict=True))
