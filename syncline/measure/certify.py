"""The equality certificate: does a method compute the gradient that it should?

Two references, from identical weights at each step:

    A  the same shards run one after the other in one process, summed in rank order
    B  one worker on the whole global batch, in float64

A asks whether the method averages right. Gradients that equal A's to the bit are certified as such. The only other
excuse is the order of summation: each element must lie within (n-1) u sum|g_i| of the exact sum (u the unit
round-off), and the mean adds two more roundings where n is no power of two.

B asks whether data-parallel training is what one worker would do. It is, except where a layer looks at more than one
sample (batch norm) or draws random numbers (dropout). Such a cause is proven by turning it off: then B must agree.
16-bit compute (bf16) is such a cause too: A computes in it, so the method is held to the same standard there; B does
not, and the certificate says how far apart they are.
With batch norm over the global batch there is no such excuse; no shard can be run by itself then, and A runs them
side by side as threads of one process.

The batch is uneven on purpose: one sample more than divides by n, so that a method that weighs ranks equally shows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from syncline.comm.communicator import Communicator
from syncline.comm.threads import run_threads
from syncline.methods import BatchNorm
from syncline.plan import Precision
from syncline.spans import EventLog
from syncline.sync.after_backward import mean_in_rank_order
from syncline.sync.base import GradientSync, broadcast_state
from syncline.sync.batch_norm import Statistics, attach, synchronise_batch_norm
from syncline.training.step import Worker, gradient_step
from syncline.workload.data.batches import Batches, device_of, on_device
from syncline.workload.precision import widened
from syncline.workload.sharding import Shard, Sharding

CLOSE = 1e-10
"""Float64 carries 16 digits; a reordered sum keeps the first 10, a wrong weight does not keep the third."""


@dataclass(frozen=True)
class Verdict:
    status: Literal["bitwise", "order", "lossy", "explained", "different"]
    ratio: float
    """Largest error over its bound; at most 1 is within."""
    index: int = 0
    """Element with the largest ratio."""
    where: str = ""
    cause: str = ""
    difference: float | None = None
    """Where 16-bit compute is a cause, what it does by itself: the largest difference over the largest gradient."""

    @property
    def passed(self) -> bool:
        return self.status != "different"


def judge_sum(gradient: Tensor, parts: Sequence[Tensor], wire_dtype: torch.dtype | None = None) -> Verdict:
    """Is the gradient the mean of the parts, to the bit or within what the order of summation can do?

    A sum of n numbers in any order errs by at most (n-1) u sum|g_i|. Unless n is a power of two, dividing by n adds a
    rounding; multiplying by 1/n, as DDP does, adds one more, that of 1/n. A 16-bit wire rounds each number at most n
    times on its way and the result once more, with the wire's unit; such a result is lossy at best.
    """
    if torch.equal(gradient, mean_in_rank_order(parts)):
        return Verdict("bitwise", 0.0)
    num_parts = len(parts)
    roundings = num_parts - 1 if num_parts & (num_parts - 1) == 0 else num_parts + 1
    exact = torch.stack([part.double() for part in parts])
    unit = torch.finfo(gradient.dtype).eps / 2
    bound = roundings * unit * (1 + 1e-6) * exact.abs().sum(0) / num_parts
    error = gradient.double() - exact.sum(0) / num_parts
    if wire_dtype is None:
        return _within(error, bound + torch.finfo(gradient.dtype).tiny)
    wire = torch.finfo(wire_dtype)
    bound = bound + (num_parts + 1) * (
        wire.eps / 2 * exact.abs().sum(0) / num_parts + wire.smallest_normal * wire.eps
    )
    verdict = _within(error, bound)
    return replace(verdict, status="lossy") if verdict.passed else verdict


def judge_close(gradient: Tensor, reference: Tensor) -> Verdict:
    """Is the gradient equal to the reference in every digit that float64 arithmetic can be held to?"""
    if torch.equal(gradient, reference):
        return Verdict("bitwise", 0.0)
    bound = torch.full_like(reference, CLOSE * float(reference.abs().max()) + torch.finfo(gradient.dtype).tiny)
    return _within(gradient - reference, bound)


def _within(error: Tensor, bound: Tensor) -> Verdict:
    # NaN compares as neither larger nor smaller; it must count as wrong.
    ratios = torch.nan_to_num(error.abs() / bound, nan=float("inf"))
    index = int(ratios.argmax())
    ratio = float(ratios[index])
    return Verdict("order" if ratio <= 1 else "different", ratio, index)


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The one that decides: any difference first, then the largest error. Without verdicts, nothing is wrong."""
    order = {"different": 3, "lossy": 2, "order": 1, "bitwise": 0, "explained": 0}
    return max(
        verdicts,
        key=lambda verdict: (order[verdict.status], verdict.ratio),
        default=Verdict("bitwise", 0.0),
    )


# Certificates.

LEARNING_RATE = 0.01
LOSSY = "lossy transfers"
SIXTEEN_BITS = "16-bit compute"
STATISTICS = "batch-norm statistics per rank"
CAUSES: dict[str, type[nn.Module]] = {
    STATISTICS: nn.modules.batchnorm._BatchNorm,
    "dropout masks": nn.modules.dropout._DropoutNd,
}
"""What makes a split batch differ from a whole one, by the kind of layer that does it."""


@dataclass(frozen=True)
class Certificate:
    sequential: Verdict
    """Against A."""
    one_worker: Verdict
    """Against B."""
    drift: float
    """Largest difference of a weight after all steps from A's run, over the largest weight. Shown, not judged."""

    @property
    def passed(self) -> bool:
        return self.sequential.passed and self.one_worker.passed


@dataclass(frozen=True)
class Certifier:
    """Collective: every rank runs the same calls. Only rank 0 judges; the others return None.

    A method that stands alone takes the whole batch in a world of one rank, and splits it for its workers itself."""

    communicator: Communicator
    make_sync: Callable[[Communicator], GradientSync]
    make_model: Callable[[], nn.Module]
    batches: Batches
    sharding: Sharding
    """The shares that workers compute: those of ranks, unless the method stands alone."""
    log: EventLog
    make_exact: Callable[[Communicator], GradientSync] | None = None
    """The same method without lossy transfers, where `make_sync` has them."""
    wire_dtype: torch.dtype | None = None
    batch_norm: BatchNorm | None = None
    precision: Precision = "float32"
    steps: int = 3

    def run(self) -> Certificate | None:
        lossy = [LOSSY] if self.make_exact is not None else []
        lossy += [SIXTEEN_BITS] if self.precision != "float32" else []
        sequential = self._judged(self._against_sequential, ["dropout masks"])
        one_worker = self._judged(self._against_one_worker, [*self._causes, *lossy])
        drift = self._drift()
        if self.communicator.rank != 0:
            return None
        return Certificate(sequential, one_worker, drift)

    @property
    def _causes(self) -> list[str]:
        return [cause for cause in CAUSES if cause != STATISTICS or self.batch_norm != "sync"]

    def _judged(self, compare: Callable[[list[str]], Verdict], causes: list[str]) -> Verdict:
        """Compare; where it differs and the model has layers that may cause it, compare again without them."""
        verdict = compare([])
        present = [cause for cause in causes if cause not in CAUSES or _layers(self.make_model(), cause)]
        if self._same_on_all(verdict.passed) or not present:
            return verdict
        without = compare(present)
        if not self._same_on_all(without.passed):
            return without
        explained = replace(without, status="explained", cause=", ".join(present))
        if SIXTEEN_BITS not in present:
            return explained
        alone = compare([cause for cause in present if cause != SIXTEEN_BITS])
        return replace(explained, difference=alone.ratio * CLOSE)

    def _against_sequential(self, off: list[str]) -> Verdict:
        model, worker = self._worker(self.make_model(), self.batches, off)
        reference = _turned_off(self.make_model(), off)
        verdicts: list[Verdict] = []
        for step in range(self.steps):
            self._equalise(model, reference)
            gradients = self._gradient_of_every_rank(worker, step)
            if self.communicator.rank == 0:
                parts = self._one_after_the_other(reference, step)
                verdicts += [
                    self._locate(judge_sum(gradient, parts, self.wire_dtype), rank, step)
                    for rank, gradient in enumerate(gradients)
                ]
                _update(reference, mean_in_rank_order(parts))
        worker.sync.detach()
        return worst(verdicts)

    def _against_one_worker(self, off: list[str]) -> Verdict:
        batches = self.batches.in_dtype(torch.float64)
        if self.precision == "float32" or SIXTEEN_BITS in off:
            model, worker = self._worker(self.make_model().double(), batches, off)
        else:
            model, worker = self._worker(self.make_model(), self.batches, off)
        reference = _turned_off(self.make_model().double(), off)
        self._equalise(model, reference)
        gradients = self._gradient_of_every_rank(worker, 0)
        worker.sync.detach()
        whole = next(replace(self.sharding, rank=0, world_size=1).epoch(0))
        expected = _gradient(reference, batches, whole, 1.0) if gradients else torch.empty(0)
        verdicts = [judge_close(gradient.double(), expected) for gradient in gradients]
        return worst([self._locate(verdict, rank, 0) for rank, verdict in enumerate(verdicts)])

    def _drift(self) -> float:
        model, worker = self._worker(self.make_model(), self.batches, [])
        reference = self.make_model()
        self._equalise(model, reference)
        for step in range(self.steps):
            gradient_step(worker, self._taken(step), worker.sync.finish_for_update)
            worker.sync.update(worker.optimizer)
            if self.communicator.rank == 0:
                _update(reference, mean_in_rank_order(self._one_after_the_other(reference, step)))
        worker.sync.detach()
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        apart = max(float((weight - expected).detach().abs().max()) for weight, expected in pairs)
        return apart / max(float(parameter.detach().abs().max()) for parameter in reference.parameters())

    def _worker(self, model: nn.Module, batches: Batches, off: list[str]) -> tuple[nn.Module, Worker]:
        make = self.make_exact if LOSSY in off and self.make_exact is not None else self.make_sync
        sync = make(self.communicator)
        module = attach(sync, model, self.batch_norm)
        _turned_off(module, off)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        sync.bind(optimizer)
        return model, Worker(model, module, sync, optimizer, batches, self.log, precision=self.precision)

    def _equalise(self, model: nn.Module, reference: nn.Module) -> None:
        """Rank 0's reference weights in every rank's model."""
        with torch.no_grad():
            for target, source in zip(model.parameters(), reference.parameters(), strict=True):
                target.copy_(source)
        broadcast_state(self.communicator, model)

    def _gradient_of_every_rank(self, worker: Worker, step: int) -> list[Tensor]:
        """What the method left in .grad, rank by rank, on rank 0; nothing on the others."""
        gradient_step(worker, self._taken(step))
        own = _flat_gradient(worker.model)
        worker.optimizer.zero_grad()
        parts = [torch.empty_like(own) for _ in range(self.communicator.world_size)]
        with self.communicator.scope(f"certify {own.dtype}"):
            self.communicator.gather(own, parts if self.communicator.rank == 0 else None, label="gradients")
        return parts if self.communicator.rank == 0 else []

    def _taken(self, step: int) -> Shard:
        """This rank's part of the batch."""
        own = replace(self.sharding, rank=self.communicator.rank, world_size=self.communicator.world_size)
        return next(own.epoch(0, step))

    def _one_after_the_other(self, reference: nn.Module, step: int) -> list[Tensor]:
        """Each rank's share of the mean, computed here."""
        if self.batch_norm == "sync":
            return self._side_by_side(reference, step)
        return [self._share(reference, rank, step) for rank in range(self.sharding.world_size)]

    def _side_by_side(self, reference: nn.Module, step: int) -> list[Tensor]:
        def on_rank(communicator: Communicator) -> Tensor:
            model = copy.deepcopy(reference)
            synchronise_batch_norm(model, Statistics(communicator))
            return self._share(model, communicator.rank, step)

        return run_threads(self.sharding.world_size, on_rank, deadline_s=self.communicator.deadline_s)

    def _share(self, reference: nn.Module, rank: int, step: int) -> Tensor:
        """The weight is computed again here, so that a mistake in Shard shows."""
        shard = next(replace(self.sharding, rank=rank).epoch(0, step))
        weight = len(shard.indices) * self.sharding.world_size / shard.num_global
        return _gradient(reference, self.batches, shard, weight, self.precision)

    def _same_on_all(self, answer: bool) -> bool:
        """Rank 0's answer on every rank: only it has something to compare."""
        flag = torch.tensor([int(answer)], device=self.communicator.device)
        with self.communicator.scope("verdict"):
            self.communicator.broadcast(flag, label="passed")
        return bool(flag.item())

    def _locate(self, verdict: Verdict, rank: int, step: int) -> Verdict:
        name = _parameter_at(self.make_model(), verdict.index) if not verdict.passed else ""
        return replace(verdict, where=f"rank {rank}, step {step}, {name}" if name else "")


def _gradient(
    model: nn.Module, batches: Batches, shard: Shard, weight: float, precision: Precision = "float32"
) -> Tensor:
    """Plain PyTorch on purpose: but for the loss of the samples, the reference shares no code with what it judges."""
    model.zero_grad()
    inputs, targets = on_device(batches.train(shard), device_of(model))
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=precision == "bf16"):
        outputs = model(inputs)
    (batches.task.loss(widened(outputs), targets) * weight).backward()
    return _flat_gradient(model)


def _flat_gradient(model: nn.Module) -> Tensor:
    """All gradients in one vector; a missing one counts as zero."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in trained])


def _update(model: nn.Module, gradient: Tensor) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter, part in zip(trained, gradient.split([p.numel() for p in trained]), strict=True):
            parameter.add_(part.view_as(parameter), alpha=-LEARNING_RATE)


def _layers(model: nn.Module, cause: str) -> list[nn.Module]:
    return [layer for layer in model.modules() if isinstance(layer, CAUSES[cause])]


def _turned_off(model: nn.Module, causes: list[str]) -> nn.Module:
    for cause in causes:
        if cause not in CAUSES:
            continue
        for layer in _layers(model, cause):
            layer.eval()
    return model


def _parameter_at(model: nn.Module, index: int) -> str:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            if index < parameter.numel():
                return name
            index -= parameter.numel()
    return "?"
