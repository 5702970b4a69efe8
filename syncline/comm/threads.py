"""Ranks as threads in one process: the same Communicator without processes, sockets or ports.

For tests and for looking closely. Sums are in rank order. Torch's random generator is shared by all threads,
so models with dropout do not belong here.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.comm.communicator import PAIRWISE, Communicator, Operation, Work
from syncline.errors import CommunicationError, DeadlineError, PeerLostError

Result = TypeVar("Result")


class ThreadWorld:
    """What the ranks of one process share. Collectives meet on a board; the last to arrive does the work."""

    def __init__(
        self, world_size: int, *, deadline_s: float = 30.0, hosts: Sequence[int] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.world_size = world_size
        self.hosts = hosts or [0] * world_size
        """Which host each rank is on: as if, for threads are never further apart than this process."""
        self.ranks = ranks or range(world_size)
        self.deadline_s = deadline_s
        self.store = dist.HashStore()
        self.changed = threading.Condition()
        self.board: dict[int, dict[int, Operation]] = defaultdict(dict)
        self.messages: dict[tuple[int, int, int], Tensor] = {}
        """By sender, receiver and how many went that way before."""
        self.done: set[int] = set()
        self.lost: set[int] = set()
        self.children: dict[str, ThreadWorld] = {}

    def meet(self, position: int, rank: int, operation: Operation) -> None:
        """Called by every rank with its operation at a position; the last to arrive carries it out for all."""
        with self.changed:
            self.board[position][rank] = operation
            if len(self.board[position]) == self.world_size:
                operations = self.board.pop(position)
                _carry_out([operations[rank] for rank in range(self.world_size)])
                self.done.add(position)
                self.changed.notify_all()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait with `changed` held, until the condition, a lost rank, or the deadline."""
        end = time.monotonic() + self.deadline_s
        while not condition():
            if self.lost:
                raise PeerLostError(f"rank {self.ranks[min(self.lost)]} has left.")
            if not self.changed.wait(max(0.0, end - time.monotonic())) and time.monotonic() >= end:
                raise DeadlineError("the deadline passed.")

    def child(self, name: str, members: Sequence[int]) -> ThreadWorld:
        """A world of some or all of the ranks with a board of its own; the first rank to ask makes it."""
        with self.changed:
            if name not in self.children:
                self.children[name] = ThreadWorld(
                    len(members), deadline_s=self.deadline_s, hosts=[self.hosts[rank] for rank in members],
                    ranks=[self.ranks[rank] for rank in members],
                )  # fmt: skip
            return self.children[name]

    def leave(self, rank: int) -> None:
        """A rank that failed says so, and the others stop waiting for it."""
        with self.changed:
            self.lost.add(rank)
            self.changed.notify_all()
        name = self.ranks[rank]
        for child in self.children.values():
            if name in child.ranks:
                child.leave(child.ranks.index(name))


class ThreadCommunicator(Communicator):
    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.world_size = world.world_size
        self.host_index = world.hosts[rank]
        self.store = world.store
        self._position = 0
        self._splits = 0
        self._sent: Counter[tuple[str, int]] = Counter()

    def start(self, operation: Operation) -> Work:
        if operation.name in PAIRWISE:
            return self._start_pairwise(operation)
        position = self._position
        self._position += 1
        self.world.meet(position, self.rank, operation)
        return _Waiting(self.world, lambda: position in self.world.done)

    def _start_pairwise(self, operation: Operation) -> Work:
        assert operation.peer is not None
        ends = (operation.peer, self.rank) if operation.name == "receive" else (self.rank, operation.peer)
        # Numbered when they start: messages arrive in the order of the calls, whatever is waited for first.
        number = self._sent[operation.name, operation.peer]
        self._sent[operation.name, operation.peer] += 1
        if operation.name == "receive":
            return _Receiving(self.world, (*ends, number), operation.tensor)
        with self.world.changed:
            self.world.messages[*ends, number] = operation.tensor.detach().clone()
            self.world.changed.notify_all()
        return _Waiting(self.world, lambda: True)

    def split(self, name: str) -> ThreadCommunicator:
        self._splits += 1
        child = self.world.child(f"{name}#{self._splits}", range(self.world_size))
        return ThreadCommunicator(child, self.rank)

    def part(self, name: str, groups: Sequence[Sequence[int]]) -> ThreadCommunicator | None:
        self._splits += 1
        own = next((group for group in groups if self.rank in group), None)
        if own is None:
            return None
        return ThreadCommunicator(self.world.child(f"{name}#{self._splits}/{own[0]}", own), own.index(self.rank))

    @property
    def ranks(self) -> Sequence[int]:
        return self.world.ranks

    def close(self) -> None:
        pass


class _Waiting:
    def __init__(self, world: ThreadWorld, condition: Callable[[], bool]) -> None:
        self.world = world
        self.condition = condition

    def wait(self) -> None:
        with self.world.changed:
            self.world.wait_until(self.condition)


class _Receiving(_Waiting):
    def __init__(self, world: ThreadWorld, message: tuple[int, int, int], into: Tensor) -> None:
        super().__init__(world, lambda: message in world.messages)
        self.message = message
        self.into = into

    def wait(self) -> None:
        super().wait()
        self.into.copy_(self.world.messages.pop(self.message))


def _carry_out(operations: list[Operation]) -> None:
    first = operations[0]
    tensors = [operation.tensor for operation in operations]
    root = first.peer or 0
    with torch.no_grad():
        if first.name == "all_reduce":
            _copy_all(tensors, [_sum(tensors)] * len(tensors))
        elif first.name == "broadcast":
            _copy_all(tensors, [tensors[root].clone()] * len(tensors))
        elif first.name == "all_gather":
            for operation in operations:
                _copy_all(operation.parts or [], tensors)
        elif first.name == "gather":
            _copy_all(operations[root].parts or [], tensors)
        elif first.name == "scatter":
            _copy_all(tensors, operations[root].parts or [])
        else:
            raise CommunicationError(f"the threads backend does not know {first.name}.")


def _sum(tensors: list[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def run_threads(
    world_size: int, function: Callable[[Communicator], Result], *, deadline_s: float = 30.0,
    hosts: Sequence[int] | None = None,
) -> list[Result]:  # fmt: skip
    """Run function(communicator) on every rank, each in its own thread; results by rank.

    The first rank's own error is raised; errors that others got because of it are not.
    """
    world = ThreadWorld(world_size, deadline_s=deadline_s, hosts=hosts)
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def live(rank: int) -> None:
        try:
            results[rank] = function(ThreadCommunicator(world, rank))
        except BaseException as error:
            errors.append(error)
            world.leave(rank)

    threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, PeerLostError)), errors[0])
    return [results[rank] for rank in range(world_size)]
