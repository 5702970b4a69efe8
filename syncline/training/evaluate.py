"""Loss and score on the test set: every sample counted once, the same result at any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from syncline.comm.communicator import Communicator
from syncline.plan import Precision
from syncline.sync.base import running_state
from syncline.training.step import buffers_kept
from syncline.workload.data.batches import Batches, device_of, on_device
from syncline.workload.data.loading import announced
from syncline.workload.precision import forward_in
from syncline.workload.tasks import Task

BATCH, LARGE_BATCH = 250, 10
"""Fixed, so that a sample is always computed in the same company, whatever the number of ranks."""
LARGE = 3 * 64 * 64
"""Numbers in a sample above which LARGE_BATCH is used, so that it fits into memory; texts are always large."""

Seen = Callable[[int, int], None]
"""Told how many batches of how many are done."""


@dataclass(frozen=True)
class Evaluation:
    loss: float
    score_sum: float
    """Right answers, or years of error; see Task."""
    num_samples: int


def evaluate(
    model: nn.Module,
    batches: Batches,
    communicator: Communicator,
    precision: Precision = "float32",
    limit: int | None = None,
    seen: Seen = lambda done, total: None,
) -> Evaluation:
    """With rank 0's buffers on every rank, each rank taking every n-th batch. Training state is left as it was.

    `limit`: only so many samples, the first ones. `seen` is told before each batch how many of this rank's are done.
    """
    samples = _num_samples(batches, limit)
    with communicator.scope("evaluate"), buffers_kept(model):
        for name, buffer in running_state(model):
            communicator.broadcast(buffer, label=name)
        share = (communicator.rank, communicator.world_size)
        results = _evaluate_batches(model, batches, share, precision, samples, seen)
        results = results.to(communicator.device)
        communicator.all_reduce(results, label="loss and score by batch")
    return _total(results, batches, samples)


def evaluate_per_rank(
    model: nn.Module,
    batches: Batches,
    communicator: Communicator,
    precision: Precision = "float32",
    limit: int | None = None,
    seen: Seen = lambda done, total: None,
) -> list[Evaluation]:
    """Each rank's own buffers on the whole test set: they differ, because batch-norm statistics are local."""
    samples = _num_samples(batches, limit)
    results = _evaluate_batches(model, batches, (0, 1), precision, samples, seen).to(communicator.device)
    with communicator.scope("evaluate per rank"):
        return [_total(part, batches, samples) for part in communicator.all_gather(results)]


def _num_samples(batches: Batches, limit: int | None) -> int:
    return batches.num_test if limit is None else min(limit, batches.num_test)


def _evaluate_batches(
    model: nn.Module, batches: Batches, share: tuple[int, int], precision: Precision, num_samples: int, seen: Seen
) -> Tensor:
    """Sums of losses and of scores for each batch; zero where another rank fills in. `share`: first and stride."""
    size = _batch_size(batches.task)
    every = [range(start, min(start + size, num_samples)) for start in range(0, num_samples, size)]
    device = device_of(model)
    results = torch.zeros(len(every), 2, dtype=torch.float64)
    with torch.no_grad(), _evaluating(model):
        own = every[share[0] :: share[1]]
        for done, samples in enumerate(announced(batches, own)):
            seen(done, len(own))
            index = samples.start // size
            inputs, targets = on_device(batches.test(samples.start, samples.stop), device)
            outputs = forward_in(precision, model, inputs)
            results[index, 0] = batches.task.loss(outputs, targets, reduction="sum").double()
            results[index, 1] = batches.task.score_sum(outputs, targets)
    return results


def _batch_size(task: Task) -> int:
    tokens = not task.example(0).is_floating_point()
    return LARGE_BATCH if tokens or math.prod(task.input_shape) > LARGE else BATCH


def _total(results: Tensor, batches: Batches, num_samples: int) -> Evaluation:
    loss, score = results.sum(0).tolist()
    return Evaluation(loss / (num_samples * batches.task.answers_per_sample), score, num_samples)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]  # a frozen layer may stand in another mode
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
