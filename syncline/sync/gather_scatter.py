"""gather-scatter: rank 0 gathers each gradient from all ranks, averages, and scatters the mean back.

Everything passes through rank 0's link: 2(n-1) times the gradient's bytes, so it gets slower with every rank.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from syncline.sync.base import AfterBackward
from syncline.sync.mean import mean_in_rank_order


class GatherScatter(AfterBackward):
    def average(self, name: str, gradient: Tensor, ready_ns: int) -> None:
        comm = self.communicator
        parts = [torch.empty_like(gradient) for _ in range(comm.world_size)] if comm.rank == 0 else None
        comm.gather(gradient, parts, label=name, ready_ns=ready_ns)
        means = None if parts is None else self._means(name, parts)
        comm.scatter(gradient, means, label=name)

    def _means(self, name: str, parts: list[Tensor]) -> list[Tensor]:
        start_ns = time.monotonic_ns()
        means = [mean_in_rank_order(parts)] * self.communicator.world_size
        self.log.pack(name, start_ns)
        return means
