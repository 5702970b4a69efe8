"""What a cell will take, before it runs: operations and bytes by shapes alone; seconds, roughly, corrected by what
the first cells took; and memory, by shapes or by what an earlier stage measured (see measure/capacity.py)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from syncline.machine import RANK_BYTES, cores, estimated_bytes, installed_bytes
from syncline.methods import method_of
from syncline.plan import Plan
from syncline.study.cells import Cell
from syncline.study.rows import Row
from syncline.units import format_bytes

START_S = 3.0
"""Starting ranks, loading data."""
EXPERIMENT_S = 12.0
"""A probe, or an experiment of a study's own: what it does is not known here."""
EPOCH_SAMPLES, MADE_SAMPLES = 50_000, 10_000
"""Of an epoch: CIFAR-10's, and those of made-up images."""
START_HOSTS_S = 12.0
"""Loading torch once for all emulated hosts, starting them and their ranks, and checking their links."""
SHARE_OF_PEAK = 0.4
"""Of the speed of a matrix product that a training step reaches on a CPU."""
LOOPBACK_BYTES_PER_S = 1.5e9
"""That all ranks of this machine together send each other."""


START_SPARK_S = 15.0
"""Its JVM, and torch in its tasks' processes."""
TASK_S, SPARK_COPIES = 0.04, 12
"""What Spark takes for a task, and how often a gradient is copied on its way from there to the driver."""


@dataclass(frozen=True)
class Estimate:
    seconds: float
    memory_bytes: int

    def does_not_fit(self) -> str | None:
        """Why it cannot run here, or None."""
        available = installed_bytes()
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
    if spark := [name for name in cell.methods or [plan.method] if method_of(name).world == "tasks"]:
        each = TASK_S * plan.workers + SPARK_COPIES * plan.workers * cost.gradient_bytes / LOOPBACK_BYTES_PER_S
        start += len(spark) * (START_SPARK_S + steps * each)
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
    import torch  # late: an estimate by shapes alone needs none

    def seconds() -> float:
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        return time.perf_counter() - start

    size, threads = 512, torch.get_num_threads()
    matrix = torch.ones(size, size)
    torch.set_num_threads(1)
    try:
        best = min(seconds() for _ in range(40))
    finally:
        torch.set_num_threads(threads)
    return 2 * size**3 / best * cores()


@dataclass(frozen=True)
class Cost:
    flops: float
    """To train on one sample."""
    parameters: int
    sample_bytes: int
    """That one sample occupies between forward and backward."""
    gradient_bytes: int
    """That a worker has to share in each step."""
    guessed: bool = False


GUESS = Cost(1e9, 10_000_000, 10_000_000, 40_000_000, guessed=True)
"""For what is only known once it is built: a user's own model, a vocabulary that a text decides."""


def cost_of(plan: Plan) -> Cost:
    """Of the plan's model on inputs of the size and classes that the plan gives."""
    if ":" in plan.model or plan.has_own_data:
        return GUESS
    ages = plan.data in ("imdb-wiki", "synthetic-ages")
    return _cost(plan.model, ages, plan.image_size, plan.num_classes, plan.sequence_length)


@cache
def _cost(
    model: str, ages: bool, image_size: int | None, num_classes: int | None, sequence_length: int | None
) -> Cost:
    from syncline.workload.data.made import synthetic_task
    from syncline.workload.dry_run import profile

    shape = {"image_size": image_size, "num_classes": num_classes, "sequence_length": sequence_length}
    plan = Plan.model_validate({"model": model, "data": "synthetic-ages" if ages else "synthetic", **shape})
    profiled = profile(model, synthetic_task(plan))
    return Cost(profiled.training_flops, profiled.parameters, profiled.activation_bytes, profiled.gradient_bytes)


def does_not_fit(cell: Cell, measured: Sequence[Row]) -> str | None:
    """Why it does not, or None: it fits, or nothing was measured for its model."""
    known = [row.figures for row in measured if row.point.get("model") == cell.plan.model]
    if not known or "bytes_per_sample" not in known[0]:
        return None
    figures, room = known[0], known[0]["room_bytes"]
    needed = needed_bytes(cell, figures["bytes_per_sample"], figures["process_bytes"])
    if needed <= room:
        return None
    each = format_bytes(round(figures["bytes_per_sample"]))
    free = format_bytes(round(room))
    return f"needs about {format_bytes(needed)} of memory, at a measured {each} per sample; {free} is available"


def needed_bytes(cell: Cell, bytes_per_sample: float, process_bytes: float) -> int:
    """Of all ranks. What a method frees stays with its process, so rank 0 of a comparison in which one process takes
    the whole batch holds that beside all others' shares."""
    alone = cell.plan.num_ranks > 1 and any(method_of(name).alone for name in cell.methods)
    samples = cell.plan.global_batch * (2 if alone else 1)
    return round(cell.plan.num_ranks * process_bytes + samples * bytes_per_sample)
