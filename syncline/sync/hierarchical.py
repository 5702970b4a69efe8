"""hierarchical: gradients are summed in shared memory on each host, and one leader of each host talks to the others.

Between hosts this is `bucketed`: buckets start in order while backward still runs. Before a bucket may leave its
host, every rank there has added its slice of it over all the host's ranks into the leader's buffer; when the mean has
arrived, the others copy it from there. So a link carries each gradient once, however many ranks share it.

With one host it is shared-memory, with one rank on each host it is bucketed. Which ranks share a host is what launch
says. With the option `ahead` it is method ahead between hosts (ahead_between_leaders.py).
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from syncline.comm.communicator import Communicator
from syncline.comm.shared_memory import Barrier, Segment, ranks_by_host
from syncline.comm.threads import ThreadCommunicator, ThreadWorld
from syncline.errors import PlanError
from syncline.methods import Collective, TransferDtype, Unused
from syncline.sync.base import when_garbage
from syncline.sync.bucketed import Bucketed
from syncline.sync.hooks import CommHook
from syncline.sync.layout import Bucket, Group, Layout
from syncline.sync.shared_memory import allocate_rows, cut_slice


def make(communicator: Communicator, *, ahead: bool = False, **options: Any) -> Bucketed:
    """The method with its options."""
    if not ahead:
        return Hierarchical(communicator, **options)
    from syncline.sync.ahead_between_leaders import AheadBetweenLeaders

    options.pop("overlap", None)  # a plan refuses to switch it off
    return AheadBetweenLeaders(communicator, chunk_mb=options.pop("bucket_cap_mb", None), **options)


class Hierarchical(Bucketed):
    def __init__(
        self,
        communicator: Communicator,
        *,
        bucket_cap_mb: float = 25.0,
        collective: Collective | None = None,
        transfer_dtype: TransferDtype | None = None,
        overlap: bool = True,
        unused: Unused = "error",
    ) -> None:
        hosts = ranks_by_host(communicator)
        here = communicator.part("hosts", hosts)
        assert here is not None, "every rank is on a host"
        self._here = here
        self._leaders = communicator.part("leaders", [[ranks[0] for ranks in hosts]] if len(hosts) > 1 else [])
        self._sends = self._leaders is not None
        self._summed: Barrier | None = None
        self._mean_is_there: Barrier | None = None
        super().__init__(
            communicator, bucket_cap_mb=bucket_cap_mb, collective=collective, transfer_dtype=transfer_dtype,
            overlap=overlap, unused=unused,
        )  # fmt: skip
        self._closed_at_end(here)

    def open_channels(self, groups: int) -> list[Communicator]:
        """A rank that does not send has a channel to nobody, on which it sends nothing."""
        if self._sends:
            assert self._leaders is not None
            return [self._closed_at_end(self._leaders)]
        return [ThreadCommunicator(ThreadWorld(1), 0)]

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        raise PlanError("method hierarchical does not support communication hooks.", action="Use method bucketed.")

    def allocate(self, layout: Layout) -> dict[Group, Tensor]:
        """Every rank's buffers in one segment a host. Two barriers: the thread that sends and the one that waits are
        at different buckets."""
        self._close_barriers()
        segment, rows = allocate_rows(self._here, layout, "hierarchical")
        self._summed = Barrier(segment, self._here)
        self._mean_is_there = Barrier(Segment(self._here, 0), self._here)
        for barrier in (self._summed, self._mean_is_there):
            when_garbage(self, barrier.close)
        self._leader_row = {group: row[0] for group, row in rows.items()}
        self._slices = [
            cut_slice([buffer[bucket.start : bucket.stop] for buffer in rows[bucket.group]], self._here.rank)
            for bucket in layout.buckets
        ]
        self._sum_start_ns = [0] * len(layout.buckets)
        return {group: row[self._here.rank] for group, row in rows.items()}

    def complete(self) -> None:
        if not self._overlap:
            for number in range(len(self.layout.buckets)):
                self._send(number)
        assert self._mean_is_there is not None, "attach a model first"
        for number, bucket in enumerate(self.layout.buckets):
            (work,) = self._sender.collect(1)
            work.wait()
            total = self._total(bucket)
            if self._here.rank == 0 and self.scale_early is None:
                start_ns = time.monotonic_ns()
                total.div_(self.communicator.world_size)
                self.log.pack("all gradients", start_ns)
            self._mean_is_there.wait(f"waiting for the mean of bucket {number}")
            self._note(number, bucket)
            if self._here.rank != 0:
                start_ns = time.monotonic_ns()
                self._range(bucket).copy_(total)
                self.log.pack("all gradients", start_ns)
        # Else the leader could begin its next backward while others still copy.
        self._mean_is_there.wait("copying the mean")
        if not self._rebuilt and self._parameters:
            self._rebuild(list(self._ready))

    def detach(self) -> None:
        for barrier in (self._summed, self._mean_is_there):
            if barrier is not None:
                barrier.leave()  # first: the thread that sends may wait for a rank that waits for this one
        super().detach()
        self._close_barriers()

    def _send(self, number: int) -> None:
        bucket = self.layout.buckets[number]
        ready_ns = max(self._ready[parameter] for parameter in bucket.parameters)
        values = self._total(bucket) if self._sends else torch.empty(0)
        self._sender.send(number, values, ready_ns, lambda: self._sum_on_this_host(number))

    def _sum_on_this_host(self, number: int) -> None:
        """In the sending thread. Each rank adds its own slice, in rank order, into the leader's buffer."""
        if self._here.world_size == 1:
            return
        assert self._summed is not None
        self._summed.wait(f"waiting for bucket {number} on this host")
        self._sum_start_ns[number] = time.monotonic_ns()
        add_pieces(self._slices[number])
        self._summed.wait(f"adding bucket {number} on this host")

    def _total(self, bucket: Bucket) -> Tensor:
        return self._leader_row[bucket.group][bucket.start : bucket.stop]

    def _note(self, number: int, bucket: Bucket) -> None:
        """Of a rank that sends nothing; what a leader sends is in the log already."""
        if not self._sends and not self.log.off:
            ready_ns = max(self._ready[parameter] for parameter in bucket.parameters)
            values = self._range(bucket)
            self.log.add(
                "collective", name="shared_memory", label=f"bucket {number}",
                bytes=values.numel() * values.element_size(), ready=ready_ns,
                start=max(ready_ns, self._sum_start_ns[number]), end=time.monotonic_ns(),
            )  # fmt: skip

    def _close_barriers(self) -> None:
        for barrier in (self._summed, self._mean_is_there):
            if barrier is not None:
                barrier.close()


def add_pieces(pieces: list[list[Any]]) -> None:
    """Sum each piece in rank order into the first buffer."""
    for total, *others in pieces:
        for part in others:
            total += part
