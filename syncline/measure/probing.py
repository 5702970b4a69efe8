"""What the links between ranks can do: each operation by message size, timed and checked, on ranks of any launcher.

All sizes take turns, so that a noisy moment hits each alike. Before each repetition all ranks meet; its time is the
slowest rank's, from leaving the meeting to having its result. A send and its receive are timed there and back, and
half of that counts. After every repetition every rank compares every value of its result with what it must be: whole
numbers, so that any order of summation gives the same sum, and different on every rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from syncline.accounting.bandwidth import bus_factor
from syncline.accounting.statistics import spread
from syncline.comm.communicator import Communicator
from syncline.comm.shared_memory import Barrier, Segment, check_one_host
from syncline.errors import CommunicationError, PlanError
from syncline.measure.fits import fit_line
from syncline.sync.shared_memory import average_pieces, cut_slice
from syncline.units import format_bytes

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


# Visits to the cells, and what they say.

FORMAT = 1
WARMUP_VISITS = 1


class Observer(Protocol):
    def progress(self, done: int, total: int, figures: str) -> None: ...


def run_probe(
    communicator: Communicator, backends: Sequence[str], sizes: Sequence[int], visits: int, observer: Observer
) -> list[dict[str, Any]]:
    """The rows of the probe, the same on every rank. Collective; the communicator is the one without wrappers."""
    if communicator.world_size < 2:
        raise PlanError("a probe sends messages between ranks.", action="Use at least 2 workers.")
    cells = [cell for backend in backends for cell in CELLS[backend](communicator, backend, sizes)]
    total = (WARMUP_VISITS + visits) * len(cells)
    for visit in range(WARMUP_VISITS + visits):
        for number, cell in enumerate(cells):
            what = f"{cell.backend} {cell.operation} {format_bytes(cell.num_bytes)}"
            observer.progress(visit * len(cells) + number, total, what)
            _visit(communicator, cell, counts=visit >= WARMUP_VISITS)
    for cell in cells:
        cell.close()
    return _rows(cells, _slowest(communicator, cells), communicator.world_size)


def _visit(communicator: Communicator, cell: Cell, *, counts: bool) -> None:
    for _ in range(cell.in_a_row):
        cell.prepare()
        communicator.all_reduce(torch.zeros(1, device=communicator.device), label="meet")
        start_ns = time.monotonic_ns()
        cell.run()
        if counts:
            cell.seconds.append((time.monotonic_ns() - start_ns) / 1e9 * cell.share)
        if not cell.is_right():
            raise CommunicationError(
                f"{cell.operation} of {format_bytes(cell.num_bytes)} over {cell.backend} gave wrong values.",
                action="Do not trust any result of this backend.",
                rank=communicator.rank,
            )


def _slowest(communicator: Communicator, cells: Sequence[Cell]) -> list[list[float]]:
    own = torch.tensor([value for cell in cells for value in cell.seconds], dtype=torch.float64)
    by_rank = [part.cpu() for part in communicator.all_gather(own.to(communicator.device))]
    slowest = torch.stack(by_rank).amax(0)
    return [part.tolist() for part in slowest.split([len(cell.seconds) for cell in cells])]


def _rows(cells: Sequence[Cell], seconds: Sequence[Sequence[float]], world_size: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for backend, operation in dict.fromkeys((cell.backend, cell.operation) for cell in cells):
        points = [
            _point(cell, times, world_size)
            for cell, times in zip(cells, seconds, strict=True)
            if (cell.backend, cell.operation) == (backend, operation)
        ]
        fit = fit_line([point["bytes"] for point in points], [point["median_s"] for point in points])
        fitted = {**asdict(fit), "bytes_per_s": fit.bytes_per_s} if fit else None
        rows.append({"backend": backend, "operation": operation, "points": points, "fit": fitted})
    return rows


def _point(cell: Cell, seconds: Sequence[float], world_size: int) -> dict[str, Any]:
    middle = statistics.median(seconds)
    return {
        "bytes": cell.num_bytes,
        "median_s": middle,
        "spread_s": spread(seconds),
        "repeats": len(seconds),
        "bytes_per_s": cell.num_bytes / middle,
        "bus_bytes_per_s": cell.num_bytes / middle * bus_factor(cell.operation, world_size),
    }


def summarise(rows: list[dict[str, Any]], *, workers: int, hosts: int = 1, link: str | None = None) -> dict[str, Any]:
    """What a probe run keeps. `links` is the rate and latency of one link by backend, from one message at a time."""
    return {
        "format": FORMAT,
        "workers": workers,
        "hosts": hosts,
        "link": link,
        "links": {
            row["backend"]: {"bytes_per_s": row["fit"]["bytes_per_s"], "latency_s": row["fit"]["alpha_s"]}
            for row in rows
            if row["operation"] == "send_receive" and row["fit"] and row["fit"]["bytes_per_s"]
        },
        "rows": rows,
    }
