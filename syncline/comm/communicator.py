"""Communicator: the one seam between ranks.

Every message that Syncline sends is an Operation given to `start`. The verbs below are built on it, so a backend
implements one method, and a wrapper (Checked, Traced, Failing) sees everything by overriding one method.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from syncline.errors import CommunicationError, DeadlineError

if TYPE_CHECKING:  # torch.distributed exports it only where it was built in
    from torch._C._distributed_c10d import Store

OperationName = Literal["all_reduce", "all_gather", "broadcast", "gather", "scatter", "send", "receive", "schedule"]
PAIRWISE = ("send", "receive")


@dataclass(frozen=True, slots=True)
class Operation:
    """One call: what is done to which tensor. `parts` has one tensor per rank, on the root of a gather or scatter."""

    name: OperationName
    tensor: Tensor
    parts: list[Tensor] | None = None
    peer: int | None = None
    """Root of a broadcast, gather or scatter; the other end of a send or receive."""
    label: str = ""
    """What the tensor is, for people: usually a parameter's name."""
    ready_ns: int | None = None
    """When the tensor held its value, if the caller knows; else the moment of the call."""
    waited_later: bool = False
    """The caller does something else before it waits, so the wait says nothing about when the operation ended."""

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


class Work(Protocol):
    """An operation under way. `wait` returns when it is done, or raises a CommunicationError."""

    def wait(self) -> None: ...


@runtime_checkable
class TellsWhenDone(Protocol):
    """A work that can say when it ended to somebody who does not wait for it."""

    def when_done(self, callback: Callable[[], None]) -> None: ...


class Communicator(ABC):
    """A fixed set of ranks that can talk. All ranks must make the same calls in the same order."""

    rank: int
    world_size: int
    deadline_s = 120.0
    """Longest wait for other ranks."""
    host_index = 0
    """Which host this rank is on, as launch says."""
    device = torch.device("cpu")
    """Where a tensor must be to be sent."""
    store: Store
    """A small key-value store that all ranks share; works also when an operation hangs."""

    @abstractmethod
    def start(self, operation: Operation) -> Work:
        """Start the operation; the tensor must not be touched until the returned work was waited for."""

    def run(self, operation: Operation, body: Callable[[Communicator], None]) -> None:
        """Many messages that are one operation: compared, timed and watched as one. Blocks.

        `body` gets the communicator below all wrappers, so that its messages cost no more than they must.
        """
        body(self)

    # For waits that no operation is for, as in shared memory.

    def wait_began(self, what: str) -> None:  # noqa: B027  (only Checked watches over waits)
        """This rank waits for others, for long already."""

    def wait_ended(self, what: str) -> None:  # noqa: B027
        """That wait is over."""

    def overdue(self, what: str, missing: Sequence[int]) -> CommunicationError:
        """The error of a wait that has lasted longer than the deadline."""
        names = ", ".join(f"rank {self.ranks[rank]}" for rank in missing)
        return DeadlineError(f"{what} did not end within {self.deadline_s:g} s; missing: {names}.", rank=self.rank)

    def lost(self, what: str, error: CommunicationError) -> CommunicationError:
        """The error of a wait that has failed, with what is known of the place."""
        return error

    @property
    def backend(self) -> Communicator:
        """The communicator below all wrappers."""
        return self

    @abstractmethod
    def split(self, name: str) -> Communicator:
        """The same ranks on channels of their own, so that another thread can talk at the same time. Collective."""

    def part(self, name: str, groups: Sequence[Sequence[int]]) -> Communicator | None:
        """Channels among some of the ranks: those of the group that this rank is in, or None if it is in none.

        Ranks are numbered anew, in the order of the group; `ranks` says which they are here. Collective.
        """
        raise CommunicationError(f"{type(self).__name__} cannot give some ranks channels of their own.")

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks' numbers in the whole, which differ from 0, 1, … where this is a part of it."""
        return range(self.world_size)

    @abstractmethod
    def close(self) -> None:
        """Leave the group. Not collective: a rank may close while others still work."""

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Names a passage that recurs, such as 'gradients'. Positions are counted from its start (see Checked)."""
        yield

    def all_reduce(self, tensor: Tensor, *, label: str = "", ready_ns: int | None = None) -> None:
        """Sum over all ranks, in place."""
        self.start(Operation("all_reduce", tensor, label=label, ready_ns=ready_ns)).wait()

    def all_gather(self, tensor: Tensor, *, label: str = "") -> list[Tensor]:
        """Every rank's tensor, by rank."""
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        self.start(Operation("all_gather", tensor, parts, label=label)).wait()
        return parts

    def broadcast(self, tensor: Tensor, *, root: int = 0, label: str = "") -> None:
        """The root's values on every rank, in place."""
        self.start(Operation("broadcast", tensor, peer=root, label=label)).wait()

    def gather(
        self, tensor: Tensor, parts: list[Tensor] | None, *, root: int = 0, label: str = "",
        ready_ns: int | None = None,
    ) -> None:  # fmt: skip
        """Every rank's tensor into the root's `parts`; other ranks give None."""
        self.start(Operation("gather", tensor, parts, root, label, ready_ns)).wait()

    def scatter(self, tensor: Tensor, parts: list[Tensor] | None, *, root: int = 0, label: str = "") -> None:
        """The root's `parts[rank]` into each rank's tensor, in place; other ranks give None."""
        self.start(Operation("scatter", tensor, parts, root, label)).wait()

    def send(self, tensor: Tensor, target: int, *, label: str = "", ready_ns: int | None = None) -> Work:
        return self.start(Operation("send", tensor, peer=target, label=label, ready_ns=ready_ns))

    def receive(self, tensor: Tensor, source: int, *, label: str = "") -> Work:
        """Into `tensor`, in place, once the returned work was waited for."""
        return self.start(Operation("receive", tensor, peer=source, label=label))


class Wrapper(Communicator):
    """A Communicator around another one. Subclasses are named by what they add."""

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.deadline_s = inner.deadline_s
        self.host_index = inner.host_index
        self.device = inner.device
        self.store = inner.store

    @property
    def backend(self) -> Communicator:
        return self.inner.backend

    @property
    def ranks(self) -> Sequence[int]:
        return self.inner.ranks

    def run(self, operation: Operation, body: Callable[[Communicator], None]) -> None:
        self.inner.run(operation, body)

    def start(self, operation: Operation) -> Work:
        return self.inner.start(operation)

    def close(self) -> None:
        self.inner.close()
