"""hierarchical with the option `ahead`: gradients travel between leaders in the order of next use, on into the next
forward, and ranks that share a host profit from it as their leader does.

A rank waits for a chunk when its forward comes to it, or when it alone saves a checkpoint; no rank may need another
one's main thread for that. So the senders of a host bring each chunk home: when the leader has the mean, the others
copy it, and only when all have is the chunk there. Senders meet in one order, which all ranks have voted on, wherever
forward is.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

import torch

from syncline.comm.communicator import Communicator, Work
from syncline.errors import SynclineError
from syncline.methods import Collective
from syncline.sync.ahead import Ahead
from syncline.sync.bucketed import Done
from syncline.sync.hierarchical import Hierarchical
from syncline.sync.voting import VotingSender


class AheadBetweenLeaders(Ahead, Hierarchical):
    def make_sender(
        self, channels: list[Communicator], collective: Collective, wire_dtype: torch.dtype | None
    ) -> VotingSender:
        land = weakref.WeakMethod(self._land)
        return _LandingSender(channels, collective, wire_dtype, self.own_channel("votes"), lambda: land())

    def complete(self) -> None:
        Hierarchical.complete(self)

    def _divide(self, number: int) -> None:
        """Done where the leader had the sum."""

    def _offer(self, chunk: int, ready_ns: int) -> None:
        self._ready_ns[chunk] = ready_ns
        values = self._total(self.layout.buckets[chunk]) if self._sends else torch.empty(0)
        self._sender.offer(chunk, values, ready_ns, lambda: self._sum_on_this_host(chunk))

    def _land(self, number: int) -> None:
        """A sum has come to this host's leader: here it becomes a mean, on all ranks of the host."""
        bucket, barrier = self.layout.buckets[number], self._mean_is_there
        assert barrier is not None, "attach a model first"
        total = self._total(bucket)
        if self._here.rank == 0 and self.scale_early is None:
            total.div_(self.communicator.world_size)
        barrier.wait(f"waiting for the mean of bucket {number}")
        if self._here.rank != 0:
            self._range(bucket).copy_(total)
        # Else the leader could write its next gradient while others still copy.
        barrier.wait(f"copying the mean of bucket {number}")
        if not self._sends and not self.log.off:
            self.log.add(
                "collective", name="shared_memory", label=f"bucket {number}", bytes=total.nbytes,
                ready=self._ready_ns[number], start=max(self._ready_ns[number], self._sum_start_ns[number]),
                end=time.monotonic_ns(),
            )  # fmt: skip

    def _begin_step(self) -> None:
        super()._begin_step()
        self._ready_ns: dict[int, int] = {}


class _LandingSender(VotingSender):
    """A chunk is there when `land` has run for it, in the sending thread and in the order of sending."""

    def __init__(
        self,
        channels: list[Communicator],
        collective: Collective,
        wire_dtype: torch.dtype | None,
        votes: Communicator,
        land: Callable[[], Callable[[int], None] | None],
    ) -> None:
        super().__init__(channels, collective, wire_dtype, votes)
        self._land = land
        """Gives the method's function, or None when nobody holds the method any more."""

    def _publish_at_once(self, number: int, work: Work) -> Work:
        return work

    def _wait_in_turn(self, number: int, work: Work) -> None:
        super()._wait_in_turn(number, work)
        land = self._land()
        if land is None:
            raise SynclineError("the method was dropped while gradients were on their way.")
        land(number)
        self._publish(number, Done())
