"""Wrapper: a Communicator around another one. Subclasses are named by what they add."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from syncline.comm.communicator import Communicator, Operation, Work


class Wrapper(Communicator):
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
