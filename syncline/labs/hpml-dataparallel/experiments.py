"""Experiments of the lab hpml-dataparallel, each called on every rank.

`travels`: what travels besides gradients, and what goes wrong where only gradients are sent. Every case trains the
quarter-width VGG-11 with averaged gradients. Cases differ in whether ranks started from the same weights, in what
batch norm does across ranks, and in whether each rank sees all classes or half of them.

`epochs_of_samplers`: what a sampler gives a rank from epoch to epoch, with and without being told the epoch. torch's
DistributedSampler shuffles by seed + epoch, and its epoch stays 0 until somebody calls set_epoch: then every epoch
hands each rank the same samples in the same order. Syncline's own sharding takes the epoch as an argument.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from syncline.comm import Communicator
from syncline.errors import PlanError
from syncline.methods import BatchNorm
from syncline.spans import EventLog
from syncline.sync import make_sync
from syncline.sync.batch_norm import attach
from syncline.training.evaluate import evaluate_per_rank
from syncline.training.step import Worker, train_step
from syncline.workload.data.batches import ImageBatches
from syncline.workload.data.images import ImageSet
from syncline.workload.data.synthetic import synthetic_images
from syncline.workload.models import build_model
from syncline.workload.sharding import Shard, Sharding

RANKS = 2
MODEL = "vgg11-quarter"
KINDS = ("gradients", "buffers", "statistics")
BEFORE = -1
"""The step that a log stamps on what happens before the first one."""
EPOCHS = 3
SAMPLES = 10_000

Order = Callable[[int], list[int]]
"""This rank's samples of an epoch, in order."""


@dataclass(frozen=True)
class Case:
    batch_norm: BatchNorm
    same_start: bool = True
    all_classes: bool = True


CASES = (
    Case("local"),
    Case("broadcast"),
    Case("sync"),
    Case("local", same_start=False),
    Case("local", all_classes=False),
    Case("broadcast", all_classes=False),
    Case("sync", all_classes=False),
)


@dataclass(frozen=True)
class Outcome:
    """One rank's end."""

    weights: Tensor
    running_means: Tensor
    accuracies: list[float]
    sent: dict[str, tuple[int, int]]
    """By kind: messages and bytes of the last step, and `start`: those before the first."""


@dataclass(frozen=True)
class Experiment:
    images: ImageSet
    starts: list[nn.Module]
    """Two different ones, made beforehand because threads share torch's random generator."""
    steps: int
    batch: int


def experiment(steps: int, batch: int, images: ImageSet | None = None) -> Experiment:
    starts = [build_model(MODEL, seed=seed) for seed in (1, 2)]
    return Experiment(images or synthetic_images(4000, 500), starts, steps, batch)


def travels(rank: Any) -> list[dict[str, Any]]:
    """A study's rows, one for each case, on the two ranks that the plan started."""
    communicator, plan = rank.communicator, rank.plan
    if communicator.world_size != RANKS:
        raise PlanError(f"this experiment takes {RANKS} ranks, not {communicator.world_size}.")
    about = experiment(plan.steps or 20, plan.global_batch)
    return [_row(case, live(communicator, rank.log, case, about), communicator) for case in CASES]


def _row(case: Case, own: Outcome, communicator: Communicator) -> dict[str, Any]:
    weights = communicator.all_gather(own.weights, label="weights")
    means = communicator.all_gather(own.running_means, label="running means")
    point = {
        "start": "same" if case.same_start else "different",
        "classes": "all" if case.all_classes else "half on each rank",
        "batch_norm": case.batch_norm,
        "method": "all-reduce",
    }
    figures: dict[str, Any] = {kind: own.sent.get(kind, (0, 0))[1] for kind in KINDS}
    figures["gradient_bytes"] = figures.pop("gradients")
    figures["messages"] = sum(own.sent.get(kind, (0, 0))[0] for kind in KINDS)
    figures["start_bytes"] = own.sent.get("start", (0, 0))[1]
    figures |= {"weights_apart": distance(*weights), "means_apart": distance(*means)}
    figures |= {f"accuracy_{number}": accuracy for number, accuracy in enumerate(own.accuracies)}
    return {"point": point, **figures}


def live(communicator: Communicator, log: EventLog, case: Case, about: Experiment) -> Outcome:
    """One rank's part. Collective."""
    log.records.clear()
    log.step = BEFORE
    model = copy.deepcopy(about.starts[0])
    sync = make_sync("all-reduce", communicator, batch_norm=case.batch_norm)
    module = attach(sync, model, case.batch_norm)
    if not case.same_start and communicator.rank == 1:
        model.load_state_dict(about.starts[1].state_dict())
    batches = ImageBatches(about.images, seed=1, channels_last=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    worker = Worker(model, module, sync, optimizer, batches, log)
    for step in range(about.steps):
        log.step = step
        train_step(worker, shard(case, about.images, communicator.rank, step, about.batch))
    sent = traffic(log, about.steps - 1)
    evaluated = evaluate_per_rank(model, batches, communicator)
    accuracies = [result.score_sum / result.num_samples for result in evaluated]
    means = [tensor for name, tensor in model.named_buffers() if name.endswith("running_mean")]
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    sync.detach()
    return Outcome(weights, torch.cat(means), accuracies, sent)


def shard(case: Case, images: ImageSet, rank: int, step: int, batch: int) -> Shard:
    """This rank's half of a batch that is drawn from all images, or from those of its five classes."""
    allowed = np.arange(len(images.train_labels))
    if not case.all_classes:
        allowed = allowed[images.train_labels % RANKS == rank]
    drawn = np.random.default_rng((step, rank)).choice(allowed, batch // RANKS, replace=False)
    return Shard(0, step, drawn, batch, RANKS)


def traffic(log: EventLog, step: int) -> dict[str, tuple[int, int]]:
    sent: dict[str, tuple[int, int]] = {}
    for record in log.records:
        if record["kind"] != "collective" or record["step"] not in (BEFORE, step):
            continue
        label = record["label"]
        is_buffers = label.startswith("buffers of")
        kind = "statistics" if "statistics of" in label else "buffers" if is_buffers else "gradients"
        kind = "start" if record["step"] == BEFORE else kind
        count, size = sent.get(kind, (0, 0))
        sent[kind] = (count + 1, size + record["bytes"])
    return sent


def distance(first: Tensor, second: Tensor) -> float:
    """Length of the difference over length; 0 only where they are equal to the bit."""
    return 0.0 if torch.equal(first, second) else float((first - second).norm() / first.norm())


def epochs_of_samplers(rank: Any) -> list[dict[str, Any]]:
    """A study's rows, one for each way of sampling: the mean over ranks of what `compare_epochs` finds."""
    communicator, batch = rank.communicator, max(1, rank.plan.global_batch // rank.communicator.world_size)
    rows = []
    for name, order in orders(communicator.rank, communicator.world_size, rank.plan.seed, rank.plan.global_batch):
        figures = compare_epochs([order(epoch) for epoch in range(EPOCHS)], batch, SAMPLES)
        parts: list[Tensor] = communicator.all_gather(torch.tensor(list(figures.values())), label=f"epochs of {name}")
        means = torch.stack(parts).mean(0).tolist()
        rows.append({"point": {"sampler": name, "method": name}, **dict(zip(figures, means, strict=True))})
    return rows


def orders(rank: int, world_size: int, seed: int, global_batch: int) -> list[tuple[str, Order]]:
    def make() -> DistributedSampler[int]:
        return DistributedSampler(range(SAMPLES), world_size, rank, seed=seed % 2**31)  # type: ignore[arg-type]

    unaware, aware = make(), make()

    def without_set_epoch(_: int) -> list[int]:
        return list(unaware)

    def with_set_epoch(epoch: int) -> list[int]:
        aware.set_epoch(epoch)
        return list(aware)

    def sharded(epoch: int) -> list[int]:
        sharding = Sharding(SAMPLES, global_batch, seed, rank, world_size)
        return [index for shard in sharding.epoch(epoch) for index in shard.indices.tolist()]

    return [
        ("DistributedSampler", without_set_epoch),
        ("DistributedSampler, set_epoch", with_set_epoch),
        ("Syncline", sharded),
    ]


def compare_epochs(epochs: Sequence[Sequence[int]], batch: int, num_samples: int) -> dict[str, float]:
    """Of one rank: batches and samples that are those of the epoch before, and how much of the set it saw in all."""
    pairs = list(itertools.pairwise(epochs))
    same_batches = [_same(_batches(before, batch), _batches(after, batch)) for before, after in pairs]
    same_shard = [len(set(before) & set(after)) / len(set(before)) for before, after in pairs]
    return {
        "same_batches": sum(same_batches) / len(pairs),
        "same_shard": sum(same_shard) / len(pairs),
        "seen": len({index for epoch in epochs for index in epoch}) / num_samples,
    }


def _batches(order: Sequence[int], batch: int) -> list[tuple[int, ...]]:
    return [tuple(order[start : start + batch]) for start in range(0, len(order), batch)]


def _same(before: Sequence[Any], after: Sequence[Any]) -> float:
    return sum(bool(a == b) for a, b in zip(before, after, strict=False)) / len(before)
