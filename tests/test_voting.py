"""Ranks that vote: one order for all of them, the urgent first, and no rank that waits for ever."""

from __future__ import annotations

import time

import pytest
import torch
from helpers import on_threads

from syncline.comm import Communicator
from syncline.errors import CommunicationError
from syncline.spans import EventLog
from syncline.sync.voting import VotingSender

CHUNKS = 6
URGENCY = list(reversed(range(CHUNKS)))


def sender_on(communicator: Communicator) -> VotingSender:
    return VotingSender([communicator.split("chunks")], "native", None, communicator.split("votes"))


def chunks_in_log(log: EventLog) -> list[int]:
    """As they were started."""
    sent = [record for record in log.records if str(record.get("label")).startswith("bucket ")]
    return [int(record["label"].split()[1]) for record in sorted(sent, key=lambda record: record["start"])]


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_send_in_one_order_though_each_is_ready_in_its_own(world_size: int) -> None:
    def live(communicator: Communicator, log: EventLog) -> list[list[int]]:
        sender, orders = sender_on(communicator), []
        for round_number in range(4):
            log.records.clear()
            values = [torch.full((50,), float(10 * communicator.rank + chunk)) for chunk in range(CHUNKS)]
            sender.begin(URGENCY)
            drawn = torch.Generator().manual_seed(100 * communicator.rank + round_number)
            for chunk in torch.randperm(CHUNKS, generator=drawn).tolist():
                sender.offer(chunk, values[chunk], time.monotonic_ns())
                time.sleep(0.002 * communicator.rank)
            for chunk in range(CHUNKS):
                sender.wait(chunk)
                assert values[chunk][0] == sum(10 * rank + chunk for rank in range(world_size))
            orders.append(chunks_in_log(log))
        sender.stop()
        return orders

    first, *others = on_threads(world_size, live)
    assert all(sorted(order) == list(range(CHUNKS)) for order in first)
    assert all(other == first for other in others)


def test_two_go_unasked_and_then_what_is_ready_everywhere_by_urgency() -> None:
    def live(communicator: Communicator, log: EventLog) -> list[int]:
        sender = sender_on(communicator)
        values = torch.zeros(CHUNKS, 50)
        sender.begin(URGENCY)
        with sender._changed:  # so that the first vote sees them all
            for chunk in range(CHUNKS):
                sender.offer(chunk, values[chunk], time.monotonic_ns())
        for chunk in range(CHUNKS):
            sender.wait(chunk)
        sender.stop()
        assert sender.seconds_per_byte > 0  # the last ones followed each other without a vote
        return chunks_in_log(log)

    assert on_threads(2, live) == [[0, 1, 5, 4, 3, 2]] * 2


def test_sender_that_is_stopped_in_the_middle_ends() -> None:
    def live(communicator: Communicator, log: EventLog) -> bool:
        sender = sender_on(communicator)
        sender.begin(URGENCY)
        sender.offer(0, torch.zeros(5), time.monotonic_ns())
        sender.wait(0)
        sender.stop()  # the others are never offered
        return sender._thread is None

    assert on_threads(2, live) == [True, True]


def test_rank_that_never_votes_is_an_error_where_it_is_waited_for() -> None:
    def live(communicator: Communicator, log: EventLog) -> str:
        sender = sender_on(communicator)
        if communicator.rank == 1:
            return ""
        sender.begin(URGENCY)
        sender.offer(0, torch.zeros(5), time.monotonic_ns())
        with pytest.raises(CommunicationError) as caught:
            sender.wait(0)
        return str(caught.value)

    said, _ = on_threads(2, live, deadline_s=4)
    assert "rank 1" in said
