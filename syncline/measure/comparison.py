"""All methods in one world of ranks, taking turns step by step, so that a noisy moment hits each alike.

Where a method leaves transfers on their way into its next step, a turn has several steps, for all methods. A turn's
step time then runs from the end of its first step to the end of its last. What is still on its way after that is
waited for outside the clock, and measured too: nothing travels for free.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from syncline.accounting.statistics import paired_ratio, speedup, timing
from syncline.comm.communicator import Communicator
from syncline.comm.counters import StepTraffic
from syncline.methods import BASELINE, CONTROL, METHODS
from syncline.plan import Plan
from syncline.spans import EventLog
from syncline.sync import make_sync
from syncline.sync.batch_norm import attach
from syncline.training.delays import delays_of
from syncline.training.loop import Observer
from syncline.training.settings import step_settings
from syncline.training.step import Worker, seed_forward, train_step
from syncline.training.watching import note_memory
from syncline.workload.data.batches import Batches
from syncline.workload.dry_run import check_fit
from syncline.workload.recipes import learning_rate, make_model, make_optimizer, set_learning_rate
from syncline.workload.sharding import Shard, Sharding
from syncline.workload.tasks import Task


@dataclass
class Contender:
    """One row of the comparison, and what it has measured so far on this rank."""

    label: str
    method: str
    threads: int
    options: dict[str, Any] = field(default_factory=dict)
    """Of this contender alone, over the plan's."""
    seconds: list[float] = field(default_factory=list)
    """By turn, of a step."""
    left_s: list[float] = field(default_factory=list)
    """By turn: what was still on its way at its end."""
    loss_sum: float = 0.0
    num_samples: int = 0

    @property
    def alone(self) -> bool:
        """Rank 0 takes the whole batch while the others wait."""
        return METHODS[self.method].alone


def contenders(methods: Sequence[str], *, threads: int, cores: int) -> list[Contender]:
    """`single` twice: with one worker's threads (one node of the cluster) and with all cores of this machine.

    A method may come with options of its own, so that several settings take turns: "ddp:bucket_cap_mb=5".
    """
    entries = []
    for word in methods:
        method, *settings = word.split(":")
        options = tomllib.loads("\n".join(settings))
        label = ", ".join([method, *settings]).replace('"', "")
        entries.append(Contender(label, method, threads, options))
        if method == BASELINE and cores != threads:
            entries.append(Contender(f"{method}, all cores", method, cores))
    return entries


@dataclass(frozen=True)
class Comparison:
    """One rank's part in the comparison. `run` is collective; its rows are the same on every rank."""

    plan: Plan
    entries: list[Contender]
    communicator: Communicator
    batches: Batches
    device: torch.device
    log: EventLog
    observer: Observer

    @cached_property
    def traffic(self) -> StepTraffic:
        return StepTraffic(self.log)

    @property
    def rounds(self) -> int:
        return (self.plan.measure.warmup + (self.plan.steps or 1)) // self.plan.measure.block

    def run(self) -> list[dict[str, Any]]:
        workers = [self._prepare(entry) for entry in self.entries]
        for round_index in range(self.rounds):
            for turn, (entry, worker) in enumerate(zip(self.entries, workers, strict=True)):
                self.log.method = entry.label
                self._take_turn(entry, worker, round_index)
                done = round_index * len(self.entries) + turn + 1
                loss = entry.loss_sum / max(entry.num_samples, 1)
                batch = min(self.plan.global_batch, self.batches.num_train)
                rate = batch * self.batches.task.units_per_sample / entry.seconds[-1]
                self.observer.step(done, self.rounds * len(self.entries), loss, rate)
        for entry, worker in zip(self.entries, workers, strict=True):
            self.log.method = entry.label
            if worker is not None:
                note_memory(self.log, worker.model, worker.sync)
        self.log.method = ""
        seconds = self._slowest("step times", [entry.seconds for entry in self.entries])
        left = self._slowest("left over", [entry.left_s for entry in self.entries])
        about = (self.batches.task, self.batches.num_train)
        rows = compare_rows(self.plan, self.entries, seconds, self._losses(), *about)
        for row in rows:
            row["train_samples"] = self.batches.num_train
        for row, worker in zip(rows, workers, strict=True):
            if worker is not None and worker.sync.predicted is not None:
                row["predicted"] = {**worker.sync.predicted, "measured_s": row["step"]["median_s"]}
        return rows if self.plan.measure.block == 1 else _with_left_over(self.plan, rows, left)

    def _prepare(self, entry: Contender) -> Worker | None:
        if entry.alone and self.communicator.rank != 0:
            return None
        model = make_model(self.plan, self.device, self.batches.task)
        if not entry.alone and not self.plan.replayed:
            sharding = Sharding(self.batches.num_train, self.plan.global_batch, 0, 0, self.communicator.world_size)
            check_fit(self.plan, model, self.batches.task, sharding, self.rounds)
        options = {"batch_norm": self.plan.batch_norm, **self.plan.options_for(entry.method), **entry.options}
        sync = make_sync(entry.method, self.communicator, log=self.log, **options)
        sync.looks_for_nan = step_settings(self.plan)["on_nan"] != "ignore"
        module = attach(sync, model, self.plan.batch_norm)
        delays = delays_of(self.plan, self.communicator.rank)
        settings = {"delays": delays, "accumulate": self.plan.accumulate, **step_settings(self.plan)}
        return Worker(model, module, sync, make_optimizer(self.plan, model), self.batches, self.log, **settings)

    def _take_turn(self, entry: Contender, worker: Worker | None, round_index: int) -> None:
        slowed = self.plan.inject.threads if self.communicator.rank == self.plan.inject.rank else None
        torch.set_num_threads(slowed or entry.threads)
        block = self.plan.measure.block
        self.log.step = round_index * block
        self._meet()
        start_ns = time.monotonic_ns()
        ends_ns = [self._take_step(entry, worker, round_index * block + number) for number in range(block)]
        if worker is not None:
            worker.sync.synchronize()
        left_ns = time.monotonic_ns() - ends_ns[-1]
        entry.seconds.append((ends_ns[-1] - (ends_ns[0] if block > 1 else start_ns)) / max(block - 1, 1) / 1e9)
        entry.left_s.append(left_ns / 1e9)
        self.log.flush()

    def _take_step(self, entry: Contender, worker: Worker | None, step: int) -> int:
        """When it ended. A turn of a single step pays for all of its transfers."""
        shard = self._shard(entry, step)
        self.log.step = step
        if worker is not None:
            set_learning_rate(worker.optimizer, self._learning_rate(step))
        # Every method draws the same dropout masks in a round, so that losses can be compared.
        seed_forward(self.plan.seed, self.communicator.rank, step)
        self.traffic.begin()
        start_ns = time.monotonic_ns()
        if worker is not None:
            result = train_step(worker, shard)
            if result.not_finite is not None and math.isfinite(entry.loss_sum):
                print(result.not_finite, file=sys.stderr, flush=True)
            if self.plan.measure.block == 1:
                worker.sync.synchronize()
            entry.loss_sum, entry.num_samples = result.loss * result.num_samples, result.num_samples
        end_ns = time.monotonic_ns()
        self.traffic.end()
        self.log.add("step", start=start_ns, end=end_ns)
        return end_ns

    def _learning_rate(self, step: int) -> float:
        sharding = Sharding(self.batches.num_train, self.plan.global_batch, self.plan.seed, 0, 1)
        steps = self.rounds * self.plan.measure.block
        return learning_rate(self.plan.optimizer, step, steps, self.plan.global_batch, sharding.steps_per_epoch)

    def _shard(self, entry: Contender, step: int) -> Shard:
        rank, world_size = (0, 1) if entry.alone else (self.communicator.rank, self.communicator.world_size)
        sharding = Sharding(self.batches.num_train, self.plan.global_batch, self.plan.seed, rank, world_size)
        epoch, step_in_epoch = divmod(step, sharding.steps_per_epoch)
        return next(sharding.epoch(epoch, step_in_epoch))

    def _meet(self) -> None:
        """All ranks start a turn together; a turn's time must not hold another method's delay."""
        with self.communicator.scope("turn"):
            self.communicator.all_reduce(torch.zeros(1, device=self.communicator.device), label="turn")

    def _slowest(self, scope: str, seconds: list[list[float]]) -> list[list[float]]:
        own = torch.tensor(seconds, dtype=torch.float64)
        slowest = torch.stack(self._all_gather(scope, own)).amax(0)
        rows: list[list[float]] = slowest.tolist()
        return rows

    def _losses(self) -> list[float]:
        own = [[entry.loss_sum, entry.num_samples] for entry in self.entries]
        total = torch.stack(self._all_gather("losses", torch.tensor(own, dtype=torch.float64))).sum(0)
        return [float(loss / samples) for loss, samples in total]

    def _all_gather(self, scope: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        with self.communicator.scope(scope):
            return [part.cpu() for part in self.communicator.all_gather(tensor.to(self.communicator.device))]


def compare_rows(
    plan: Plan,
    entries: Sequence[Contender],
    seconds: Sequence[Sequence[float]],
    losses: Sequence[float],
    task: Task,
    num_train: int,
) -> list[dict[str, Any]]:
    """The table. Speed-up is at one global batch, against `single` with one worker's threads, where that ran."""
    by_label = {entry.label: list(times) for entry, times in zip(entries, seconds, strict=True)}
    rows, warmup = [], plan.measure.warmup // plan.measure.block
    for entry, times, loss in zip(entries, seconds, losses, strict=True):
        measured = timing(times, warmup=warmup)
        assert measured is not None, "a comparison has at least one step"
        timed = list(times[warmup:])
        row: dict[str, Any] = {
            "label": entry.label,
            "method": entry.method,
            "workers": 1 if METHODS[entry.method].world == "worker" else plan.workers,
            "threads": entry.threads,
            "step": asdict(measured),
            **task.throughput(min(plan.global_batch, num_train), measured.median_s),
            "seconds": timed,
            "loss": None if plan.replayed else loss,
        }
        if BASELINE in by_label:
            # The spread is that of rounds side by side; the figure is the quotient of the two medians printed.
            alone = by_label[BASELINE][warmup:]
            row["speedup"] = asdict(replace(paired_ratio(alone, timed), median=speedup(alone, timed)))
        if CONTROL in by_label:
            row["ratio_to_ddp"] = asdict(paired_ratio(timed, by_label[CONTROL][warmup:]))
        rows.append(row)
    return rows


def _with_left_over(plan: Plan, rows: list[dict[str, Any]], left: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    """What was still on its way after a turn, and the ratio to DDP with it shared among the turn's steps."""
    warmup, steps = plan.measure.warmup // plan.measure.block, plan.measure.block - 1
    whole = [
        [step_s + left_s / steps for step_s, left_s in zip(row["seconds"], own[warmup:], strict=True)]
        for row, own in zip(rows, left, strict=True)
    ]
    control = next((times for row, times in zip(rows, whole, strict=True) if row["label"] == CONTROL), None)
    for row, own, times in zip(rows, left, whole, strict=True):
        row["left_s"] = statistics.median(own[warmup:])
        if control is not None:
            row["ratio_to_ddp_with_left"] = asdict(paired_ratio(times, control))
    return rows
