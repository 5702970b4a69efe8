"""What a probe repeats: each operation with messages of one size, how it starts anew and what it must give.

Values are whole numbers, so that any order of summation gives the same sum, and differ from rank to rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from syncline.comm.communicator import Communicator
from syncline.comm.shared_memory import Barrier, Segment, check_one_host
from syncline.sync.shared_memory import average_pieces, cut_slice

SMALL_BYTES = 1_000_000
MOST_IN_A_ROW = 20
PATTERN = 1021
"""Values repeat after so many elements; a prime, so that a piece that lands in the wrong place shows."""


@dataclass
class Cell:
    """One operation with messages of one size, ready to be repeated; and this rank's times so far."""

    backend: str
    operation: str
    num_bytes: int
    prepare: Callable[[], None]
    run: Callable[[], None]
    is_right: Callable[[], bool]
    share: float = 1.0
    """What part of the time one message is."""
    close: Callable[[], None] = lambda: None
    seconds: list[float] = field(default_factory=list)

    @property
    def in_a_row(self) -> int:
        """Small messages are repeated more often: they are quick, and their times scatter more."""
        return max(1, min(MOST_IN_A_ROW, SMALL_BYTES // self.num_bytes))


def _values(num_bytes: int, rank: int) -> Tensor:
    return (torch.arange(max(1, num_bytes // 4)) % PATTERN + rank).float()


def _sum_of_all(num_bytes: int, world_size: int) -> Tensor:
    ranks = world_size * (world_size - 1) // 2
    return _values(num_bytes, 0) * world_size + ranks


def message_cells(communicator: Communicator, backend: str, sizes: Sequence[int]) -> list[Cell]:
    """All operations over a communicator that sends messages."""
    makers = (_all_reduce, _send_receive, _broadcast, _gather, _scatter)
    return [make(communicator, backend, size) for make in makers for size in sizes]


def _all_reduce(communicator: Communicator, backend: str, size: int) -> Cell:
    own = _values(size, communicator.rank).to(communicator.device)
    expected = _sum_of_all(size, communicator.world_size).to(communicator.device)
    buffer = own.clone()
    return Cell(
        backend, "all_reduce", size,
        prepare=lambda: _set(buffer, own),
        run=lambda: communicator.all_reduce(buffer),
        is_right=lambda: torch.equal(buffer, expected),
    )  # fmt: skip


def _send_receive(communicator: Communicator, backend: str, size: int) -> Cell:
    """Between the first and the last rank, which are on different hosts where there are several."""
    rank, last = communicator.rank, communicator.world_size - 1
    theirs = _values(size, last - rank).to(communicator.device)
    own = _values(size, rank).to(communicator.device)
    buffer = torch.zeros_like(own)

    def there_and_back() -> None:
        if rank == 0:
            communicator.send(own, last).wait()
            communicator.receive(buffer, last).wait()
        elif rank == last:
            communicator.receive(buffer, 0).wait()
            communicator.send(own, 0).wait()

    return Cell(
        backend, "send_receive", size,
        prepare=lambda: _set(buffer, None),
        run=there_and_back,
        is_right=lambda: rank not in (0, last) or torch.equal(buffer, theirs),
        share=0.5,
    )  # fmt: skip


def _broadcast(communicator: Communicator, backend: str, size: int) -> Cell:
    own = _values(size, communicator.rank).to(communicator.device)
    expected = _values(size, 0).to(communicator.device)
    buffer = own.clone()
    return Cell(
        backend, "broadcast", size,
        prepare=lambda: _set(buffer, own),
        run=lambda: communicator.broadcast(buffer),
        is_right=lambda: torch.equal(buffer, expected),
    )  # fmt: skip


def _gather(communicator: Communicator, backend: str, size: int) -> Cell:
    """Each rank sends a message of this size to rank 0."""
    ranks = range(communicator.world_size)
    own = _values(size, communicator.rank).to(communicator.device)
    parts = [torch.zeros_like(own) for _ in ranks] if communicator.rank == 0 else None
    return Cell(
        backend, "gather", size,
        prepare=lambda: _clear(parts or ()),
        run=lambda: communicator.gather(own, parts),
        is_right=lambda: all(torch.equal(part, own + rank) for rank, part in enumerate(parts or ())),
    )  # fmt: skip


def _scatter(communicator: Communicator, backend: str, size: int) -> Cell:
    """Rank 0 sends a message of this size to each rank."""
    ranks = range(communicator.world_size)
    expected = _values(size, communicator.rank).to(communicator.device)
    parts = [_values(size, rank).to(communicator.device) for rank in ranks] if communicator.rank == 0 else None
    buffer = torch.zeros_like(expected)
    return Cell(
        backend, "scatter", size,
        prepare=lambda: _set(buffer, None),
        run=lambda: communicator.scatter(buffer, parts),
        is_right=lambda: torch.equal(buffer, expected),
    )  # fmt: skip


def _set(buffer: Tensor, values: Tensor | None) -> None:
    buffer.zero_() if values is None else buffer.copy_(values)


def _clear(parts: Sequence[Tensor]) -> None:
    for part in parts:
        part.zero_()


def shared_memory_cells(communicator: Communicator, backend: str, sizes: Sequence[int]) -> list[Cell]:
    """All that memory does for gradients: the sum over all ranks. Collective, and on one host only."""
    check_one_host(communicator)
    return [_shared_sum(communicator, backend, size) for size in sizes]


def _shared_sum(communicator: Communicator, backend: str, size: int) -> Cell:
    rank, world_size = communicator.rank, communicator.world_size
    own, expected = _values(size, rank), _sum_of_all(size, world_size)
    segment = Segment(communicator, own.nbytes * world_size)
    barrier = Barrier(segment, communicator)
    row = [segment.tensor(torch.float32, own.numel(), other * own.nbytes) for other in range(world_size)]
    pieces = cut_slice(row, rank)

    def run() -> None:
        barrier.wait("waiting for all values")
        average_pieces(pieces, None)
        barrier.wait("summing in shared memory")

    return Cell(
        backend, "all_reduce", size,
        prepare=lambda: _set(row[rank], own),
        run=run,
        is_right=lambda: torch.equal(row[rank], expected),
        close=barrier.close,
    )  # fmt: skip


CELLS: dict[str, Callable[[Communicator, str, Sequence[int]], list[Cell]]] = {
    "gloo": message_cells,
    "nccl": message_cells,
    "mpi": message_cells,
    "threads": message_cells,
    "shared-memory": shared_memory_cells,
}
