"""ahead: what torch does that would make a late update wrong without a word, each with a test that can fail.

Where a result can be compared, it is compared to the bit with the same loop and a barrier.
"""

from __future__ import annotations

import copy
import io
import pickle
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import on_threads
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import syncline
from syncline.comm import Communicator
from syncline.comm.communicator import Operation, Work, Wrapper
from syncline.errors import ContractError
from syncline.spans import EventLog
from syncline.sync.ahead import STRICT_STEPS, Ahead
from syncline.sync.bucketed import Bucketed
from syncline.sync.late_updates import LateUpdates, why_not

CHUNK_MB = 0.0001


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step))


class OneSize(Bucketed):
    """bucketed with ahead's layout."""

    first_bucket_mb = float(10**6)

    def __init__(self, communicator: Communicator, **options: Any) -> None:
        super().__init__(communicator, bucket_cap_mb=CHUNK_MB, **options)


Loop = Callable[[Any, nn.Module, nn.Module, torch.optim.Optimizer, int], None]
"""sync, model, module to call, optimiser, rank."""


def plain(sync: Any, model: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for step in range(14):
        module(batch(rank, step)).square().mean().backward()
        sync.finish_for_update()
        sync.update(optimizer)


def run(
    loop: Loop,
    make_sync: Callable[[Communicator], Any],
    *,
    make: Callable[[], nn.Module] = net,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    ranks: int = 2,
) -> list[list[Tensor]]:
    """Weights and state of every rank after the loop."""
    template = make()

    def on_rank(comm: Communicator, _: EventLog) -> list[Tensor]:
        model = copy.deepcopy(template)
        sync = make_sync(comm)
        module = sync.attach(model)
        made = make_optimizer(model) if make_optimizer else torch.optim.AdamW(model.parameters(), lr=0.01)
        sync.bind(made)
        loop(sync, model, module, made, comm.rank)
        sync.synchronize()
        state = [value for own in made.state_dict()["state"].values() for value in own.values()]
        sync.detach()
        return [value.detach().clone() for value in [*model.parameters(), *filter(torch.is_tensor, state)]]

    return on_threads(ranks, on_rank, deadline_s=40)


def goes_on(comm: Communicator) -> Ahead:
    return Ahead(comm, chunk_mb=CHUNK_MB, barrier=False)


def waits(comm: Communicator) -> Ahead:
    return Ahead(comm, chunk_mb=CHUNK_MB, barrier=True)


def same_bits(found: list[list[Tensor]], expected: list[list[Tensor]]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(one, other) for mine, theirs in pairs for one, other in zip(mine, theirs, strict=True))


def assert_equals_its_barrier(loop: Loop = plain, **settings: Any) -> None:
    assert same_bits(run(loop, goes_on, **settings), run(loop, waits, **settings))


# Sums.


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_equals_bucketed_with_the_same_layout(ranks: int) -> None:
    assert same_bits(run(plain, goes_on, ranks=ranks), run(plain, OneSize, ranks=ranks))


def test_memory_over_bucketed_is_one_element_for_each_parameter() -> None:
    def sizes(comm: Communicator, _: EventLog) -> tuple[int, int]:
        ahead, bucketed = goes_on(comm), OneSize(comm)
        ahead.attach(net())
        bucketed.attach(net())
        return ahead.buffer_bytes, bucketed.buffer_bytes

    for ahead, bucketed in on_threads(2, sizes):
        assert ahead == bucketed + 4 * len([*net().parameters()])


class Late(Wrapper):
    """Starts operations late, by a seeded chance."""

    def __init__(self, inner: Communicator, chance: random.Random) -> None:
        super().__init__(inner)
        self.chance = chance

    def start(self, operation: Operation) -> Work:
        time.sleep(self.chance.random() ** 4 * 0.004)
        return super().start(operation)

    def split(self, name: str) -> Communicator:
        return Late(self.inner.split(name), self.chance)


def test_soak_with_random_delays_ends_where_bucketed_does() -> None:
    """The same for 2,000 steps: benchmarks/soak_ahead.py."""

    def soaked(sync: Any, _: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        chance = random.Random(rank)
        for step in range(150):
            time.sleep(chance.random() ** 4 * 0.004)
            module(batch(rank, step)).square().mean().backward()
            sync.finish_for_update()
            sync.update(optimizer)

    slow = run(soaked, lambda comm: Ahead(Late(comm, random.Random(comm.rank)), chunk_mb=CHUNK_MB, barrier=False))
    assert same_bits(slow, run(soaked, OneSize))


def test_group_that_is_updated_once_for_each_of_its_parameters_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: an optimiser's step counts, and its momentum decays, with every update."""
    apply = LateUpdates.apply
    expected = run(plain, waits)

    def twice(self: LateUpdates, parameters: Any, gradients: Any) -> None:
        apply(self, parameters, gradients)
        apply(self, parameters, gradients)

    monkeypatch.setattr(LateUpdates, "apply", twice)
    assert not same_bits(run(plain, goes_on), expected)


# Tripwires.


def test_gradient_that_is_overwritten_or_has_one_element_is_missed_by_torch_but_not_by_the_step() -> None:
    """`zero_` raises nothing, and adding to one element neither; NaN plus 1 is even NaN again."""

    def change(act: Callable[[nn.Module], None]) -> Loop:
        def loop(sync: Any, model: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
            plain(sync, model, module, optimizer, rank)
            module(batch(rank, 99)).square().mean().backward()
            sync.finish_for_update()
            act(model)
            optimizer.step()

        return loop

    for name, act in (
        ("0.weight", lambda model: model[0].weight.grad.zero_()),
        ("2.weight", lambda model: model[2].weight.grad.fill_(torch.nan)),
        ("4.bias", lambda model: model[4].bias.grad.add_(1)),
    ):
        with pytest.raises(ContractError, match=f"gradient of {name} was changed"):
            run(change(act), goes_on)


def test_tripwire_has_the_type_of_its_parameter() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.narrow, self.wide = nn.Linear(6, 6), nn.Linear(6, 2).double()

        def forward(self, values: Tensor) -> Tensor:
            return self.wide(torch.tanh(self.narrow(values)).double())

    def loop(sync: Any, model: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        for step in range(14):
            module(batch(rank, step)).square().mean().backward()
            sync.finish_for_update()
            assert all(p.grad is not None and p.grad.dtype is p.dtype for p in model.parameters())
            sync.update(optimizer)

    assert_equals_its_barrier(loop, make=Mixed)


def test_backward_that_adds_to_a_gradient_on_its_way_is_refused_in_our_words() -> None:
    """Two forwards, then two backwards, without a wrapper that sees the second: no hook of a forward runs between."""

    def loop(sync: Any, model: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        plain(sync, model, module, optimizer, rank)
        losses = [module(batch(rank, step)).square().mean() for step in (50, 51)]
        losses[0].backward()
        sync.finish_for_update()
        losses[1].backward()

    with pytest.raises(ContractError, match=r"adds to the gradient of .*, which method ahead has on its way"):
        run(loop, goes_on)


def test_error_in_the_sender_is_raised_where_the_user_waits() -> None:
    class Broken(Wrapper):
        def __init__(self, inner: Communicator, *, broken: bool = False) -> None:
            super().__init__(inner)
            self.started = 0 if broken else -(10**6)

        def start(self, operation: Operation) -> Work:
            self.started += 1
            if self.started > 30:
                raise ConnectionError("the cable is out")
            return super().start(operation)

        def split(self, name: str) -> Communicator:
            return Broken(self.inner.split(name), broken=True)

    with pytest.raises(ConnectionError, match="the cable is out"):
        run(plain, lambda comm: Ahead(Broken(comm), chunk_mb=CHUNK_MB, barrier=False))


# Optimisers.


def test_parameters_that_are_not_the_models_are_stepped_at_once() -> None:
    seen: list[tuple[float, ...]] = []

    def loop(sync: Any, _: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        own = nn.Parameter(torch.ones(1))
        optimizer.add_param_group({"params": [own], "lr": 0.5})
        values = []
        for step in range(6):
            (module(batch(rank, step)).square().mean() + own.sum()).backward()
            sync.finish_for_update()
            sync.update(optimizer)
            values.append(own.item())
        seen.append(tuple(values))

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    assert same_bits(run(loop, goes_on, make_optimizer=sgd), run(loop, waits, make_optimizer=sgd))
    assert set(seen) == {(0.5, 0.0, -0.5, -1.0, -1.5, -2.0)}


def test_step_with_a_closure_waits() -> None:
    def loop(sync: Any, _: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        for step in range(10):
            loss = module(batch(rank, step)).square().mean()
            loss.backward()
            sync.finish_for_update()
            optimizer.step(lambda loss=loss: loss.item())
            assert not sync._pending
            optimizer.zero_grad()

    assert_equals_its_barrier(loop)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_module_cannot_be_seen_being_called() -> None:
    model = net()
    model[0].compile()  # type: ignore[no-untyped-call]
    reason = why_not(torch.optim.SGD(model.parameters()), model, list(model.named_parameters()))
    assert reason == "a module is compiled, so its calls cannot be seen"


def test_autocast_around_the_forward_changes_no_update_and_keeps_no_old_weight() -> None:
    """Adafactor differs under autocast, and autocast keeps 16-bit copies of weights that it has cast."""

    def linear() -> nn.Module:
        """Used once: ranks that are threads share the cache, and clearing it between two uses changes a rounding."""
        torch.manual_seed(0)
        return nn.Linear(6, 6)

    def loop(sync: Any, _: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        with torch.autocast("cpu", torch.bfloat16):  # one region for all steps: its cache lives as long
            for step in range(12):
                loss = module(batch(rank, step)).float().square().mean()
                with torch.autocast("cpu", enabled=False):
                    loss.backward()
                    sync.finish_for_update()
                    sync.update(optimizer)
                if isinstance(sync, Ahead) and not sync._pending:
                    torch.clear_autocast_cache()  # what plain torch needs here too

    for adafactor in (lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01), None):
        assert_equals_its_barrier(loop, make=linear, make_optimizer=adafactor)


# Forwards.


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_in_backward_is_no_new_forward(reentrant: bool) -> None:
    class Recomputing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, values: Tensor) -> Tensor:
            hidden = checkpoint(lambda v: torch.tanh(self.middle(v)), self.first(values), use_reentrant=reentrant)
            return self.last(hidden)

    assert_equals_its_barrier(make=Recomputing)


def test_static_graph_sends_while_backward_runs_from_the_second_step_on() -> None:
    """The first backward tells how often each gradient grows; until it has ended, none is known to be whole."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.shared, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, values: Tensor) -> Tensor:
            hidden = checkpoint(self.shared, values.requires_grad_(), use_reentrant=True)
            return self.last(checkpoint(self.shared, hidden, use_reentrant=True))

    def loop(sync: Any, _: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        sync.static_graph = True
        for step in range(8):
            module(batch(rank, step)).square().mean().backward()
            assert sync._announced == (0 if step == 0 else len(sync.layout.buckets))
            sync.finish_for_update()
            sync.update(optimizer)

    assert_equals_its_barrier(loop, make=Twice)


def test_parametrized_weights_wait_where_they_are_computed() -> None:
    def normed() -> nn.Module:
        model = net()
        parametrizations.weight_norm(model[2])
        return model

    assert_equals_its_barrier(make=normed)


def test_frozen_from_the_start_accumulated_and_evaluated_functionally() -> None:
    def frozen() -> nn.Module:
        model = net()
        model[0].requires_grad_(False)
        return model

    def loop(sync: Any, model: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        for step in range(12):
            with sync.no_sync():
                module(batch(rank, 2 * step)).square().mean().backward()
            module(batch(rank, 2 * step + 1)).square().mean().backward()
            sync.finish_for_update()
            sync.update(optimizer)
            if step == 6:
                with torch.no_grad():
                    weights = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
                    assert not functional_call(model, weights, (batch(rank, step),)).any()

    assert_equals_its_barrier(loop, make=frozen)


def test_reading_weights_of_the_bare_module_shows_nan_in_the_first_steps() -> None:
    """No hook fires for these; a submodule's state_dict does not reach the root's either."""

    def loop(sync: Any, model: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        for step in range(STRICT_STEPS - 2):
            module(batch(rank, step)).square().mean().backward()
            sync.finish_for_update()
            sync.update(optimizer)
        assert sync._pending
        readers: list[Callable[[], Tensor]] = [
            lambda: model[2].state_dict()["weight"],
            lambda: copy.deepcopy(model)[2].weight,  # type: ignore[index]
            lambda: nn.utils.parameters_to_vector(model.parameters()),
            lambda: AveragedModel(model).module[2].weight,
        ]
        for read in readers:
            assert read().isnan().any()
        sync.synchronize()
        for read in readers:
            assert not read().isnan().any()

    run(loop, goes_on)


def test_detach_applies_what_is_on_its_way() -> None:
    def loop(sync: Any, model: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        plain(sync, model, module, optimizer, rank)
        sync.detach()

    assert same_bits(run(loop, goes_on), run(plain, waits))


# In a script: what the wrapper is asked for waits, to the bit.


def scenario(method: str) -> dict[str, Any]:
    rank = dist.get_rank()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"barrier": False, "chunk_mb": CHUNK_MB} if method == "ahead" else {}
    wrapped = syncline.DataParallel(model, method, optimizer=optimizer, **options)
    found: dict[str, Any] = {}

    def step(number: int) -> None:
        wrapped(batch(rank, number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def noted(name: str, read: Callable[[], Tensor]) -> None:
        step(len(found) + 20)
        found[name] = read().detach().clone()

    for number in range(5):
        step(number)
    average = AveragedModel(copy.deepcopy(wrapped.module))

    def averaged() -> Tensor:
        average.update_parameters(wrapped.module)
        return average.module[2].weight

    def saved() -> Tensor:
        file = io.BytesIO()
        torch.save(wrapped, file)
        file.seek(0)
        return torch.load(file, weights_only=False).module[2].weight

    noted("parameters", lambda: [*wrapped.parameters()][2])
    noted("named", lambda: dict(wrapped.named_parameters())["module.2.weight"])
    noted("vector", lambda: nn.utils.parameters_to_vector(wrapped.parameters()))
    noted("deepcopy", lambda: copy.deepcopy(wrapped).module[2].weight)
    noted("pickle", lambda: pickle.loads(pickle.dumps(wrapped)).module[2].weight)
    noted("saved", saved)
    noted("average", averaged)
    noted("submodule", lambda: wrapped.module[2].state_dict()["weight"])
    noted("state", lambda: wrapped.state_dict()["2.weight"])
    noted("momentum", lambda: optimizer.state_dict()["state"][2]["exp_avg"])
    losses = [wrapped(batch(rank, number)).square().mean() for number in (50, 51)]
    for loss in losses:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    found["two forwards, two backwards"] = [*wrapped.parameters()][2].detach().clone()
    return found


def join_scenario(method: str) -> list[Tensor]:
    """Rank 1 is out of batches before the first plan, and rank 0 goes on past the last."""
    rank = dist.get_rank()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    options = {"barrier": False, "chunk_mb": CHUNK_MB} if method == "ahead" else {}
    wrapped = syncline.DataParallel(model, method, optimizer=optimizer, **options)
    with wrapped.join():
        for number in range(14 if rank == 0 else 2):
            wrapped(batch(rank, number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [value.detach().clone() for value in wrapped.parameters()]


def scenarios() -> dict[str, Any]:
    dist.init_process_group("gloo")
    found = {method: (scenario(method), join_scenario(method)) for method in ("ahead", "bucketed")}
    dist.destroy_process_group()
    return found


def test_whatever_a_script_asks_the_wrapper_for_holds_the_last_update() -> None:
    for found in syncline.launch(scenarios, workers=2, threads=1):
        (ahead, joined), (bucketed, joined_too) = found["ahead"], found["bucketed"]
        for name, value in bucketed.items():
            assert torch.equal(ahead[name], value), name
        for one, other in zip(joined, joined_too, strict=True):
            assert torch.equal(one, other)
