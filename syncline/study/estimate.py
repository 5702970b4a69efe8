"""How long a cell will take and how much memory, before it runs. Rough: corrected by what the first cells took."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cache

import torch

from syncline.launcher.emulation.honesty import RANK_BYTES, estimated_bytes
from syncline.machine import cores
from syncline.plan import Plan
from syncline.study.cells import Cell
from syncline.study.costs import Cost, cost_of

START_S = 3.0
"""Starting ranks, loading data."""
EXPERIMENT_S = 12.0
"""A probe, or an experiment of a study's own: what it does is not known here."""
EPOCH_SAMPLES, MADE_SAMPLES = 50_000, 10_000
"""Of an epoch: CIFAR-10's, and those of made-up images."""
START_HOSTS_S = 12.0
"""Starting emulated hosts, which load torch for themselves, and checking their links."""
SHARE_OF_PEAK = 0.4
"""Of the speed of a matrix product that a training step reaches on a CPU."""
LOOPBACK_BYTES_PER_S = 1.5e9
"""That all ranks of this machine together send each other."""


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
    if cell.run in ("probe", "function"):
        return Estimate(START_S + EXPERIMENT_S, plan.num_ranks * RANK_BYTES)
    cost = cost_of(plan)
    samples = plan.global_batch
    epoch = MADE_SAMPLES if plan.data.startswith("synthetic") else EPOCH_SAMPLES
    steps = (plan.steps or -(-epoch // plan.global_batch) * (plan.epochs or 1)) + plan.measure.warmup
    turns = max(len(cell.methods), 1) if cell.run == "compare" else 1
    if cell.run == "verify":
        samples, steps, turns = 5 * plan.workers, 30, len(cell.methods)
    replayed = bool(cell.replays or plan.replayed)
    if replayed:
        step_s = _replayed_step(cell, plan, cost)
        samples = 0
    else:
        step_s = cost.flops * samples / _speed(plan.workers * (plan.threads or 1))
    memory = samples * cost.sample_bytes + estimated_bytes(
        hosts=plan.hosts if plan.hosts > 1 else 0, ranks=plan.num_ranks,
        weights_bytes=turns * 4 * cost.parameters, replayed=replayed,
    )  # fmt: skip
    start = START_HOSTS_S if plan.hosts > 1 else START_S
    return Estimate(start + turns * steps * step_s, int(memory))


def _replayed_step(cell: Cell, plan: Plan, cost: Cost) -> float:
    """What one node takes for its share, and what this machine takes to carry everybody's gradients."""
    per_node: int = min(cell.point.get("workers_per_node", 1), plan.workers)
    threads: int = per_node * cell.point.get("threads", plan.threads or 1)
    samples = plan.global_batch * per_node / plan.workers
    carried = 2 * (plan.workers - 1) * cost.gradient_bytes / LOOPBACK_BYTES_PER_S
    return cost.flops * samples / _speed(threads) + carried


def _speed(threads: int) -> float:
    """Floating-point operations a second of training on so many threads of this machine."""
    return matrix_speed() * SHARE_OF_PEAK * min(threads, cores()) / cores()


@cache
def matrix_speed() -> float:
    """Floating-point operations a second of this machine: the quickest of short matrix products on one thread, times
    the cores. The quickest, because what else runs now need not run later."""
    size, threads = 512, torch.get_num_threads()
    matrix = torch.ones(size, size)
    torch.set_num_threads(1)
    try:
        best = min(_seconds(matrix) for _ in range(40))
    finally:
        torch.set_num_threads(threads)
    return 2 * size**3 / best * cores()


def _seconds(matrix: torch.Tensor) -> float:
    start = time.perf_counter()
    torch.mm(matrix, matrix)
    return time.perf_counter() - start
