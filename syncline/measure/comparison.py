"""All methods in one world of ranks, taking turns step by step, so that a noisy moment hits each alike."""

from __future__ import annotations

import time
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
    seconds: list[float] = field(default_factory=list)
    loss_sum: float = 0.0
    num_samples: int = 0

    @property
    def alone(self) -> bool:
        """Rank 0 takes the whole batch while the others wait."""
        return METHODS[self.method].alone


def contenders(methods: Sequence[str], *, threads: int, cores: int) -> list[Contender]:
    """`single` twice: with one worker's threads (one node of the cluster) and with all cores of this machine."""
    entries = []
    for method in methods:
        entries.append(Contender(method, method, threads))
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
        return self.plan.measure.warmup + (self.plan.steps or 1)

    def run(self) -> list[dict[str, Any]]:
        workers = [self._prepare(entry) for entry in self.entries]
        for round_index in range(self.rounds):
            for turn, (entry, worker) in enumerate(zip(self.entries, workers, strict=True)):
                self.log.step, self.log.method = round_index, entry.label
                self._take_turn(entry, worker, round_index)
                done = round_index * len(self.entries) + turn + 1
                loss = entry.loss_sum / max(entry.num_samples, 1)
                rate = self.plan.global_batch * self.batches.task.units_per_sample / entry.seconds[-1]
                self.observer.step(done, self.rounds * len(self.entries), loss, rate)
        for entry, worker in zip(self.entries, workers, strict=True):
            self.log.method = entry.label
            if worker is not None:
                note_memory(self.log, worker.model, worker.sync)
        self.log.method = ""
        seconds, losses = self._slowest(), self._losses()
        return compare_rows(self.plan, self.entries, seconds, losses, self.batches.task)

    def _prepare(self, entry: Contender) -> Worker | None:
        if entry.alone and self.communicator.rank != 0:
            return None
        model = make_model(self.plan, self.device, self.batches.task)
        if not entry.alone and not self.plan.replayed:
            sharding = Sharding(self.batches.num_train, self.plan.global_batch, 0, 0, self.communicator.world_size)
            check_fit(self.plan, model, self.batches.task, sharding, self.rounds)
        options = {"batch_norm": self.plan.batch_norm, **self.plan.options_for(entry.method)}
        sync = make_sync(entry.method, self.communicator, log=self.log, **options)
        module = attach(sync, model, self.plan.batch_norm)
        delays = delays_of(self.plan, self.communicator.rank)
        settings = {"delays": delays, "accumulate": self.plan.accumulate, **step_settings(self.plan)}
        return Worker(model, module, sync, make_optimizer(self.plan, model), self.batches, self.log, **settings)

    def _take_turn(self, entry: Contender, worker: Worker | None, round_index: int) -> None:
        shard = self._shard(entry, round_index)
        slowed = self.plan.inject.threads if self.communicator.rank == self.plan.inject.rank else None
        torch.set_num_threads(slowed or entry.threads)
        if worker is not None:
            set_learning_rate(worker.optimizer, self._learning_rate(round_index))
        # Every method draws the same dropout masks in a round, so that losses can be compared.
        seed_forward(self.plan.seed, self.communicator.rank, round_index)
        self._meet()
        self.traffic.begin()
        start_ns = time.monotonic_ns()
        if worker is not None:
            result = train_step(worker, shard)
            worker.sync.synchronize()  # a turn pays for all of its transfers
            entry.loss_sum, entry.num_samples = result.loss * result.num_samples, result.num_samples
        end_ns = time.monotonic_ns()
        self.traffic.end()
        entry.seconds.append((end_ns - start_ns) / 1e9)
        self.log.add("step", start=start_ns, end=end_ns)
        self.log.flush()

    def _learning_rate(self, round_index: int) -> float:
        sharding = Sharding(self.batches.num_train, self.plan.global_batch, self.plan.seed, 0, 1)
        lengths = (self.rounds, self.plan.global_batch, sharding.steps_per_epoch)
        return learning_rate(self.plan.optimizer, round_index, *lengths)

    def _shard(self, entry: Contender, round_index: int) -> Shard:
        rank, world_size = (0, 1) if entry.alone else (self.communicator.rank, self.communicator.world_size)
        sharding = Sharding(self.batches.num_train, self.plan.global_batch, self.plan.seed, rank, world_size)
        epoch, step = divmod(round_index, sharding.steps_per_epoch)
        return next(sharding.epoch(epoch, step))

    def _meet(self) -> None:
        """All ranks start a turn together; a turn's time must not hold another method's delay."""
        with self.communicator.scope("turn"):
            self.communicator.all_reduce(torch.zeros(1, device=self.communicator.device), label="turn")

    def _slowest(self) -> list[list[float]]:
        own = torch.tensor([entry.seconds for entry in self.entries], dtype=torch.float64)
        slowest = torch.stack(self._all_gather("step times", own)).amax(0)
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
) -> list[dict[str, Any]]:
    """The table. Speed-up is at one global batch, against `single` with one worker's threads, where that ran."""
    by_label = {entry.label: list(times) for entry, times in zip(entries, seconds, strict=True)}
    rows = []
    for entry, times, loss in zip(entries, seconds, losses, strict=True):
        measured = timing(times, warmup=plan.measure.warmup)
        assert measured is not None, "a comparison has at least one step"
        timed = list(times[plan.measure.warmup :])
        row: dict[str, Any] = {
            "label": entry.label,
            "method": entry.method,
            "workers": 1 if METHODS[entry.method].world == "worker" else plan.workers,
            "threads": entry.threads,
            "step": asdict(measured),
            **task.throughput(plan.global_batch, measured.median_s),
            "seconds": timed,
            "loss": None if plan.replayed else loss,
        }
        if BASELINE in by_label:
            # The spread is that of rounds side by side; the figure is the quotient of the two medians printed.
            alone = by_label[BASELINE][plan.measure.warmup :]
            row["speedup"] = asdict(replace(paired_ratio(alone, timed), median=speedup(alone, timed)))
        if CONTROL in by_label:
            row["ratio_to_ddp"] = asdict(paired_ratio(timed, by_label[CONTROL][plan.measure.warmup :]))
        rows.append(row)
    return rows
