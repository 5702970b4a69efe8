"""all-reduce: one all-reduce for each parameter, after backward.

No root: each rank sends 2(n-1)/n of the bytes. But every parameter pays the latency, and nothing is hidden behind
backward.
"""

from __future__ import annotations

import time

from torch import Tensor

from syncline.sync.base import AfterBackward


class AllReduce(AfterBackward):
    def average(self, name: str, gradient: Tensor, ready_ns: int) -> None:
        self.communicator.all_reduce(gradient, label=name, ready_ns=ready_ns)
        start_ns = time.monotonic_ns()
        gradient.div_(self.communicator.world_size)
        self.log.pack(name, start_ns)
