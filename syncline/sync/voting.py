"""A sender that decides while it sends: of the chunks that are ready on every rank, the one that is needed first.

A list that was planned beforehand waits for its head: where a step's backward takes another course than the planned
one, the link stands idle though other chunks are ready. Here ranks vote. Each says which chunks are ready on it; the
sum of these ballots, one small all-reduce on a channel of its own, tells all of them the same, so they all choose the
same chunk without a leader. A ballot waits behind the bytes that are on their way, so the vote on a chunk is held
while the two before it travel, and costs the link nothing. It goes from each rank to each other one, because every
further hop would wait behind gradients again. The first two chunks need no vote: they are those whose gradients were
ready first when the buffers were laid out, and a vote on them would leave the link idle. When a vote finds all that
is left ready on all ranks, the rest goes by urgency without further votes.

The order changes no result: which gradients are summed with which is a matter of the layout.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from syncline.comm.communicator import Communicator, Operation, Work
from syncline.comm.traced import Traced
from syncline.methods import Collective
from syncline.sync.bucketed import Sender, Task, mark_stream

IN_FLIGHT = 2
MOST_DIRECT = 8
"""Ranks that hand their ballots to each other. Among more, the messages would cost more than a ring's hops."""


class VotingSender(Sender):
    """Sends chunk by chunk like any sender (`send`, `collect`); or a whole round, in which each chunk is offered
    once: `begin`, `offer` as they become ready, and `wait` for each."""

    def __init__(
        self,
        channels: list[Communicator],
        collective: Collective,
        wire_dtype: torch.dtype | None,
        votes: Communicator,
    ) -> None:
        super().__init__(channels, collective, wire_dtype)
        # A ballot is no transfer of gradients: it would only clutter the log.
        self._votes = votes.inner if isinstance(votes, Traced) else votes
        self._changed = threading.Condition()
        """Guards all below. `offer` and `wait` are called by the thread that trains; the rest is the sender's."""
        self._unsent: list[int] = []
        """Most urgent first."""
        self._count = 0
        self._offered: dict[int, Task] = {}
        self._sent: dict[int, Work] = {}
        self._failure: BaseException | None = None
        self._stopped = False
        self.seconds_per_byte = 0.0
        """Of the last round's chunks that were ready on all ranks before the link was free for them, with the votes
        and beside compute. 0 if that is not known."""

    def begin(self, by_urgency: Sequence[int]) -> None:
        """A round of these chunks. All of the round before must have been waited for."""
        with self._changed:
            self._unsent, self._offered, self._sent = list(by_urgency), {}, {}
            self._count = len(by_urgency)
        self._put(self._round)

    def offer(self, number: int, values: Tensor, ready_ns: int, before: Callable[[], None] | None = None) -> None:
        """`before` runs first, in the sending thread."""
        with self._changed:
            self._offered[number] = Task(number, values, ready_ns, before, mark_stream(values))
            self._changed.notify_all()

    def wait(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: number in self._sent or self._failure is not None)
            if self._failure is not None:
                raise self._failure
        self._sent[number].wait()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        super().stop()
        self._stopped = False

    def _round(self) -> None:
        try:
            self._send_all()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _send_all(self) -> None:
        on_their_way: deque[tuple[int, Work, int, bool]] = deque()
        ends: list[tuple[int, int, bool]] = []
        """Of each chunk: when it had arrived, its bytes, and whether nothing but the link held it up."""
        all_ready = is_ready = False

        def end_first() -> None:
            sent, work, num_bytes, was_ready = on_their_way.popleft()
            self._wait_in_turn(sent, work)
            ends.append((time.monotonic_ns(), num_bytes, was_ready))

        for _ in range(self._count):  # and not until none is left: the next round may have begun by then
            number = self._unsent[0]
            if self._count - len(self._unsent) < IN_FLIGHT:
                number = min(self._unsent)
            elif not all_ready:
                if not self._wait_until_offered(*self._unsent):
                    return
                number, is_ready, all_ready = self._elect()
            if not self._wait_until_offered(number):
                return
            if len(on_their_way) == IN_FLIGHT:
                end_first()
            self._unsent.remove(number)
            task = self._offered.pop(number)
            work, num_bytes = self._start(task), task.values.nbytes
            del task  # it may hold the method
            on_their_way.append((number, self._publish_at_once(number, work), num_bytes, is_ready))
        while on_their_way:
            end_first()
        behind = [(end[0] - before[0], end[1]) for before, end in pairwise(ends) if end[2]]
        if sum(num_bytes for _, num_bytes in behind):
            self.seconds_per_byte = sum(ns for ns, _ in behind) / 1e9 / sum(num_bytes for _, num_bytes in behind)

    def _publish_at_once(self, number: int, work: Work) -> Work:
        """Whoever wants the chunk may wait for it himself."""
        shared = _WaitedOnce(work)
        self._publish(number, shared)
        return shared

    def _wait_in_turn(self, number: int, work: Work) -> None:
        """In the sending thread, in the order of sending, the same on all ranks."""
        work.wait()

    def _publish(self, number: int, work: Work) -> None:
        with self._changed:
            self._sent[number] = work
            self._changed.notify_all()

    def _wait_until_offered(self, *numbers: int) -> bool:
        """Until one of these is; False if the round is over, because the sender was stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or any(number in self._offered for number in numbers))
            return not self._stopped

    def _elect(self) -> tuple[int, bool, bool]:
        """The chunk that most ranks have ready, the most urgent of several; whether all ranks have it; and whether
        all ranks have all that is left."""
        ballot = torch.zeros(self._count, device=self._votes.device)
        with self._changed:
            ready = [number for number in self._unsent if number in self._offered]
        ballot[ready] = 1
        counts = self._sum(ballot).tolist()
        first = max(self._unsent, key=lambda number: counts[number])
        everywhere = [counts[number] == self._votes.world_size for number in (first, *self._unsent)]
        return first, everywhere[0], all(everywhere)

    def _sum(self, ballot: Tensor) -> Tensor:
        votes = self._votes
        with votes.scope("vote"):
            if votes.world_size > MOST_DIRECT:
                votes.all_reduce(ballot, label="vote")
                return ballot
            ballots = ballot.repeat(votes.world_size, 1)
            votes.run(Operation("schedule", ballot, label="vote"), lambda backend: _exchange(backend, ballots))
            return ballots.sum(0)


def _exchange(backend: Communicator, ballots: Tensor) -> None:
    """Every rank's row reaches all others."""
    own = ballots[backend.rank]
    peers = [peer for peer in range(backend.world_size) if peer != backend.rank]
    works = [backend.receive(ballots[peer], peer) for peer in peers]
    works += [backend.send(own, peer) for peer in peers]
    for work in works:
        work.wait()


class _WaitedOnce:
    """For two threads: the one that trains waits for what it needs, the sender for the link to be free."""

    def __init__(self, work: Work) -> None:
        self._work: Work | None = work
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            if self._work is not None:
                self._work.wait()
                self._work = None
