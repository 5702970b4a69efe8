"""How long a cell will take and how much memory, before it runs. Rough: corrected by what the first cells took."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cache

import numpy as np

from syncline.launcher.local import cores
from syncline.study.cells import Cell

START_S = 8.0
"""Starting ranks, loading data."""
SHARE_OF_PEAK = 0.35
"""Of the speed of a matrix product that a training step reaches on a CPU."""
RANK_BYTES = 350 * 2**20
"""A rank before it has a model: Python, torch, the data."""
COPIES = 5
"""Of the parameters: weights, gradients, momentum, buckets, and one for what is under way."""


@dataclass(frozen=True)
class Estimate:
    seconds: float
    memory_bytes: int

    def does_not_fit(self) -> str | None:
        """Why it cannot run here, or None."""
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if self.memory_bytes <= 0.9 * available:
            return None
        return f"needs about {self.memory_bytes / 2**30:.0f} GiB of memory; this machine has {available / 2**30:.0f}"


def estimate(cell: Cell) -> Estimate:
    plan = cell.plan
    cost = _cost(plan.model)
    samples = plan.global_batch
    steps = (plan.steps or 200 * (plan.epochs or 1)) + plan.measure.warmup
    turns = max(len(cell.methods), 1) if cell.run == "compare" else 1
    if cell.run == "verify":
        samples, steps, turns = 5 * plan.workers, 30, len(cell.methods)
    speed = matrix_speed() * min(plan.workers * (plan.threads or 1), cores()) / cores()
    step_s = cost.flops * samples / (speed * SHARE_OF_PEAK) if not plan.replayed else 1.0
    memory = plan.num_ranks * (RANK_BYTES + turns * COPIES * 4 * cost.parameters) + samples * cost.sample_bytes
    return Estimate(START_S + turns * steps * step_s, int(memory))


@cache
def matrix_speed() -> float:
    """Floating-point operations a second of this machine, all cores, by a short matrix product."""
    size = 768
    matrix = np.ones((size, size), dtype=np.float32)
    matrix @ matrix
    start, count = time.monotonic(), 0
    while time.monotonic() - start < 0.1:
        matrix @ matrix
        count += 1
    return 2 * size**3 * count / (time.monotonic() - start)


@dataclass(frozen=True)
class Cost:
    flops: float
    """To train on one sample."""
    parameters: int
    sample_bytes: int
    """That one sample occupies between forward and backward."""


@cache
def _cost(model: str) -> Cost:
    from syncline.workload.profile import profile

    if ":" in model:
        return Cost(1e9, 10_000_000, 10_000_000)  # a user's own model is not built to estimate it
    found = profile(model)
    return Cost(found.training_flops, found.parameters, found.activation_bytes)
