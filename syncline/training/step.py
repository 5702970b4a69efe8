"""One synchronous data-parallel step. Read this first: it is the same for every method.

Each rank holds a copy of the model and takes its shard of the global batch. After `finish` every rank holds the same
gradient, the one that a single worker would compute on the whole batch, so all copies stay equal:

    mean over the global batch  =  1/world x sum over ranks of  (n_local x world / n_global) x (mean over the shard)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from syncline.comm.threads import ThreadCommunicator, ThreadWorld
from syncline.errors import NotFiniteError
from syncline.plan import OnNan, Precision
from syncline.spans import EventLog
from syncline.sync import GradientSync
from syncline.sync.base import Single, keras_statistics, running_state
from syncline.sync.batch_norm import SyncBatchNorm, samples_not_counted
from syncline.sync.tree_aggregate import TreeAggregate
from syncline.training.delays import NO_DELAYS, Delayed, Delays
from syncline.workload.data.batches import Batches, device_of, on_device
from syncline.workload.precision import forward_in
from syncline.workload.sharding import Shard

Part = tuple[Tensor, Any, Tensor]
"""Loss, outputs and targets of a part of a shard; no targets for stand-ins."""


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
    accumulate: int = 1
    """Number of parts that the shard is computed in."""
    precision: Precision = "float32"
    clip_norm: float | None = None
    """Longest gradient that is applied."""
    on_nan: OnNan = "ignore"
    """What to do about a loss or gradient of this rank that is not finite."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A part of the step in the log; it begins with a pause where the plan injects one."""
        span, pause_s = self.log.span(name), self.delays.pause_s(name, self.log.step)
        return Delayed(span, pause_s) if pause_s else span

    def clip(self) -> None:
        """Scale down a gradient that is too long. It is the mean over ranks by now, and as long on each of them."""
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)


@dataclass(frozen=True)
class StepResult:
    """This rank's own shard: its mean loss, how many samples it has, and the sum of their scores (see Task)."""

    loss: float
    num_samples: int
    score_sum: float
    guess_loss: float | None = None
    """The loss of a model that knows nothing."""
    not_finite: NotFiniteError | None = None
    """What a run that goes on in spite of it has to say."""


def seed_forward(seed: int, rank: int, step: int) -> None:
    """What a model draws in forward (dropout) differs from rank to rank and from step to step, and is the same in
    every run, resumed ones too, and for every method."""
    torch.manual_seed(int(np.random.SeedSequence((seed, rank, step)).generate_state(1, np.uint64)[0]))


def train_step(worker: Worker, shard: Shard) -> StepResult:
    # Clipping looks at all gradients, so it needs them all to have arrived.
    result = gradient_step(worker, shard, worker.sync.finish if worker.clip_norm else worker.sync.finish_for_update)
    result = refuse_nan(worker, result)

    # Every rank holds the same gradient and the same optimiser state, so all copies of the model stay equal.
    with worker.phase("update"):
        worker.clip()
        worker.sync.update(worker.optimizer)
    return result


def refuse_nan(worker: Worker, result: StepResult) -> StepResult:
    """Looks at this rank's own loss, and at its gradients as they were before they were sent; the weights are still
    as they were before the step."""
    if worker.on_nan == "ignore":
        return result
    names, loss_is_finite = worker.sync.not_finite(), math.isfinite(result.loss)
    if loss_is_finite and not names:
        return result
    rest = f" and of {len(names) - 1} more" if len(names) > 1 else ""
    what = f"the loss is {result.loss}" if not loss_is_finite else f"the gradient of {names[0]}{rest} is not finite"
    alone = "" if worker.sync.sees_gradients else ", which looks at the loss alone"
    what += f", method {worker.log.method}{alone}" if worker.log.method else ""
    action = 'Look at this rank\'s batch of that step, or lower the learning rate; on_nan = "warn" goes on.'
    error = NotFiniteError(f"{what}.", action=action, rank=worker.log.rank, step=worker.log.step)
    if worker.on_nan == "stop":
        raise error
    return replace(result, not_finite=error)


def gradient_step(worker: Worker, shard: Shard, finish: Callable[[], None] | None = None) -> StepResult:
    """All of a step but the update: afterwards every .grad is the mean over the global batch."""
    if isinstance(worker.sync, TreeAggregate):
        return _in_tasks(worker, worker.sync, shard)
    *first, last = shard.split(worker.accumulate)
    with worker.sync.no_sync() if first else nullcontext():
        parts = [_forward_and_backward(worker, part) for part in first]
    parts.append(_forward_and_backward(worker, last))

    # Methods that overlap have sent most by now; what is left here is the communication that a user pays for.
    with worker.phase("sync"):
        (finish or worker.sync.finish)()
    with worker.phase("score"):
        return _result(worker, parts, len(shard.indices))


def _in_tasks(worker: Worker, sync: TreeAggregate, shard: Shard) -> StepResult:
    """Each worker's share is computed in a task of Spark's, by the same code as on a rank; here is the driver."""
    settings = (worker.label_smoothing, worker.accumulate, worker.precision)
    parts = sync.compute(ShardStep(worker.batches, sync.seed, *settings), shard)
    samples = sum(part.num_samples for part in parts)
    loss = sum(part.loss * part.num_samples for part in parts if part.num_samples) / samples
    return StepResult(loss, samples, sum(part.score_sum for part in parts), parts[0].guess_loss)


@dataclass(frozen=True)
class ShardStep:
    """Forward and backward of a share of the batch in a process that is no rank: it has nobody to talk to."""

    batches: Batches
    seed: int
    label_smoothing: float
    accumulate: int
    precision: Precision

    def __call__(self, model: nn.Module, shard: Shard, rank: int, step: int, log: EventLog) -> StepResult:
        seed_forward(self.seed, rank, max(step, 0))  # -1 before the first one
        alone = Single(ThreadCommunicator(ThreadWorld(1), 0))
        unused = torch.optim.SGD(model.parameters())
        worker = Worker(
            model, model, alone, unused, self.batches, log, label_smoothing=self.label_smoothing,
            accumulate=self.accumulate, precision=self.precision,
        )  # fmt: skip
        return gradient_step(worker, shard)


def _forward_and_backward(worker: Worker, shard: Shard) -> Part:
    phase = worker.phase
    empty = len(shard.indices) == 0
    with phase("data"):
        batch = worker.batches.train(shard)
    inputs, targets = copied_to(device_of(worker.model), batch, worker.phase)

    with standing_in(worker.model, when=empty):
        with phase("forward"):
            outputs = forward_in(worker.precision, worker.module, inputs)
            loss = worker.batches.task.loss(outputs, targets, label_smoothing=worker.label_smoothing)

        # The weight makes the average over ranks the mean over the global batch, also where shards are uneven.
        with phase("backward"):
            try:
                (loss * shard.weight).backward()
            except RuntimeError as error:
                raise worker.sync.explained(error) from error.__cause__
    return (loss.detach(), outputs, targets[:0] if empty else targets)


def copied_to(
    device: torch.device, batch: tuple[Tensor, Tensor], phase: Callable[[str], AbstractContextManager[None]]
) -> tuple[Tensor, Tensor]:
    """The batch where the model is; a part of the step where that is another device than the data's."""
    if device == batch[0].device:
        return batch
    with phase("copy"):
        return on_device(batch, device)


def _result(worker: Worker, parts: list[Part], num_samples: int) -> StepResult:
    """Read only now: on a GPU, reading a loss waits for all that was queued before it."""
    counted = [(loss, outputs, targets) for loss, outputs, targets in parts if len(targets)]
    loss = sum(loss.item() * (len(targets) / num_samples) for loss, _, targets in counted)
    task = worker.batches.task
    score = sum(task.score_sum(outputs, targets) for _, outputs, targets in counted)
    return StepResult(loss, num_samples, score, task.guess_loss(counted[0][1]) if counted else None)


@contextmanager
def standing_in(model: nn.Module, *, when: bool) -> Iterator[None]:
    """A stand-in batch leaves no trace in batch norm: local buffers are put back, and statistics over the global
    batch, which go on without it, do not count it."""
    if not when:
        yield
        return
    layers = [layer for layer in model.modules() if not isinstance(layer, SyncBatchNorm)]
    local = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
    local += [tensor for _, tensor in keras_statistics(model)]
    with _put_back(local), samples_not_counted(model):
        yield


def buffers_kept(model: nn.Module) -> AbstractContextManager[None]:
    """Undo what happens to the buffers inside."""
    return _put_back([tensor for _, tensor in running_state(model)])


@contextmanager
def _put_back(tensors: list[Tensor]) -> Iterator[None]:
    before = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, value in zip(tensors, before, strict=True):
            tensor.data.copy_(value)  # unseen by autograd: a backward to come may have kept a buffer of batch norm


def discarded_backward(worker: Worker, shard: Shard) -> None:
    """Forward, backward and synchronise once without a trace: buffers, gradients and random state are put back.

    DDP rebuilds its buckets after its first backward, and buckets decide the order of summation. A run that starts
    fresh and one that resumes are equal bit for bit only if both have this behind them.
    """
    with torch.random.fork_rng(), buffers_kept(worker.model):
        gradient_step(worker, shard)
    worker.optimizer.zero_grad()
