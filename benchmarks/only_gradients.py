"""What travels besides gradients, and what goes wrong where only gradients are sent. Two ranks as threads.

    python benchmarks/only_gradients.py --save

Every case trains the quarter-width VGG-11 with averaged gradients. They differ in whether ranks started from the same
weights, in what batch norm does across ranks, and in whether each rank sees all classes or half of them.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import dataclass

import numpy as np
import torch
from support import write_result
from torch import Tensor, nn

from syncline.comm import Communicator, instrumented
from syncline.comm.threads import run_threads
from syncline.spans import EventLog
from syncline.sync import make_sync
from syncline.sync.batch_norm import Policy, attach
from syncline.train.evaluate import evaluate_per_rank
from syncline.train.step import Worker, train_step
from syncline.units import format_bytes
from syncline.workload.batches import ImageBatches
from syncline.workload.images import ImageSet
from syncline.workload.models import build_model
from syncline.workload.sharding import Shard
from syncline.workload.synthetic import synthetic_images

RANKS = 2


@dataclass(frozen=True)
class Case:
    batch_norm: Policy
    same_start: bool = True
    all_classes: bool = True

    def words(self) -> str:
        start = "same" if self.same_start else "**different**"
        return f"{start} | {'all' if self.all_classes else '**half on each rank**'} | {self.batch_norm}"


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
    """By kind: messages and bytes of the last step."""


@dataclass(frozen=True)
class Study:
    images: ImageSet
    starts: list[nn.Module]
    """Two different ones, made beforehand because threads share torch's random generator."""
    steps: int
    batch: int


def live(communicator: Communicator, log: EventLog, case: Case, study: Study) -> Outcome:
    images, steps = study.images, study.steps
    model = copy.deepcopy(study.starts[0])
    sync = make_sync("all-reduce", communicator, batch_norm=case.batch_norm)
    module = attach(sync, model, case.batch_norm)
    if not case.same_start and communicator.rank == 1:
        model.load_state_dict(study.starts[1].state_dict())
    batches = ImageBatches(images, seed=1, channels_last=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    worker = Worker(model, module, sync, optimizer, batches, log)
    for step in range(steps):
        log.step = step
        train_step(worker, shard(case, images, communicator.rank, step, study.batch))
    sent = traffic(log, model, steps - 1)
    accuracies = [one.score_sum / one.num_samples for one in evaluate_per_rank(model, batches, communicator)]
    means = [tensor for name, tensor in model.named_buffers() if name.endswith("running_mean")]
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return Outcome(weights, torch.cat(means), accuracies, sent)


def shard(case: Case, images: ImageSet, rank: int, step: int, batch: int) -> Shard:
    """This rank's half of a batch that is drawn from all images, or from those of its five classes."""
    allowed = np.arange(len(images.train_labels))
    if not case.all_classes:
        allowed = allowed[images.train_labels % RANKS == rank]
    drawn = np.random.default_rng((step, rank)).choice(allowed, batch // RANKS, replace=False)
    return Shard(0, step, drawn, batch, RANKS)


def traffic(log: EventLog, model: nn.Module, step: int) -> dict[str, tuple[int, int]]:
    buffers = {name for name, _ in model.named_buffers()}
    found: dict[str, tuple[int, int]] = {}
    for record in log.records:
        if record["kind"] == "collective" and record["step"] == step:
            label = record["label"]
            kind = "statistics" if "statistics of" in label else "buffers" if label in buffers else "gradients"
            count, size = found.get(kind, (0, 0))
            found[kind] = (count + 1, size + record["bytes"])
    return found


def run(case: Case, study: Study) -> list[Outcome]:
    def on_rank(backend: Communicator) -> Outcome:
        log = EventLog(rank=backend.rank, world_size=RANKS)
        return live(instrumented(backend, log, deadline_s=600), log, case, study)

    return run_threads(RANKS, on_rank, deadline_s=600)


def apart(one: Tensor, other: Tensor) -> str:
    return f"{float((one - other).norm() / one.norm()):.1e}" if not torch.equal(one, other) else "0"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--save", action="store_true", help="keep the result beside this file")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    starts = [build_model("vgg11-quarter", seed=seed) for seed in (1, 2)]
    study = Study(synthetic_images(4000, 500), starts, chosen.steps, chosen.batch)
    ends = ["| start | classes | batch norm | weights apart | running means apart | test accuracy, rank 0 and 1 |"]
    ends.append("|---|---|---|---|---|---|")
    sent = ["| batch norm | gradients | buffers | statistics |", "|---|---|---|---|"]
    for case in CASES:
        one, other = run(case, study)
        distances = f"{apart(one.weights, other.weights)} | {apart(one.running_means, other.running_means)}"
        rates = ", ".join(f"{accuracy:.1%}" for accuracy in one.accuracies)
        ends.append(f"| {case.words()} | {distances} | {rates} |")
        if case.same_start and case.all_classes:
            kinds = [one.sent.get(kind, (0, 0)) for kind in ("gradients", "buffers", "statistics")]
            cells = [f"{count} messages, {format_bytes(size)}" if count else "-" for count, size in kinds]
            sent.append(f"| {case.batch_norm} | {' | '.join(cells)} |")
    sizes = f"{chosen.steps} steps of {chosen.batch} synthetic images on {RANKS} ranks, vgg11-quarter."
    apart_is = "Apart: length of the difference over length. Each rank is tested with its own weights and buffers."
    lines = [sizes, apart_is, "", *ends, "", "What a rank gives to one step, bytes before any collective:", "", *sent]
    write_result("only_gradients", lines, save=chosen.save)


if __name__ == "__main__":
    main()
