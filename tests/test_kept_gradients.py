"""Gradients that are kept, dropped, missing, or added up over several backwards."""

from __future__ import annotations

import pytest
import torch
from gradient_cases import FLAT, TINY, mean_one_after_the_other
from helpers import ON_THREADS, assert_same, caught, expected_mean, gradients, integer_loss, integer_model, on_threads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from syncline.comm import Communicator
from syncline.errors import CommunicationError, ContractError
from syncline.spans import EventLog
from syncline.sync import make_sync


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("method", ["bucketed", "shared-memory", "ring"])
def test_both_kinds_of_zero_grad(method: str, set_to_none: bool) -> None:
    def live(comm: Communicator, _: EventLog) -> list[dict[str, Tensor]]:
        model = integer_model("mlp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0)
        sync = make_sync(method, comm)
        module = sync.attach(model)
        found = []
        for turn in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            integer_loss(module, comm.rank, turn).backward()
            sync.finish()
            found.append(gradients(model))
        return found

    for found in on_threads(3, live):
        for turn, one in enumerate(found):
            right = mean_one_after_the_other("mlp", 3, turn)
            assert_same(one, {key: value.float() for key, value in right.items()})


class Optional(nn.Module):
    """A net and a branch that only some calls use."""

    def __init__(self) -> None:
        super().__init__()
        self.net = integer_model("mlp")
        self.extra = nn.Parameter(torch.ones(3))
        self.never = nn.Parameter(torch.ones(2))
        self.uses_extra = False

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.net(images)
        return result + self.extra.sum() if self.uses_extra else result


@pytest.mark.parametrize("method", FLAT)
def test_parameter_unused_on_every_rank_keeps_no_gradient(method: str) -> None:
    def live(comm: Communicator, _: EventLog) -> None:
        model = Optional()
        sync = make_sync(method, comm)
        module = sync.attach(model)
        for turn in range(3):
            model.zero_grad()
            integer_loss(module, comm.rank, turn).backward()
            sync.finish()
            assert model.never.grad is None
            assert model.extra.grad is None
            right = mean_one_after_the_other("mlp", comm.world_size, turn)
            assert_same(gradients(model.net), {key: value.float() for key, value in right.items()})

    on_threads(3, live)


@pytest.mark.parametrize("turn_of_trouble", [0, 2])
@pytest.mark.parametrize("method", FLAT)
def test_parameter_unused_on_some_ranks_is_an_error_on_all_that_names_it_and_them(
    method: str, turn_of_trouble: int
) -> None:
    def live(comm: Communicator, _: EventLog) -> CommunicationError | None:
        model = Optional()
        sync = make_sync(method, comm)
        module = sync.attach(model)
        for turn in range(turn_of_trouble):
            model.zero_grad()
            integer_loss(module, comm.rank, turn).backward()
            sync.finish()
        model.zero_grad()
        model.uses_extra = comm.rank == 1
        integer_loss(module, comm.rank).backward()
        return caught(sync.finish)

    for rank, error in enumerate(on_threads(3, live)):
        assert isinstance(error, ContractError)
        assert error.rank == rank
        assert "parameter extra " in error.message
        assert "not on 0, 2." in error.message
        assert 'unused="zero"' in error.action


@pytest.mark.parametrize("method", FLAT)
def test_unused_counts_as_zero_where_asked_for(method: str) -> None:
    def live(comm: Communicator, _: EventLog) -> list[Tensor | None]:
        model = Optional()
        sync = make_sync(method, comm, unused="zero")
        module = sync.attach(model)
        found = []
        for turn in range(3):
            model.zero_grad()
            model.uses_extra = comm.rank == turn
            (module(torch.ones(1, 3, 6, 6)).sum() * 3).backward()
            sync.finish()
            assert model.never.grad is None
            assert model.extra.grad is not None
            found.append(model.extra.grad.clone())
        return found

    for found in on_threads(3, live):
        assert [one.tolist() for one in found if one is not None] == [[4.0] * 3] * 3  # 4 outputs x 3 / 3 ranks


@pytest.mark.parametrize("method", ON_THREADS)
def test_parameters_frozen_and_unfrozen_between_steps_are_averaged_as_they_are(method: str) -> None:
    """Freeze and unfreeze, also at once and back again; the frozen one keeps no gradient."""

    def live(comm: Communicator, _: EventLog) -> list[dict[str, Tensor]]:
        model = integer_model("frozen")
        sync = make_sync(method, comm)
        module = sync.attach(model)
        found = []
        for frozen, trained in [((), ()), (("3.bias",), ()), ((), ("1.weight",)), (("1.weight",), ("3.bias",))]:
            model.zero_grad()
            for name in (*frozen, *trained):
                model.get_parameter(name).requires_grad_(name in trained)
            for _ in range(2):
                model.zero_grad()
                integer_loss(module, comm.rank).backward()
                sync.finish()
            found.append(gradients(model))
        return found

    def alone(frozen: set[str]) -> dict[str, Tensor]:
        model = integer_model("frozen")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        sum(integer_loss(model, rank) / 3 for rank in range(3)).backward()  # type: ignore[union-attr]
        return gradients(model)

    for found in on_threads(3, live):
        first = {"1.weight", "1.bias"}
        frozen_by_step = (first, {*first, "3.bias"}, {"1.bias", "3.bias"}, first)
        for step, frozen in zip(found, frozen_by_step, strict=True):
            torch.testing.assert_close(step, alone(frozen))
            assert frozen.isdisjoint(step)


@pytest.mark.parametrize("method", FLAT)
@pytest.mark.parametrize(("change", "name"), [("freeze", "3.bias"), ("unfreeze", "1.weight")])
def test_parameter_frozen_on_some_ranks_only_is_an_error_on_all_that_names_it_and_them(
    method: str, change: str, name: str
) -> None:
    def live(comm: Communicator, _: EventLog) -> str:
        model = integer_model("frozen")
        sync = make_sync(method, comm)
        module = sync.attach(model)
        if comm.rank == 1:
            model.get_parameter(name).requires_grad_(change == "unfreeze")
        with pytest.raises(ContractError) as error:  # noqa: PT012
            integer_loss(module, comm.rank).backward()
            sync.finish()
        return error.value.message

    frozen = "1" if change == "freeze" else "0"
    assert on_threads(2, live) == [f"parameter {name} is frozen on some ranks ({frozen}), but not on all."] * 2


@pytest.mark.parametrize("how", ["times zero", "no backward", "backward elsewhere"])
@pytest.mark.parametrize("method", FLAT)
def test_rank_whose_backward_touches_no_parameter_does_not_hang_the_others(method: str, how: str) -> None:
    def live(comm: Communicator, _: EventLog) -> dict[str, Tensor]:
        model = integer_model("mlp")
        sync = make_sync(method, comm, unused="zero")
        module = sync.attach(model)
        for _ in range(2):
            model.zero_grad()
            loss = integer_loss(module, comm.rank)
            if comm.rank == 0 and how == "times zero":
                (loss * 0).backward()
            elif comm.rank == 0 and how == "backward elsewhere":
                torch.ones(1, requires_grad=True).sum().backward()
            elif comm.rank != 0:
                loss.backward()
            sync.finish()
        return gradients(model)

    model = integer_model("mlp")
    (integer_loss(model, 1) / 3 + integer_loss(model, 2) / 3).backward()
    for found in on_threads(3, live, deadline_s=10):
        assert_same(found, gradients(model))


# Accumulation, several backwards, checkpointing.


@pytest.mark.parametrize("method", FLAT)
def test_no_sync_accumulates_sends_nothing_and_is_left_properly_by_an_exception(method: str) -> None:
    def live(comm: Communicator, log: EventLog) -> dict[str, Tensor]:
        model = integer_model("mlp")
        sync = make_sync(method, comm)
        module = sync.attach(model)
        log.records.clear()
        with pytest.raises(KeyError), sync.no_sync():  # noqa: PT012
            integer_loss(module, comm.rank, 0).backward()
            with sync.no_sync():
                integer_loss(module, comm.rank, 1).backward()
            sync.finish()
            raise KeyError
        assert log.records == []
        integer_loss(module, comm.rank, 2).backward()
        sync.finish()
        return gradients(model)

    for found in on_threads(3, live):
        assert_same(found, expected_mean("mlp", 3, turns=3))


@pytest.mark.parametrize("method", FLAT)
def test_several_backwards_add_up(method: str) -> None:
    """Without zero_grad, the mean of each backward is added to what is there."""

    def live(comm: Communicator, _: EventLog) -> dict[str, Tensor]:
        model = integer_model("mlp")
        sync = make_sync(method, comm)
        module = sync.attach(model)
        for turn in range(2):
            loss = integer_loss(module, comm.rank, turn)
            loss.backward(retain_graph=True)
            sync.finish()
        return gradients(model)

    for found in on_threads(4, live):
        assert_same(found, expected_mean("mlp", 4, turns=2))


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.net = integer_model("mlp")
        self.reentrant = reentrant

    def forward(self, images: Tensor) -> Tensor:
        values = images.flatten(1).requires_grad_()
        for layer in list(self.net)[1:]:
            values = checkpoint(layer, values, use_reentrant=self.reentrant)
        return values


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("method", FLAT)
def test_activation_checkpointing(method: str, reentrant: bool) -> None:
    def live(comm: Communicator, _: EventLog) -> dict[str, Tensor]:
        model = Checkpointed(reentrant=reentrant)
        sync = make_sync(method, comm, **({} if method == "shared-memory" else {"bucket_cap_mb": TINY}))
        module = sync.attach(model)
        for _ in range(2):
            model.zero_grad()
            integer_loss(module, comm.rank).backward()
            sync.finish()
        return gradients(model.net)

    for found in on_threads(2, live):
        assert_same(found, expected_mean("mlp", 2))
