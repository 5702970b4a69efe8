"""Batch norm by policy and gradients of several parts, through the step that the product takes, with every method."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import ON_THREADS, on_processes, on_threads, small_batches
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import syncline
from syncline.comm import Communicator
from syncline.errors import PlanError
from syncline.measure.certify import Certificate, Certifier
from syncline.methods import BatchNorm
from syncline.plan import parse_plan
from syncline.spans import EventLog
from syncline.sync import make_sync
from syncline.sync.batch_norm import SyncBatchNorm, attach
from syncline.training.step import Worker, train_step
from syncline.workload.sharding import Shard, Sharding

STEPS = (2, 3)
"""Of 200 samples in batches of 66: the second of these steps has two samples, so a third rank has none."""


def make_template(normed: bool) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        norm = nn.BatchNorm2d(4) if normed else nn.Identity()
        layers = [nn.Conv2d(3, 4, 3, stride=4), norm, nn.ReLU(), nn.Conv2d(4, 4, 3), copy.deepcopy(norm)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(144, 10)).double()


TEMPLATES = {normed: make_template(normed) for normed in (True, False)}
"""Made here, because threads share torch's random generator."""


def shard_of(rank: int, world_size: int, step: int) -> Shard:
    return next(Sharding(200, 66, 7, rank, world_size).epoch(0, step))


def trained(
    comm: Communicator, log: EventLog, method: str, policy: BatchNorm | None, accumulate: int = 1
) -> dict[str, Tensor]:
    """Weights and buffers after the steps; without a policy, of a model without batch norm."""
    model = copy.deepcopy(TEMPLATES[policy is not None])
    sync = make_sync(method, comm, batch_norm=policy)
    batches = small_batches().in_dtype(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    worker = Worker(model, attach(sync, model, policy), sync, optimizer, batches, log, accumulate=accumulate)
    for step in STEPS:
        train_step(worker, shard_of(comm.rank, comm.world_size, step))
    sync.detach()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@cache
def one_worker(normed: bool) -> dict[str, Tensor]:
    """The same steps in plain PyTorch on whole batches."""
    model = copy.deepcopy(TEMPLATES[normed])
    batches = small_batches().in_dtype(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in STEPS:
        images, labels = batches.train(shard_of(0, 1, step))
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model.state_dict()


def assert_close(found: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for state in found:
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("method", ON_THREADS)
def test_synchronised_batch_norm_makes_many_ranks_one_worker(method: str, world_size: int) -> None:
    """Weights and running statistics on every rank, an empty shard included."""
    assert_close(on_threads(world_size, lambda comm, log: trained(comm, log, method, "sync")), one_worker(True))


@pytest.mark.parametrize("accumulate", [2, 5, 40])
@pytest.mark.parametrize("method", ON_THREADS)
def test_parts_add_up_to_the_whole_batch(method: str, accumulate: int) -> None:
    """40 parts of 33 samples and of one: some are empty."""
    found = on_threads(2, lambda comm, log: trained(comm, log, method, None, accumulate))
    assert_close(found, one_worker(False))


def test_parts_without_any_sample_leave_no_trace() -> None:
    """Two samples for three ranks in three parts: nobody has one in the second part, or in the third."""
    found = on_threads(3, lambda comm, log: trained(comm, log, "all-reduce", "sync", 3))
    assert all(bool(tensor.isfinite().all()) for tensor in found[0].values())
    for state in found[1:]:
        assert all(torch.equal(state[name], tensor) for name, tensor in found[0].items())
    # Three parts of the full batch, one of the small one.
    assert found[0]["1.num_batches_tracked"] == 4


def both_over_gloo(comm: Communicator, log: EventLog) -> list[dict[str, Tensor]]:
    found = [trained(comm, log, method, "sync") for method in ("ddp", "bucketed", "shared-memory")]
    return [*found, trained(comm, log, "ddp", None, 3)]


def test_the_same_over_gloo_with_ddp() -> None:
    for *normed, in_parts in on_processes(2, both_over_gloo):
        assert_close(normed, one_worker(True))
        assert_close([in_parts], one_worker(False))


def running_means(policy: BatchNorm | None, method: str = "all-reduce") -> list[Tensor]:
    states = on_threads(2, lambda comm, log: trained(comm, log, method, policy))
    assert torch.equal(states[0]["6.weight"], states[1]["6.weight"])
    return [state["1.running_mean"] for state in states]


def test_rank_0s_buffers_go_out_before_each_forward_with_broadcast() -> None:
    """After the last step ranks differ by that one batch only; with local ones by both."""
    local, shared = running_means("local"), running_means("broadcast")
    torch.testing.assert_close(shared[0], local[0])
    assert not torch.equal(shared[1], local[1])
    # running = 0.9 before + 0.1 batch; so what was before, on rank 1, is rank 0's.
    torch.testing.assert_close((shared[1] - local[1]) / 0.9, first_means()[0] - first_means()[1])


@cache
def first_means() -> list[Tensor]:
    """Each rank's running mean after the first of the steps."""
    model, batches = copy.deepcopy(TEMPLATES[True]), small_batches().in_dtype(torch.float64)
    found = []
    for rank in range(2):
        with torch.no_grad():
            values = model[0](batches.train(shard_of(rank, 2, STEPS[0]))[0])
        found.append(0.1 * values.mean((0, 2, 3)))
    return found


def certificate(comm: Communicator, log: EventLog, method: str) -> Certificate | None:
    return Certifier(
        communicator=comm,
        make_sync=lambda comm: make_sync(method, comm, batch_norm="sync"),
        make_model=lambda: copy.deepcopy(TEMPLATES[True]).float(),
        batches=small_batches(),
        sharding=Sharding(200, 4 * comm.world_size + 1, 7, comm.rank, comm.world_size),
        log=log,
        batch_norm="sync",
    ).run()


@pytest.mark.parametrize("method", ["gather-scatter", "bucketed"])
def test_synchronised_batch_norm_is_certified_equal_to_one_worker(method: str) -> None:
    found = on_threads(3, lambda comm, log: certificate(comm, log, method))[0]
    assert found is not None
    assert found.passed
    assert found.one_worker.status in ("bitwise", "order")
    assert found.one_worker.cause == found.sequential.cause == ""
    if method == "gather-scatter":
        assert found.sequential.status == "bitwise"


def test_wrong_statistics_are_not_excused_by_batch_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks counted alike, though their shards are uneven."""
    combined = SyncBatchNorm._combined
    monkeypatch.setattr(
        SyncBatchNorm, "_combined", lambda self, counts, *rest: combined(self, counts * 0 + counts.mean(), *rest)
    )
    found = on_threads(2, lambda comm, log: certificate(comm, log, "all-reduce"))[0]
    assert found is not None
    assert found.sequential.passed
    assert found.one_worker.status == "different"


def in_a_script(wrap: str) -> list[Tensor]:
    """A user's own loop on two processes: weights after a step on uneven shards, and what is sent is refused."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    if wrap == "torch":
        dist.init_process_group("gloo")
        wrapped: Any = DistributedDataParallel(syncline.convert_sync_batch_norm(model))
    else:
        wrapped = syncline.DataParallel(model, wrap, batch_norm="sync")
        with pytest.raises(PlanError, match="join"), wrapped.join():
            pass
    rank = dist.get_rank()
    values = torch.arange(15, dtype=torch.float64).reshape(5, 3).sin()[slice(0, 2) if rank == 0 else slice(2, 5)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    (wrapped(values).square().mean() * (2 * len(values) / 5)).backward()
    optimizer.step()
    result = [tensor.clone() for tensor in model.state_dict().values()]
    if wrap == "torch":
        dist.destroy_process_group()
    else:
        wrapped.close()
    return result


@pytest.mark.parametrize("wrap", ["torch", "bucketed", "ddp"])
def test_users_get_it_for_their_own_scripts(wrap: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    values = torch.arange(15, dtype=torch.float64).reshape(5, 3).sin()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(values).square().mean().backward()
    optimizer.step()
    for found in syncline.launch(in_a_script, wrap, workers=2, threads=1):
        for tensor, expected in zip(found, model.state_dict().values(), strict=True):
            torch.testing.assert_close(tensor, expected)


def in_a_subgroup() -> None:
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        with pytest.raises(PlanError, match="subgroup only one"):
            syncline.convert_sync_batch_norm(model, group)
        with pytest.raises(PlanError, match="subgroup only one"):
            syncline.DataParallel(model, "bucketed", process_group=group, batch_norm="sync")
        wrapped = syncline.DataParallel(model, "all-reduce", process_group=group, batch_norm="sync")
        wrapped(torch.randn(2, 3)).sum().backward()
        wrapped.close()
    dist.barrier()  # a rank that leaves while others still connect would break their connections
    dist.destroy_process_group()


def test_subgroup_refuses_methods_that_talk_during_backward() -> None:
    syncline.launch(in_a_subgroup, workers=3, threads=1)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"batch_norm": "global"}, ["batch_norm", "'global'", "local", "broadcast", "sync"]),
        ({"accumulate": 0}, ["accumulate", "0"]),
        ({"workers": 4, "global_batch": 7, "accumulate": 2}, ["global_batch 7", "workers 4", "accumulate 2"]),
        ({"compute": "sleep:times.json", "batch_norm": "sync"}, ["compute", "batch_norm"]),
    ],
)
def test_wrong_keys_are_refused(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(PlanError) as error:
        parse_plan(values)
    assert [word for word in words if word not in str(error.value)] == []
