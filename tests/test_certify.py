"""The certificate: right methods pass, with the right words, and every known kind of wrong method fails."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import pytest
import torch
from helpers import MANY_WORKERS, ON_THREADS, on_processes, on_threads, small_batches
from torch import Tensor, nn

from syncline.comm import Communicator
from syncline.measure.certify import CLOSE, Certificate, Certifier, Verdict, judge_close, judge_sum, worst
from syncline.spans import EventLog
from syncline.sync import GradientSync, make_sync
from syncline.sync.after_backward import AfterBackward, AllReduce
from syncline.sync.ahead import Ahead
from syncline.workload.models import build_model
from syncline.workload.sharding import Shard, Sharding

IN_RANK_ORDER = ("gather-scatter", "point-to-point")
"""Sum like the reference, so nothing but bitwise equality will do."""


def batch_norm_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))


def dropout_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(3 * 32 * 32, 10))


@cache
def template(name: str) -> nn.Module:
    makers = {"batch norm": batch_norm_model, "dropout": dropout_model}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return makers[name]() if name in makers else build_model(name, seed=1)


def certify(
    comm: Communicator,
    log: EventLog,
    make: Callable[[Communicator], GradientSync],
    model_name: str = "cnn",
    extra: int = 1,
) -> Certificate | None:
    return Certifier(
        communicator=comm,
        make_sync=make,
        make_model=lambda: copy.deepcopy(template(model_name)),
        batches=small_batches(),
        sharding=Sharding(200, 4 * comm.world_size + extra, 7, comm.rank, comm.world_size),
        log=log,
    ).run()


def on_rank_0(
    world_size: int, make: Callable[[Communicator], GradientSync], model_name: str = "cnn", extra: int = 1
) -> Certificate:
    first, *others = on_threads(world_size, lambda comm, log: certify(comm, log, make, model_name, extra))
    assert others == [None] * (world_size - 1)
    assert first is not None
    return first


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("method", ON_THREADS)
def test_right_methods_pass(method: str, world_size: int) -> None:
    certificate = on_rank_0(world_size, lambda comm: make_sync(method, comm))
    assert certificate.passed
    assert certificate.sequential.status in ("bitwise", "order")
    assert certificate.one_worker.status in ("bitwise", "order")
    assert certificate.sequential.cause == certificate.one_worker.cause == ""
    assert certificate.drift < 1e-5
    if method in IN_RANK_ORDER:
        assert certificate.sequential.status == "bitwise"
        assert certificate.drift == 0.0


def test_ahead_is_certified_without_its_barrier() -> None:
    """Its tripwires are in place of gradients after backward, and its updates are late."""
    went_on = []

    class Watched(Ahead):
        def finish_for_update(self) -> None:
            super().finish_for_update()
            went_on.append(self._pending)

    for world_size in (2, 3):
        certificate = on_rank_0(world_size, lambda comm: Watched(comm, barrier=False, chunk_mb=0.01))
        assert certificate.passed
        assert certificate.drift < 1e-5
    assert went_on.count(True) >= 2 * 2 + 3 * 2


def test_ahead_that_changes_a_sum_on_its_way_is_not_certified() -> None:
    class Hasty(Ahead):
        def _divide(self, number: int) -> None:
            if not self._waits:
                self._range(self.layout.buckets[number]).mul_(1.001)

    assert not on_rank_0(2, lambda comm: Hasty(comm, barrier=False, chunk_mb=0.01)).passed


@pytest.mark.parametrize("method", ["gather-scatter", "all-reduce"])
def test_batch_norm_is_named_as_the_cause(method: str) -> None:
    certificate = on_rank_0(3, lambda comm: make_sync(method, comm), "batch norm")
    assert certificate.passed
    assert certificate.sequential.status in ("bitwise", "order")
    assert certificate.one_worker.status == "explained"
    assert certificate.one_worker.cause == "batch-norm statistics per rank"


# Mutants: each is all-reduce with one thing wrong.


class NotDivided(AfterBackward):
    def average(self, name: str, gradient: Tensor, ready_ns: int) -> None:
        self.communicator.all_reduce(gradient)


class OneSkipped(AllReduce):
    def average(self, name: str, gradient: Tensor, ready_ns: int) -> None:
        if not name.endswith("bias"):
            super().average(name, gradient, ready_ns)


class Stale(AllReduce):
    """Gives the mean of the step before."""

    def average(self, name: str, gradient: Tensor, ready_ns: int) -> None:
        super().average(name, gradient, ready_ns)
        last: dict[str, Tensor] = self.__dict__.setdefault("last", {})
        new = gradient.clone()
        gradient.copy_(last.get(name, new))
        last[name] = new


class WrongOnRank2(AllReduce):
    def average(self, name: str, gradient: Tensor, ready_ns: int) -> None:
        super().average(name, gradient, ready_ns)
        if self.communicator.rank == 2:
            gradient.mul_(1.001)


class ParametersAveraged(AllReduce):
    def finish(self) -> None:
        for name, parameter in self._parameters:
            super().average(name, parameter.data, 0)


MUTANTS: list[type[GradientSync]] = [NotDivided, OneSkipped, Stale, WrongOnRank2, ParametersAveraged]


@pytest.mark.parametrize("model_name", ["cnn", "batch norm"])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails_and_the_place_is_named(mutant: type[GradientSync], model_name: str) -> None:
    certificate = on_rank_0(3, mutant, model_name)
    assert not certificate.passed
    assert certificate.sequential.status == "different"
    assert certificate.sequential.ratio > 1
    assert "step" in certificate.sequential.where
    names = [name for name, _ in template(model_name).named_parameters()]
    assert certificate.sequential.where.rpartition(" ")[2] in names
    if mutant is WrongOnRank2:
        assert certificate.sequential.where.startswith("rank 2,")


def test_ranks_weighted_equally_fail_on_an_uneven_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shard, "weight", property(lambda shard: 1.0))
    uneven = on_rank_0(3, AllReduce)
    assert not uneven.passed
    assert uneven.sequential.status == uneven.one_worker.status == "different"
    assert on_rank_0(3, AllReduce, extra=0).passed


def certify_dropout(comm: Communicator, log: EventLog) -> list[Certificate | None]:
    return [certify(comm, log, make, "dropout") for make in (AllReduce, NotDivided, OneSkipped)]


def test_dropout_is_named_as_the_cause_but_excuses_no_mutant() -> None:
    """On processes: threads share torch's generator."""
    right, *wrong = on_processes(2, certify_dropout)[0]
    assert right.passed
    assert right.sequential.status == right.one_worker.status == "explained"
    assert right.sequential.cause == right.one_worker.cause == "dropout masks"
    assert [certificate.passed for certificate in wrong] == [False, False]


def certify_every_method(comm: Communicator, log: EventLog) -> dict[str, Certificate | None]:
    return {method: certify(comm, log, lambda c, m=method: make_sync(m, c)) for method in MANY_WORKERS}


def test_every_method_passes_on_processes() -> None:
    certificates = on_processes(3, certify_every_method)[0]
    for method, certificate in certificates.items():
        assert certificate.passed, method
        assert certificate.one_worker.status in ("bitwise", "order")
        assert certificate.sequential.status in (("bitwise",) if method in IN_RANK_ORDER else ("bitwise", "order"))


# Verdicts by themselves.


def test_mean_in_rank_order_is_bitwise() -> None:
    parts = [torch.tensor([0.1, 1e8]), torch.tensor([0.2, 1.0]), torch.tensor([0.3, -1e8])]
    assert judge_sum((parts[0] + parts[1] + parts[2]) / 3, parts) == Verdict("bitwise", 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_order_of_summation_is_within_its_bound(dtype: torch.dtype) -> None:
    stream = torch.Generator().manual_seed(0)
    parts = list(torch.randn(5, 10_000, generator=stream, dtype=dtype))
    found = (parts[4] + (parts[3] + parts[2]) + (parts[1] + parts[0])) / 5
    verdict = judge_sum(found, parts)
    assert verdict.status == "order"
    assert 0 < verdict.ratio <= 1


@pytest.mark.parametrize(("share", "status"), [(0.99, "order"), (1.01, "different")])
@pytest.mark.parametrize(("values", "roundings"), [((1, -1), 1), ((1, -1, 0), 4), ((1, -1, 1, -1), 3)])
def test_bound_is_roundings_times_unit_times_sum(
    values: tuple[int, ...], roundings: int, share: float, status: str
) -> None:
    """The second element's parts cancel, so what is found there is all error."""
    parts = [torch.tensor([1.0, value, 1.0]) for value in values]
    bound = roundings * torch.finfo(torch.float32).eps / 2 * sum(map(abs, values)) / len(values)
    verdict = judge_sum(torch.tensor([1.0, share * bound, 1.0]), parts)
    assert verdict.status == status
    assert verdict.index == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_different(value: float) -> None:
    parts = [torch.ones(3), torch.ones(3)]
    found = torch.tensor([1.0, 1.0, value])
    assert judge_sum(found, parts).status == "different"
    assert judge_sum(found, parts).index == 2
    assert judge_close(found.double(), torch.ones(3, dtype=torch.float64)).status == "different"
    assert judge_sum(torch.ones(3), [torch.ones(3), torch.tensor([1.0, value, 1.0])]).status == "different"


@pytest.mark.parametrize(
    ("error", "status"), [(0.0, "bitwise"), (0.5 * CLOSE, "order"), (2 * CLOSE, "different"), (1e-3, "different")]
)
def test_closeness_is_measured_by_the_largest_element(error: float, status: str) -> None:
    reference = torch.tensor([4.0, 1e-6, 0.0], dtype=torch.float64)
    found = reference.clone()
    found[1] += 4 * error
    assert judge_close(found, reference).status == status


def test_missing_gradient_against_zero_is_equal_and_against_anything_else_not() -> None:
    assert judge_sum(torch.zeros(2), [torch.zeros(2)] * 2).status == "bitwise"
    assert judge_sum(torch.zeros(2), [torch.tensor([0.0, 1e-30])] * 2).status == "different"


def test_worst_verdict_decides() -> None:
    different, order, bitwise = Verdict("different", 2.0), Verdict("order", 0.5), Verdict("bitwise", 0.0)
    assert worst([bitwise, different, order]) is different
    assert worst([bitwise, order, Verdict("order", 0.2)]) is order
    assert worst([]).passed
