"""shared-memory: ranks of one host average their gradients in memory that they share; nothing is sent.

Every rank's flat buffer lies in one segment. When all have finished backward, each rank takes its slice, sums it over
all ranks' buffers in pieces that fit its cache, and writes the mean into every buffer: one pass over the data, two
barriers. The sum is in rank order, so it equals the sequential mean to the bit.
"""

from __future__ import annotations

import time
from typing import Literal

import torch
from torch import Tensor

from syncline.collectives.schedule import chunk_bounds
from syncline.comm.communicator import Communicator
from syncline.comm.shared_memory import Barrier, Segment, check_one_host
from syncline.errors import PlanError
from syncline.spans import EventLog
from syncline.sync.flat import FlatSync
from syncline.sync.layout import Group, Layout

PIECE_BYTES = 256 * 1024
ALIGNMENT = 4096


class SharedMemory(FlatSync):
    def __init__(
        self,
        communicator: Communicator,
        *,
        unused: Literal["error", "zero"] = "error",
        log: EventLog | None = None,
    ) -> None:
        # One bucket: there is no wire whose time could be hidden behind backward.
        super().__init__(communicator, bucket_cap_mb=float(10**6), unused=unused)
        check_one_host(communicator)
        self._log = log
        self._rows: list[list[Tensor]] = []
        self._barrier: Barrier | None = None

    def allocate(self, layout: Layout) -> dict[Group, Tensor]:
        for _, device in layout.lengths:
            if device.type != "cpu":
                raise PlanError(f"method shared-memory averages on cpu, but a parameter is on {device}.")
        sizes = {
            group: -(-length * group[0].itemsize // ALIGNMENT) * ALIGNMENT for group, length in layout.lengths.items()
        }
        per_rank = sum(sizes.values())
        world_size = self.communicator.world_size
        segment = Segment(self.communicator, per_rank * world_size)
        self._barrier = Barrier(segment, self.communicator)
        self._rows, buffers, offset = [], {}, 0
        for group, length in layout.lengths.items():
            starts = [rank * per_rank + offset for rank in range(world_size)]
            row = [segment.tensor(group[0], length, start) for start in starts]
            self._rows.append(row)
            buffers[group] = row[self.communicator.rank]
            offset += sizes[group]
        return buffers

    def detach(self) -> None:
        super().detach()
        if self._barrier is not None:
            self._barrier.close()

    def bucket_ready(self, number: int) -> None:
        """Nothing to do before all ranks are ready."""

    def complete(self) -> None:
        ready_ns = max(self._ready.values(), default=time.monotonic_ns())
        assert self._barrier is not None, "attach a model first"
        self._barrier.wait("waiting for all gradients")
        start_ns = time.monotonic_ns()
        for row in self._rows:
            average_slice(row, self.communicator.rank)
        self._barrier.wait("averaging in shared memory")
        if self._log is not None:
            num_bytes = sum(row[0].numel() * row[0].element_size() for row in self._rows)
            self._log.add(
                "collective", name="shared_memory", label="all gradients", bytes=num_bytes,
                ready=ready_ns, start=start_ns, end=time.monotonic_ns(),
            )  # fmt: skip


def average_slice(row: list[Tensor], rank: int) -> None:
    """This rank's slice of every buffer becomes the mean over all, in pieces that stay in cache."""
    world_size = len(row)
    if world_size == 1:
        return
    start, stop = chunk_bounds(row[0].numel(), world_size)[rank]
    piece = PIECE_BYTES // row[0].element_size()
    scratch = torch.empty(piece, dtype=row[0].dtype)
    for low in range(start, stop, piece):
        high = min(low + piece, stop)
        parts = [buffer[low:high] for buffer in row]
        total = torch.add(parts[0], parts[1], out=scratch[: high - low])
        for part in parts[2:]:
            total.add_(part)
        total.div_(world_size)
        for part in parts:
            part.copy_(total)
