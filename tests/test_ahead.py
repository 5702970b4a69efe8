"""ahead: the bits of a barrier, whatever is late; tripwires; what waits, and what falls back to a barrier."""

from __future__ import annotations

import copy
import gc
import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import on_threads
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.parallel import DistributedDataParallel

import syncline
from syncline.comm import Communicator
from syncline.comm.communicator import Operation, Work, Wrapper
from syncline.errors import ContractError, PlanError
from syncline.spans import EventLog
from syncline.sync.ahead import Ahead
from syncline.sync.late_updates import LateUpdates

CHUNK_MB = 0.002


class Net(nn.Module):
    """Weights that modules share, that no module's call announces, and that some forwards do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 16)
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.second.weight
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm, self.scale = nn.BatchNorm1d(16), nn.Parameter(torch.ones(16))
        self.last = nn.Linear(16, 4)

    def forward(self, values: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(values))))
        hidden = self.tied(hidden) * self.scale
        hidden = self.attention(hidden[None], hidden[None], hidden[None])[0][0]
        return self.last(self.norm(hidden))


torch.manual_seed(0)
TEMPLATE = Net()


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * rank + step))


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 0.01},
        {"params": [parameter for parameter in model.parameters() if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
    return torch.optim.AdamW(groups, lr=1e-3)


class Slow(Wrapper):
    """Starts operations late, by chance."""

    def start(self, operation: Operation) -> Work:
        time.sleep(random.random() * 0.002)
        return super().start(operation)

    def split(self, name: str) -> Communicator:
        return Slow(self.inner.split(name))


class Result:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float], sync: Ahead) -> None:
        self.weights = {name: value.detach().clone() for name, value in model.named_parameters()}
        self.state = copy.deepcopy(optimizer.state_dict()["state"])
        self.losses = losses
        self.about = sync.describe()


def train(
    comm: Communicator,
    *,
    steps: int = 16,
    optimizer: str = "sgd",
    slow: bool = False,
    drained: bool = True,
    each_step: Callable[[int, Ahead, nn.Module, torch.optim.Optimizer], None] | None = None,
    **options: Any,
) -> Result:
    model = copy.deepcopy(TEMPLATE)
    sync = Ahead(Slow(comm) if slow else comm, chunk_mb=CHUNK_MB, **options)
    module, made, losses = sync.attach(model), optimizer_of(model, optimizer), []
    schedule = torch.optim.lr_scheduler.OneCycleLR(made, 0.1, total_steps=steps + 1)
    for step in range(steps):
        if slow:
            time.sleep(random.random() * 0.003)
        loss = module(batch(comm.rank, step)).square().mean()
        losses.append(loss.item())
        loss.backward()
        sync.finish_for_update()
        if each_step is not None:
            each_step(step, sync, model, made)
        sync.update(made)
        schedule.step()  # the next rate, momentum and betas: none of them may reach the step that was asked for
    if drained:
        sync.synchronize()
    result = Result(model, made, losses, sync)
    sync.detach()
    return result


def on_ranks(world_size: int, **settings: Any) -> list[Result]:
    return on_threads(world_size, lambda comm, _: train(comm, **settings), deadline_s=40)


def assert_equal_bits(results: list[Result], expected: list[Result]) -> None:
    for rank, result in enumerate(results):
        assert result.losses == expected[rank].losses
        for name, value in result.weights.items():
            assert torch.equal(value, expected[0].weights[name]), name
        for number, state in result.state.items():
            for key, value in state.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected[0].state[number][key])), key


# Proof.


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_equals_a_barrier_to_the_bit_with_delays_an_evaluation_and_a_checkpoint(
    world_size: int, optimizer: str
) -> None:
    def disturb(step: int, sync: Ahead, model: nn.Module, made: torch.optim.Optimizer) -> None:
        if step == 20:
            model.eval()
            with torch.inference_mode():
                model(batch(0, step))
            model.train()
        if step == 30:
            made.load_state_dict(copy.deepcopy(made.state_dict()))

    settings = {"steps": 50, "optimizer": optimizer, "each_step": disturb}
    ahead = on_ranks(world_size, barrier=False, slow=True, **settings)
    assert_equal_bits(ahead, on_ranks(world_size, barrier=True, **settings))
    assert "predicted" in ahead[0].about


def test_ready_order_and_16_bit_transfers_equal_their_barrier_too() -> None:
    for options in ({"order": "ready"}, {"transfer_dtype": "bf16"}):
        assert_equal_bits(on_ranks(2, barrier=False, **options), on_ranks(2, barrier=True, **options))


def test_strict_hides_weights_until_their_update_and_nothing_reads_them_before() -> None:
    assert_equal_bits(on_ranks(2, barrier=False, strict=True), on_ranks(2, barrier=True))


# Negative controls: each of these mistakes must show.


@contextmanager
def mistaken(target: type, name: str, mistake: Callable[..., Any]) -> Iterator[None]:
    right = getattr(target, name)
    setattr(target, name, mistake)
    try:
        yield
    finally:
        setattr(target, name, right)


def differs(results: list[Result], expected: list[Result]) -> bool:
    return any(not torch.equal(value, expected[0].weights[name]) for name, value in results[0].weights.items())


def test_options_that_are_read_late_would_show() -> None:
    freeze, apply = LateUpdates.freeze, LateUpdates.apply

    def late(self: LateUpdates, parameters: Any, gradients: Any) -> None:
        freeze(self)
        apply(self, parameters, gradients)

    with mistaken(LateUpdates, "apply", late):
        found = on_ranks(2, barrier=False, strict=False)
    assert differs(found, on_ranks(2, barrier=True))


def test_last_step_that_is_skipped_would_show() -> None:
    assert differs(on_ranks(2, barrier=False, strict=False, drained=False), on_ranks(2, barrier=True))


@pytest.mark.parametrize("strict", [True, False])
def test_missed_wait_would_show(strict: bool) -> None:
    """One module does not wait: its weight is updated after forward has used it, which autograd sees."""
    before = Ahead._before

    def skip_one(self: Ahead, module: nn.Module) -> None:
        self._seen = True
        if not (self._pending and isinstance(module, nn.Linear) and module.out_features == 4):
            before(self, module)

    with mistaken(Ahead, "_before", skip_one), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        on_ranks(2, barrier=False, strict=strict)


# Tripwires, and what waits.


def at_step(number: int, act: Callable[[Ahead, nn.Module, torch.optim.Optimizer], None]) -> Any:
    """Between backward and step, once."""

    def each_step(step: int, sync: Ahead, model: nn.Module, made: torch.optim.Optimizer) -> None:
        if step == number:
            act(sync, model, made)

    return each_step


def test_gradients_read_as_nan_and_clipping_them_is_an_error() -> None:
    def act(_: Ahead, model: nn.Module, made: torch.optim.Optimizer) -> None:
        assert model.get_parameter("first.weight").grad.isnan().all()
        with pytest.raises(RuntimeError):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def change(_: Ahead, model: nn.Module, made: torch.optim.Optimizer) -> None:
        parameter = model.get_parameter("first.weight")
        parameter.grad = parameter.grad * 2
        with pytest.raises(ContractError, match=r"gradient of first\.weight was changed"):
            made.step()
        raise StopIteration

    on_ranks(2, barrier=False, each_step=at_step(5, act))
    with pytest.raises(StopIteration):
        on_ranks(2, barrier=False, each_step=at_step(5, change))


def test_synchronize_gives_the_mean_and_clipping_it_equals_clipping_with_a_barrier() -> None:
    def clip(sync: Ahead, model: nn.Module, _: torch.optim.Optimizer) -> None:
        sync.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    settings = {"each_step": at_step(6, clip)}
    assert_equal_bits(on_ranks(2, barrier=False, **settings), on_ranks(2, barrier=True, **settings))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_instead_of_a_step_drops_the_batch(set_to_none: bool) -> None:
    """As where a loss is NaN: the next forward begins without an update."""

    def run(comm: Communicator, _: EventLog, barrier: bool) -> Result:
        model = copy.deepcopy(TEMPLATE)
        sync = Ahead(comm, chunk_mb=CHUNK_MB, barrier=barrier)
        module, made, losses = sync.attach(model), optimizer_of(model, "sgd"), []
        for step in range(12):
            loss = module(batch(comm.rank, step)).square().mean()
            losses.append(loss.item())
            loss.backward()
            sync.finish_for_update()
            made.zero_grad(set_to_none) if step == 7 else sync.update(made)
        sync.synchronize()
        return Result(model, made, losses, sync)

    ahead, barrier = ([*on_threads(2, lambda comm, log, b=b: run(comm, log, b))] for b in (False, True))
    assert_equal_bits(ahead, barrier)


def test_second_backward_without_a_step_adds_up() -> None:
    def run(comm: Communicator, _: EventLog, barrier: bool) -> Result:
        model = copy.deepcopy(TEMPLATE)
        sync = Ahead(comm, chunk_mb=CHUNK_MB, barrier=barrier)
        module, made, losses = sync.attach(model), optimizer_of(model, "sgd"), []
        for step in range(12):
            for part in (0, 1):
                loss = module(batch(comm.rank, 2 * step + part)).square().mean()
                losses.append(loss.item())
                loss.backward()
                sync.finish_for_update()
            sync.update(made)
        sync.synchronize()
        return Result(model, made, losses, sync)

    ahead, barrier = ([*on_threads(2, lambda comm, log, b=b: run(comm, log, b))] for b in (False, True))
    assert_equal_bits(ahead, barrier)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, values: Tensor) -> Tensor:
        return self.early(linear(values, self.late.weight)) + self.late(values)


def test_weight_that_is_read_before_its_module_is_called_reads_as_nan_in_the_first_steps() -> None:
    def run(comm: Communicator, _: EventLog) -> list[float]:
        torch.manual_seed(0)
        model = Functional()
        sync = Ahead(comm, chunk_mb=CHUNK_MB, barrier=False)
        module, made, losses = sync.attach(model), torch.optim.SGD(model.parameters(), lr=0.01), []
        for step in range(5):
            loss = module(batch(comm.rank, step)).square().mean()
            losses.append(loss.item())
            loss.backward()
            sync.finish_for_update()
            sync.update(made)
        sync.detach()  # what is on its way needs both ranks
        return losses

    for losses in on_threads(2, run):
        assert losses[-1] != losses[-1]


def test_frozen_in_the_middle_and_skipped_modules() -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.extra, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

        def forward(self, values: Tensor) -> Tensor:
            hidden = self.first(values)
            return self.last(hidden) if not self.training else self.last(self.extra(hidden))

    torch.manual_seed(0)
    template = Skipping()

    def run(comm: Communicator, _: EventLog, barrier: bool) -> list[Tensor]:
        model = copy.deepcopy(template)
        sync = Ahead(comm, chunk_mb=0.0001, barrier=barrier)
        module, made = sync.attach(model), torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(16):
            model.train(step != 8)  # its forward skips a module, whose update must not be lost
            model.extra.requires_grad_(step != 8)
            if step == 12:
                model.first.requires_grad_(False)
            module(batch(comm.rank, step)).square().mean().backward()
            sync.finish_for_update()
            sync.update(made)
        sync.synchronize()
        return [parameter.detach().clone() for parameter in model.parameters()]

    for found, expected in zip(
        on_threads(2, lambda c, g: run(c, g, False)), on_threads(2, lambda c, g: run(c, g, True)), strict=True
    ):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


# Falls back, by name.


@pytest.mark.parametrize(
    ("options", "make", "words"),
    [
        ({}, lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS"),
        ({}, lambda model: torch.optim.SGD([*model.parameters()][1:], lr=0.1), "is not in the optimizer"),
        ({"unused": "zero"}, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), "unused"),
    ],
)
def test_what_cannot_go_ahead_waits_and_says_why(options: Any, make: Any, words: str) -> None:
    def run(comm: Communicator, _: EventLog) -> str:
        model = copy.deepcopy(TEMPLATE)
        sync = Ahead(comm, chunk_mb=CHUNK_MB, **options)
        module = sync.attach(model)
        sync.bind(make(model))
        module(batch(comm.rank, 0)).square().mean().backward()
        sync.finish_for_update()
        assert not model.get_parameter("first.weight").grad.isnan().any()
        return sync.describe()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for about in on_threads(2, run):
            assert "waits for all gradients" in about
            assert words in about
    assert any(words in str(warning.message) for warning in seen)


def test_little_to_gain_keeps_the_barrier() -> None:
    """On threads a transfer costs less than a tenth of what it would have to."""
    for result in on_threads(2, lambda comm, _: train(comm, steps=6)):
        assert "predicted" in result.about or "less than 3%" in result.about


def test_state_brings_back_the_layout() -> None:
    def run(comm: Communicator, _: EventLog) -> tuple[dict[str, Any], dict[str, Any]]:
        sync, other = Ahead(comm, chunk_mb=CHUNK_MB), Ahead(comm)
        module = sync.attach(copy.deepcopy(TEMPLATE))
        other.attach(copy.deepcopy(TEMPLATE))
        module(batch(comm.rank, 0)).square().mean().backward()
        sync.finish()
        other.load_state(sync.state())
        return {**sync.state(), "cut": len(sync.layout.buckets)}, {**other.state(), "cut": len(other.layout.buckets)}

    for first, second in on_threads(2, run):
        assert first == second


# In a user's script.


def user_loop(wrap: Callable[[nn.Module, torch.optim.Optimizer], nn.Module], rank: int) -> dict[str, Tensor]:
    model = copy.deepcopy(TEMPLATE)
    made = optimizer_of(model, "adamw")
    wrapped = wrap(model, made)
    schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step))
    kept: Any = None
    for step in range(20):
        for part in range(2):
            with wrapped.no_sync() if part == 0 else warnings.catch_warnings():
                wrapped(batch(rank, 2 * step + part)).square().mean().backward()
        if step % 5 == 3:
            nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
        made.step()
        schedule.step()
        wrapped.zero_grad()
        if step == 8:
            kept = copy.deepcopy(wrapped.module.state_dict())
            saved = copy.deepcopy(made.state_dict())
        if step == 11:
            with torch.no_grad():
                wrapped(batch(rank, step))
            twin = copy.deepcopy(wrapped.module)
            wrapped.module.load_state_dict(twin.state_dict())
        if step == 14:
            made.load_state_dict(saved)
            wrapped.module.load_state_dict(kept)
    del wrapped  # the last update must not go with it
    gc.collect()
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def in_a_script() -> dict[str, Any]:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def ahead(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        return syncline.DataParallel(
            model, "ahead", optimizer=optimizer, barrier=False, chunk_mb=CHUNK_MB, broadcast_buffers=True
        )

    found = {"ahead": user_loop(ahead, rank), "ddp": user_loop(lambda m, _: DistributedDataParallel(m), rank)}
    dist.destroy_process_group()
    return found


def test_plain_script_gives_what_ddp_gives() -> None:
    """Accumulation, clipping, a scheduler, copies, a checkpoint and going back to it."""
    for found in syncline.launch(in_a_script, workers=2, threads=1):
        for name, value in found["ddp"].items():
            torch.testing.assert_close(found["ahead"][name], value, rtol=1e-4, atol=1e-5)


def test_script_must_give_its_optimizer() -> None:
    with pytest.raises(PlanError, match="needs the optimizer"):
        syncline.DataParallel(copy.deepcopy(TEMPLATE), "ahead")
