"""Every method makes every .grad the mean over ranks, exactly, and keeps the promises of GradientSync."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    INTEGER_MODELS,
    MANY_WORKERS,
    ON_THREADS,
    assert_same,
    expected_mean,
    gradients,
    integer_loss,
    integer_model,
    on_processes,
    on_threads,
)
from torch import Tensor, nn

from syncline.comm import Communicator
from syncline.errors import ContractError
from syncline.spans import EventLog
from syncline.sync import make_sync

WORLD_SIZES = [1, 2, 3, 4]


def test_the_course_methods_run_on_threads() -> None:
    assert {"gather-scatter", "point-to-point", "all-reduce"} <= set(ON_THREADS)


def averaged(comm: Communicator, method: str, model_name: str) -> dict[str, Tensor]:
    model = integer_model(model_name)
    sync = make_sync(method, comm)
    module = sync.attach(model)
    integer_loss(module, comm.rank).backward()
    sync.finish()
    return gradients(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("method", ON_THREADS)
def test_gradients_are_the_mean_over_ranks(method: str, world_size: int) -> None:
    found = on_threads(world_size, lambda comm, _: {name: averaged(comm, method, name) for name in INTEGER_MODELS})
    for by_model in found:
        for name, one in by_model.items():
            assert_same(one, expected_mean(name, world_size))


def test_single_leaves_gradients_alone() -> None:
    (found,) = on_threads(1, lambda comm, _: averaged(comm, "single", "cnn"))
    assert_same(found, expected_mean("cnn", 1))


@pytest.mark.parametrize("method", ON_THREADS)
def test_mean_is_right_in_every_step_from_new_gradients(method: str) -> None:
    def live(comm: Communicator, _: EventLog) -> list[dict[str, Tensor]]:
        model = integer_model("mlp")
        sync = make_sync(method, comm)
        module = sync.attach(model)
        found = []
        for turn in range(3):
            model.zero_grad()
            integer_loss(module, comm.rank, turn).backward()
            sync.finish()
            found.append(gradients(model))
        return found

    model = integer_model("mlp")
    for turn in range(3):
        model.zero_grad()
        for rank in range(3):
            (integer_loss(model, rank, turn) / 3).backward()
        for found in on_threads(3, live):
            assert_same(found[turn], gradients(model))


@pytest.mark.parametrize("method", ON_THREADS)
def test_finish_is_idempotent_and_sends_nothing_the_second_time(method: str) -> None:
    def live(comm: Communicator, log: EventLog) -> tuple[dict[str, Tensor], int]:
        model = integer_model("cnn")
        sync = make_sync(method, comm)
        integer_loss(sync.attach(model), comm.rank).backward()
        sync.finish()
        sent = len(log.records)
        sync.finish()
        return gradients(model), len(log.records) - sent

    for found, sent_again in on_threads(3, live):
        assert_same(found, expected_mean("cnn", 3))
        assert sent_again == 0


def accumulated(comm: Communicator, method: str, *, fail: bool = False) -> dict[str, Tensor]:
    """Two backwards, the first one without talking to anybody."""
    model = integer_model("mlp")
    sync = make_sync(method, comm)
    module = sync.attach(model)
    try:
        with sync.no_sync():
            integer_loss(module, comm.rank, 0).backward()
            sync.finish()
            if fail:
                raise KeyError
    except KeyError:
        pass
    integer_loss(module, comm.rank, 1).backward()
    sync.finish()
    return gradients(model)


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("method", ON_THREADS)
def test_no_sync_accumulates_and_ends_also_by_an_exception(method: str, fail: bool) -> None:
    for found in on_threads(3, lambda comm, _: accumulated(comm, method, fail=fail)):
        assert_same(found, expected_mean("mlp", 3, turns=2))


@pytest.mark.parametrize("method", ON_THREADS)
def test_nothing_is_sent_inside_no_sync(method: str) -> None:
    def live(comm: Communicator, log: EventLog) -> int:
        model = integer_model("mlp")
        sync = make_sync(method, comm)
        module = sync.attach(model)
        attached = len(log.records)
        with sync.no_sync():
            integer_loss(module, comm.rank).backward()
            sync.finish()
        return len(log.records) - attached

    assert on_threads(2, live) == [0, 0]


def with_buffers(rank: int) -> nn.Module:
    """A model that differs on every rank, down to the buffers."""
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 100 * rank)
    return model  # type: ignore[no-any-return]


def attached_state(comm: Communicator, method: str) -> dict[str, Tensor]:
    model = with_buffers(comm.rank)
    make_sync(method, comm).attach(model)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("method", ON_THREADS)
def test_attach_gives_every_rank_parameters_and_buffers_of_rank_0(method: str) -> None:
    for state in on_threads(3, lambda comm, _: attached_state(comm, method)):
        assert_same(state, dict(with_buffers(0).state_dict()))


@pytest.mark.parametrize("method", ON_THREADS)
def test_detach_removes_the_hooks(method: str) -> None:
    def live(comm: Communicator, log: EventLog) -> tuple[dict[str, Tensor], int]:
        model = integer_model("mlp")
        sync = make_sync(method, comm)
        module = sync.attach(model)
        integer_loss(module, comm.rank).backward()
        sync.finish()
        sync.detach()
        model.zero_grad()
        before = len(log.records)
        integer_loss(model, comm.rank).backward()
        sync.finish()
        assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
        return gradients(model), len(log.records) - before

    for rank, (found, sent) in enumerate(on_threads(2, live)):
        alone = integer_model("mlp")
        integer_loss(alone, rank).backward()
        assert_same(found, gradients(alone))
        assert sent == 0


@pytest.mark.parametrize("method", ON_THREADS)
def test_parameter_without_gradient_on_one_rank_is_an_error_that_names_it(method: str) -> None:
    def live(comm: Communicator, _: EventLog) -> None:
        model = integer_model("mlp")
        forgotten = nn.Parameter(torch.ones(2))
        model.register_parameter("forgotten", forgotten)
        sync = make_sync(method, comm)
        loss = integer_loss(sync.attach(model), comm.rank)
        (loss + forgotten.sum() if comm.rank == 0 else loss).backward()
        sync.finish()

    with pytest.raises(ContractError, match="forgotten") as error:
        on_threads(2, live, deadline_s=5)
    assert error.value.rank in (0, 1)


@pytest.mark.parametrize("method", ON_THREADS)
def test_gradients_are_labelled_and_ready_before_they_are_sent(method: str) -> None:
    def live(comm: Communicator, log: EventLog) -> list[dict[str, object]]:
        model = integer_model("mlp")
        sync = make_sync(method, comm, log=log)
        module = sync.attach(model)
        log.records.clear()
        integer_loss(module, comm.rank).backward()
        sync.finish()
        return log.records

    for records in on_threads(2, live):
        sent = [record for record in records if record["kind"] == "collective"]
        assert sent
        assert all(record["label"] for record in sent)
        assert all(record["ready"] <= record["start"] <= record["end"] for record in sent)


def every_method(comm: Communicator, _: EventLog) -> dict[str, list[dict[str, Tensor]]]:
    found = {}
    for method in MANY_WORKERS:
        means = [averaged(comm, method, name) for name in INTEGER_MODELS]
        found[method] = [*means, accumulated(comm, method), attached_state(comm, method)]
    return found


def test_every_method_on_processes() -> None:
    expected = [expected_mean(name, 2) for name in INTEGER_MODELS]
    expected += [expected_mean("mlp", 2, turns=2), dict(with_buffers(0).state_dict())]
    for found in on_processes(2, every_method):
        assert list(found) == MANY_WORKERS
        for parts in found.values():
            for one, right in zip(parts, expected, strict=True):
                assert_same(one, right)
