"""One step: the mean over the global batch at any world size, and stand-ins that leave no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import pytest
import torch
from helpers import MANY_WORKERS, ON_THREADS, on_processes, on_threads, small_batches
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from syncline.comm import Communicator
from syncline.spans import EventLog
from syncline.sync import make_sync
from syncline.training.step import StepResult, Worker, copied_to, discarded_backward, seed_forward, train_step
from syncline.workload.models import build_model
from syncline.workload.sharding import Shard, Sharding


def batch_norm_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.0), nn.Flatten(), nn.Linear(256, 10)
    )


@cache
def template(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = batch_norm_model() if name == "batch norm" else build_model(name, seed=1)
    return model.double()


def make_worker(name: str, method: str, comm: Communicator, log: EventLog) -> Worker:
    model = copy.deepcopy(template(name))
    sync = make_sync(method, comm)
    batches = small_batches().in_dtype(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Worker(model, sync.attach(model), sync, optimizer, batches, log)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def shard_of(comm: Communicator, global_batch: int, step: int) -> Shard:
    return next(Sharding(200, global_batch, 7, comm.rank, comm.world_size).epoch(0, step))


def two_steps(
    name: str, method: str, global_batch: int
) -> Callable[[Communicator, EventLog], tuple[dict[str, Tensor], list[StepResult]]]:
    def live(comm: Communicator, log: EventLog) -> tuple[dict[str, Tensor], list[StepResult]]:
        worker = make_worker(name, method, comm, log)
        results = [train_step(worker, shard_of(comm, global_batch, step)) for step in range(2)]
        return state(worker.model), results

    return live


def one_worker(global_batch: int) -> dict[str, Tensor]:
    """The same two steps in plain PyTorch on the whole batch."""
    model = copy.deepcopy(template("cnn"))
    batches = small_batches().in_dtype(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        images, labels = batches.train(next(Sharding(200, global_batch, 7).epoch(0, step)))
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    return state(model)


SIZES = [(1, 4), (2, 5), (2, 1), (3, 7), (3, 2), (4, 9), (4, 3), (5, 11), (5, 2), (5, 1)]


@pytest.mark.parametrize(
    ("world_size", "global_batch", "method"),
    [(*sizes, "all-reduce") for sizes in SIZES] + [(3, 2, method) for method in ON_THREADS],
)
def test_any_world_takes_the_step_of_one_worker(world_size: int, global_batch: int, method: str) -> None:
    expected = one_worker(global_batch)
    for found, results in on_threads(world_size, two_steps("cnn", method, global_batch)):
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-13)
        assert len(results) == 2


@pytest.mark.parametrize("global_batch", [1, 5])
def test_results_count_every_sample_once(global_batch: int) -> None:
    by_rank = [results for _, results in on_threads(3, two_steps("cnn", "all-reduce", global_batch))]
    model, batches = copy.deepcopy(template("cnn")), small_batches().in_dtype(torch.float64)
    images, labels = batches.train(next(Sharding(200, global_batch, 7).epoch(0)))
    with torch.no_grad():
        logits = model(images)
    assert sum(results[0].num_samples for results in by_rank) == global_batch
    assert sum(results[0].score_sum for results in by_rank) == int((logits.argmax(1) == labels).sum())
    loss = sum(results[0].loss * results[0].num_samples for results in by_rank) / global_batch
    assert loss == pytest.approx(float(cross_entropy(logits, labels)), rel=1e-12)


def assert_empty_shard_left_no_trace(found: list[tuple[dict[str, Tensor], list[StepResult]]]) -> None:
    """Global batch 2 on 3 ranks: rank 2 has nothing to do but to take part. One sample each would not do for batch
    norm elsewhere, but a convolution's output has many positions."""
    start = template("batch norm").state_dict()
    for rank, (after, results) in enumerate(found):
        assert all(bool(tensor.isfinite().all()) for tensor in after.values())
        assert [result.num_samples for result in results] == [1, 1, 0][rank : rank + 1] * 2
        for name, _ in template("batch norm").named_parameters():
            assert torch.equal(after[name], found[0][0][name]), name
            assert not torch.equal(after[name], start[name]), name
    assert found[2][1] == [StepResult(0.0, 0, 0)] * 2


@pytest.mark.parametrize("method", ON_THREADS)
def test_empty_shard_leaves_buffers_untouched(method: str) -> None:
    found = on_threads(3, two_steps("batch norm", method, 2))
    assert_empty_shard_left_no_trace(found)
    for name, buffer in template("batch norm").named_buffers():
        assert torch.equal(found[2][0][name], buffer), name
        assert not torch.equal(found[0][0][name], buffer), name


def two_steps_of_every_method(comm: Communicator, log: EventLog) -> list[tuple[dict[str, Tensor], list[StepResult]]]:
    return [two_steps("batch norm", method, 2)(comm, log) for method in MANY_WORKERS]


def test_empty_shard_of_a_process_leaves_no_trace_with_any_method() -> None:
    by_rank = on_processes(3, two_steps_of_every_method)
    for index in range(len(MANY_WORKERS)):
        assert_empty_shard_left_no_trace([found[index] for found in by_rank])


def test_phases_are_logged_in_order() -> None:
    def live(comm: Communicator, log: EventLog) -> list[str]:
        train_step(make_worker("cnn", "all-reduce", comm, log), shard_of(comm, 4, 0))
        return [record["name"] for record in log.records if record["kind"] == "phase"]

    assert on_threads(2, live) == [["data", "forward", "backward", "sync", "score", "update"]] * 2


def test_masks_follow_from_seed_rank_and_step() -> None:
    def drawn(*place: int) -> float:
        seed_forward(*place)
        return torch.rand(1, dtype=torch.float64).item()

    places = [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1)]
    with torch.random.fork_rng():
        assert len({drawn(*place) for place in places * 2}) == len(places)


@pytest.mark.parametrize("method", [*ON_THREADS, "single"])
def test_discarded_backward_leaves_no_trace(method: str) -> None:
    def live(comm: Communicator, log: EventLog) -> None:
        worker = make_worker("batch norm", method, comm, log)
        worker.model[3].p = 0.5
        before, random_before = state(worker.model), torch.get_rng_state()
        discarded_backward(worker, shard_of(comm, 4, 0))
        assert torch.equal(torch.get_rng_state(), random_before)
        assert all(parameter.grad is None for parameter in worker.model.parameters())
        assert not worker.optimizer.state
        for name, tensor in state(worker.model).items():
            assert torch.equal(tensor, before[name]), name

    on_threads(1, live)


def test_copying_to_another_device_is_a_part_of_the_step() -> None:
    batch = small_batches().train(next(Sharding(200, 4, 7).epoch(0)))
    begun: list[str] = []

    def phase(name: str) -> AbstractContextManager[None]:
        begun.append(name)
        return nullcontext()

    assert copied_to(torch.device("cpu"), batch, phase) is batch
    assert begun == []
    inputs, targets = copied_to(torch.device("meta"), batch, phase)
    assert inputs.device.type == targets.device.type == "meta"
    assert begun == ["copy"]
