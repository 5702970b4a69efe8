"""Loss and score on the test set: every sample counted once, the same result at any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from syncline.comm.communicator import Communicator
from syncline.plan import Precision
from syncline.training.step import buffers_kept
from syncline.workload.data.batches import Batches, device_of, on_device
from syncline.workload.data.loading import announced
from syncline.workload.precision import forward_in
from syncline.workload.tasks import Task

BATCH, LARGE_BATCH = 250, 10
"""Fixed, so that a sample is always computed in the same company, whatever the number of ranks."""
LARGE = 3 * 64 * 64
"""Numbers in a sample above which LARGE_BATCH is used, so that it fits into memory; texts are always large."""


@dataclass(frozen=True)
class Evaluation:
    loss: float
    score_sum: float
    """Right answers, or years of error; see Task."""
    num_samples: int


def evaluate(
    model: nn.Module, batches: Batches, communicator: Communicator, precision: Precision = "float32"
) -> Evaluation:
    """With rank 0's buffers on every rank, each rank taking every n-th batch. Training state is left as it was."""
    with communicator.scope("evaluate"), buffers_kept(model):
        for name, buffer in model.named_buffers():
            communicator.broadcast(buffer, label=name)
        results = _evaluate_batches(model, batches, communicator.rank, communicator.world_size, precision)
        results = results.to(communicator.device)
        communicator.all_reduce(results, label="loss and score by batch")
    return _total(results, batches)


def evaluate_per_rank(
    model: nn.Module, batches: Batches, communicator: Communicator, precision: Precision = "float32"
) -> list[Evaluation]:
    """Each rank's own buffers on the whole test set: they differ, because batch-norm statistics are local."""
    results = _evaluate_batches(model, batches, 0, 1, precision).to(communicator.device)
    with communicator.scope("evaluate per rank"):
        return [_total(part, batches) for part in communicator.all_gather(results)]


def _evaluate_batches(model: nn.Module, batches: Batches, first: int, stride: int, precision: Precision) -> Tensor:
    """Sums of losses and of scores for each batch; zero where another rank fills in."""
    size = _batch_size(batches.task)
    every = [range(start, start + size) for start in range(0, batches.num_test, size)]
    device = device_of(model)
    results = torch.zeros(len(every), 2, dtype=torch.float64)
    with torch.no_grad(), _evaluating(model):
        for samples in announced(batches, every[first::stride]):
            index = samples.start // size
            inputs, targets = on_device(batches.test(samples.start, samples.stop), device)
            outputs = forward_in(precision, model, inputs)
            results[index, 0] = batches.task.loss(outputs, targets, reduction="sum").double()
            results[index, 1] = batches.task.score_sum(outputs, targets)
    return results


def _batch_size(task: Task) -> int:
    tokens = not task.example(0).is_floating_point()
    return LARGE_BATCH if tokens or math.prod(task.input_shape) > LARGE else BATCH


def _total(results: Tensor, batches: Batches) -> Evaluation:
    loss, score = results.sum(0).tolist()
    return Evaluation(loss / (batches.num_test * batches.task.answers_per_sample), score, batches.num_test)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]  # a frozen layer may stand in another mode
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
