"""point-to-point: the exchange with rank 0 written as sends and receives.

The same bytes as gather-scatter over the same link, but rank 0's receives are posted together, and so are its sends.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from syncline.sync.base import AfterBackward
from syncline.sync.mean import mean_in_rank_order


class PointToPoint(AfterBackward):
    def average(self, name: str, gradient: Tensor, ready_ns: int) -> None:
        if self.communicator.rank == 0:
            self._average_on_root(name, gradient, ready_ns)
        else:
            self.communicator.send(gradient, 0, label=name, ready_ns=ready_ns).wait()
            self.communicator.receive(gradient, 0, label=name).wait()

    def _average_on_root(self, name: str, gradient: Tensor, ready_ns: int) -> None:
        comm = self.communicator
        others = range(1, comm.world_size)
        parts = [torch.empty_like(gradient) for _ in others]
        for work in [comm.receive(part, rank, label=name) for part, rank in zip(parts, others, strict=True)]:
            work.wait()
        start_ns = time.monotonic_ns()
        gradient.copy_(mean_in_rank_order([gradient, *parts]))
        self.log.pack(name, start_ns)
        for work in [comm.send(gradient, rank, label=name, ready_ns=ready_ns) for rank in others]:
            work.wait()
