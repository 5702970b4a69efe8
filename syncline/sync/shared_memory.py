"""shared-memory: ranks of one host average their gradients in memory that they share; nothing is sent.

Every rank's flat buffer lies in one segment. When all have finished backward, each rank takes its slice, sums it over
all ranks' buffers in pieces that fit its cache, and writes the mean into every buffer: one pass over the data, two
barriers. The sum is in rank order, so it equals the sequential mean to the bit.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from syncline.collectives.schedule import chunk_bounds
from syncline.comm.communicator import Communicator
from syncline.comm.shared_memory import Barrier, Segment, check_one_host
from syncline.errors import PlanError
from syncline.methods import Unused
from syncline.sync.base import when_garbage
from syncline.sync.flat import FlatSync
from syncline.sync.layout import Group, Layout

PIECE_BYTES = 128 * 1024
ALIGNMENT = 4096


class SharedMemory(FlatSync):
    def __init__(
        self,
        communicator: Communicator,
        *,
        unused: Unused = "error",
    ) -> None:
        # One bucket: there is no wire whose time could be hidden behind backward.
        super().__init__(communicator, bucket_cap_mb=float(10**6), unused=unused)
        check_one_host(communicator)
        self._pieces: list[list[Any]] = []
        self._num_bytes = 0
        self._barrier: Barrier | None = None

    def allocate(self, layout: Layout) -> dict[Group, Tensor]:
        segment, rows = allocate_rows(self.communicator, layout, "shared-memory")
        if self._barrier is not None:
            self._barrier.close()
        self._barrier = Barrier(segment, self.communicator)
        when_garbage(self, self._barrier.close)
        self._pieces, self._num_bytes = [], 0
        for row in rows.values():
            self._pieces += cut_slice(row, self.communicator.rank)
            self._num_bytes += row[0].numel() * row[0].element_size()
        return {group: row[self.communicator.rank] for group, row in rows.items()}

    def detach(self) -> None:
        super().detach()
        if self._barrier is not None:
            self._barrier.leave()
            self._barrier.close()

    def bucket_ready(self, number: int) -> None:
        """Nothing to do before all ranks are ready."""

    def complete(self) -> None:
        ready_ns = max(self._ready.values(), default=time.monotonic_ns())
        assert self._barrier is not None, "attach a model first"
        self._barrier.wait("waiting for all gradients")
        start_ns = time.monotonic_ns()
        average_pieces(self._pieces, None if self.scale_early else self.communicator.world_size)
        self._barrier.wait("averaging in shared memory")
        self.log.add(
            "collective", name="shared_memory", label="all gradients", bytes=self._num_bytes,
            ready=ready_ns, start=start_ns, end=time.monotonic_ns(),
        )  # fmt: skip


def allocate_rows(
    communicator: Communicator, layout: Layout, method: str
) -> tuple[Segment, dict[Group, list[Tensor]]]:
    """One segment with every rank's buffers; by group, the buffer of each rank. Collective."""
    for _, device in layout.lengths:
        if device.type != "cpu":
            raise PlanError(f"method {method} averages on cpu, but a parameter is on {device}.")
    sizes = {
        group: -(-length * group[0].itemsize // ALIGNMENT) * ALIGNMENT for group, length in layout.lengths.items()
    }
    per_rank = sum(sizes.values())
    segment = Segment(communicator, per_rank * communicator.world_size)
    rows, offset = {}, 0
    for group, length in layout.lengths.items():
        starts = [rank * per_rank + offset for rank in range(communicator.world_size)]
        rows[group] = [segment.tensor(group[0], length, start) for start in starts]
        offset += sizes[group]
    return segment, rows


def cut_slice(row: list[Tensor], rank: int) -> list[list[Any]]:
    """This rank's slice of every rank's buffer, in pieces that stay in cache. Made once: slicing is not free.

    As numpy arrays where numpy knows the type, because it spends less time on each call.
    """
    is_known = row[0].dtype in (torch.float32, torch.float64)
    buffers: list[Any] = [buffer.numpy() for buffer in row] if is_known else row
    start, stop = chunk_bounds(row[0].numel(), len(row))[rank]
    piece = PIECE_BYTES // row[0].element_size()
    return [[buffer[low : min(low + piece, stop)] for buffer in buffers] for low in range(start, stop, piece)]


def average_pieces(pieces: list[list[Any]], divisor: int | None) -> None:
    """Sum each piece in rank order into rank 0's buffer, divide it if asked to, and copy it to the others."""
    for parts in pieces:
        total = parts[0]
        for part in parts[1:]:
            total += part
        if divisor is not None:
            total /= divisor
        for part in parts[1:]:
            part[...] = total
