"""One synchronous data-parallel step. Read this first: it is the same for every method.

Each rank holds a copy of the model and takes its shard of the global batch. After `finish` every rank holds the same
gradient, the one that a single worker would compute on the whole batch, so all copies stay equal:

    mean over the global batch  =  1/world x sum over ranks of  (n_local x world / n_global) x (mean over the shard)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from syncline.spans import EventLog
from syncline.sync import GradientSync
from syncline.train.delays import NO_DELAYS, Delayed, Delays
from syncline.workload.batches import Batches
from syncline.workload.sharding import Shard


@dataclass(frozen=True)
class Worker:
    """What one rank needs to take a step."""

    model: nn.Module
    module: nn.Module
    """What is called in forward: the model, or what the method made of it."""
    sync: GradientSync
    optimizer: torch.optim.Optimizer
    batches: Batches
    log: EventLog
    label_smoothing: float = 0.0
    delays: Delays = NO_DELAYS

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A part of the step in the log; it begins with a pause where the plan injects one."""
        span, pause_s = self.log.span(name), self.delays.pause_s(name, self.log.step)
        return Delayed(span, pause_s) if pause_s else span


@dataclass(frozen=True)
class StepResult:
    """This rank's own shard: its mean loss, how many samples it has, and the sum of their scores (see Task)."""

    loss: float
    num_samples: int
    score_sum: float


def train_step(worker: Worker, shard: Shard) -> StepResult:
    result = gradient_step(worker, shard)

    # Every rank holds the same gradient and the same optimiser state, so all copies of the model stay equal.
    with worker.phase("update"):
        worker.optimizer.step()
        worker.optimizer.zero_grad()
    return result


def gradient_step(worker: Worker, shard: Shard) -> StepResult:
    """All of a step but the update: afterwards every .grad is the mean over the global batch."""
    phase = worker.phase
    empty = len(shard.indices) == 0
    with phase("data"):
        inputs, targets = worker.batches.train(shard)

    with buffers_kept(worker.model, when=empty):
        with phase("forward"):
            outputs = worker.module(inputs)
            loss = worker.batches.task.loss(outputs, targets, label_smoothing=worker.label_smoothing)

        # The weight makes the average over ranks the mean over the global batch, also where shards are uneven.
        with phase("backward"):
            (loss * shard.weight).backward()

    # Methods that overlap have sent most by now; what is left here is the communication that a user pays for.
    with phase("sync"):
        worker.sync.finish()

    if empty:
        return StepResult(0.0, 0, 0)
    with phase("score"):
        return StepResult(loss.item(), len(targets), worker.batches.task.score_sum(outputs, targets))


@contextmanager
def buffers_kept(model: nn.Module, *, when: bool = True) -> Iterator[None]:
    """Undo what happens to the buffers inside: a stand-in batch must not leave a trace in batch norm."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()] if when else []
    try:
        yield
    finally:
        for buffer, value in kept:
            buffer.copy_(value)


def discarded_backward(worker: Worker, shard: Shard) -> None:
    """Forward, backward and synchronise once without a trace: buffers, gradients and random state are put back.

    DDP rebuilds its buckets after its first backward, and buckets decide the order of summation. A run that starts
    fresh and one that resumes are equal bit for bit only if both have this behind them.
    """
    with torch.random.fork_rng(), buffers_kept(worker.model):
        gradient_step(worker, shard)
    worker.optimizer.zero_grad()
