"""Which part of the global batch this rank is at: the loader notes it, the wrapper and metrics read it.

Kept for each thread, because ranks may be threads of one process: a loader counts where it is iterated.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """This rank's part of one global batch."""

    num_samples: int
    """0 where the batch does not reach this rank, and what the loader gave are stand-ins."""
    num_global: int
    world_size: int
    everywhere: bool = True
    """False if some ranks were not given this batch, because they have no sample of it."""
    weighs: bool = True
    """False if the user's loss is not a mean over samples: then every rank that has some counts alike."""

    @property
    def weight(self) -> float:
        """Factor that makes the average over ranks the mean over the global batch; see workload/sharding.py."""
        if not self.weighs:
            return 1.0 if self.num_samples else 0.0
        return self.num_samples * self.world_size / self.num_global


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.shares: dict[int, Share] = {}


_here = _OfThread()


class Pass:
    """One pass over a loader. Passes may be nested (an evaluation inside an epoch) or take turns (zip)."""

    def note(self, share: Share) -> None:
        """This thread is at this share from now on."""
        self._shares = _here.shares
        self._shares.pop(id(self), None)
        self._shares[id(self)] = share

    def end(self) -> None:
        """Back to the share of the pass around this one, if there is one."""
        getattr(self, "_shares", {}).pop(id(self), None)


def current_share() -> Share | None:
    """Of the loader that last gave a batch to this thread and is not at its end; None without one."""
    return next(reversed(_here.shares.values()), None)
