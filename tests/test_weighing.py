"""Uneven shards weigh by themselves: whatever the method, gradients are those of one worker on the global batch."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import NEED_NO_OPTIMIZER, ON_THREADS, on_threads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import syncline
from syncline import weighing, world
from syncline.comm import Communicator
from syncline.errors import UsageError
from syncline.shares import Pass, Share

CLOSE = {"rtol": 1e-11, "atol": 1e-13}
"""Sums in another order, in 64 bits."""
Gradients = list[dict[str, Tensor]]


def dataset(count: int = 13) -> TensorDataset:
    stream = torch.Generator().manual_seed(2)
    targets = torch.randint(3, (count,), generator=stream)
    return TensorDataset(torch.randn(count, 6, generator=stream, dtype=torch.float64), targets)


class Net(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        # Two values per channel and sample: a rank may have one sample.
        between = [nn.Unflatten(1, (4, 2)), nn.BatchNorm1d(4), nn.Flatten()] if norm else []
        self.layers = nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 3)).double()

    def forward(self, values: Tensor) -> Tensor:
        scores: Tensor = self.layers(values)
        return scores


_template = {norm: Net(norm) for norm in (False, True)}


def net(norm: bool = False) -> nn.Module:
    """Copied, because threads share torch's random generator."""
    return copy.deepcopy(_template[norm])


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def train(
    model: nn.Module, *, global_batch: int = 5, accumulate: int = 1, epochs: int = 2, **options: Any
) -> Gradients:
    """What people write. Gradients of every update; the model learns, so that a wrong one shows in all later ones."""
    loader = syncline.loader(dataset(), global_batch=global_batch, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for number, (inputs, targets) in enumerate(batch for _ in range(epochs) for batch in loader):
        update = (number + 1) % accumulate == 0
        if update or not isinstance(model, syncline.DataParallel):
            nn.functional.cross_entropy(model(inputs), targets).backward()
        else:
            with model.no_sync():
                nn.functional.cross_entropy(model(inputs), targets).backward()
        if update:
            found.append(grads(model.module if isinstance(model, syncline.DataParallel) else model))
            optimizer.step()
            optimizer.zero_grad()
    return found


def assert_close(found: Gradients, expected: Gradients) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.fixture
def wrapping(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """`wrapping(world_size, function)`: function(rank) on threads; DataParallel finds the world of its thread."""
    here = threading.local()
    monkeypatch.setattr(world, "meet", lambda *_: here.backend)

    def run(world_size: int, function: Callable[[int], Any]) -> list[Any]:
        def live(communicator: Communicator, _log: object) -> Any:
            here.backend = communicator.backend
            return function(communicator.rank)

        return on_threads(world_size, live)

    return run


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("method", [method for method in ON_THREADS if method in NEED_NO_OPTIMIZER])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_are_those_of_one_worker(wrapping: Any, method: str, world_size: int, accumulate: int) -> None:
    """Thirteen samples in batches of five: all shards uneven, and on four ranks the last batch does not reach all."""
    expected = train(net(), accumulate=accumulate)
    for found in wrapping(world_size, lambda _: train(syncline.DataParallel(net(), method), accumulate=accumulate)):
        assert_close(found, expected)


def test_a_method_that_updates_later_ends_with_the_weights_of_one_worker(wrapping: Any) -> None:
    def weights(model: nn.Module, wrap: Callable[..., nn.Module]) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        wrapper, loader = wrap(model, optimizer), syncline.loader(dataset(), global_batch=5)
        for _ in range(4):
            for inputs, targets in loader:
                nn.functional.cross_entropy(wrapper(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
        return {name: tensor.clone() for name, tensor in wrapper.state_dict().items()}

    def ahead(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        return syncline.DataParallel(model, "ahead", optimizer=optimizer)

    expected = weights(net(), lambda model, _: model)
    for found in wrapping(3, lambda _: weights(net(), ahead)):
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("last", ["uneven", "drop", "pad"])
def test_whatever_becomes_of_the_last_batch(wrapping: Any, last: str) -> None:
    expected = train(net(), last=last, global_batch=8)
    assert len(expected) == (2 if last == "drop" else 4)
    for found in wrapping(3, lambda _: train(syncline.DataParallel(net(), "bucketed"), last=last, global_batch=8)):
        assert_close(found, expected)


def test_wrong_weights_would_show(wrapping: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(net())
    monkeypatch.setattr(weighing, "current_share", lambda: None)
    for found in wrapping(3, lambda _: train(syncline.DataParallel(net(), "all-reduce"))):
        with pytest.raises(AssertionError):
            torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-6)


def test_join_around_the_loop_changes_nothing(wrapping: Any) -> None:
    expected = train(net())

    def joined(_rank: int) -> Gradients:
        model = syncline.DataParallel(net(), "bucketed")
        with model.join():
            return train(model)

    for found in wrapping(4, joined):
        assert_close(found, expected)


@pytest.mark.parametrize("world_size", [2, 4])
def test_batch_norm_over_all_ranks_is_that_of_one_worker(wrapping: Any, world_size: int) -> None:
    """Its backward adds up gradients of all ranks, which weigh differently. The last batch has three samples."""
    expected = train(net(norm=True))
    sync = {"method": "all-reduce", "batch_norm": "sync"}
    for found in wrapping(world_size, lambda _: train(syncline.DataParallel(net(norm=True), **sync))):
        assert_close(found, expected)


def test_stand_ins_leave_no_trace_in_batch_norm(wrapping: Any) -> None:
    def buffers(rank: int) -> list[dict[str, Tensor]]:
        model = syncline.DataParallel(net(norm=True), "all-reduce")
        loader, seen = syncline.loader(dataset(9), global_batch=8, shuffle=False), []
        for inputs, targets in loader:
            nn.functional.cross_entropy(model(inputs), targets).backward()
            seen.append({name: buffer.clone() for name, buffer in model.module.named_buffers()})
        return seen

    before, after = wrapping(4, buffers)[3]
    assert after["layers.2.num_batches_tracked"] == 1
    torch.testing.assert_close(after, before, rtol=0, atol=0)


# Which forward a backward belongs to.


def at(share: Share | None) -> Pass:
    turn = Pass()
    if share is not None:
        turn.note(share)
    return turn


LIGHT, HEAVY = Share(1, 4, 2), Share(3, 4, 2)
"""Weights 0.5 and 1.5."""


def alone(model: nn.Module | None = None) -> tuple[nn.Module, nn.Module]:
    """Of a world of one, where nothing is averaged: what is left is the weight."""
    model = net() if model is None else model
    return model, syncline.DataParallel(model, "all-reduce")


def forward(wrapper: nn.Module, share: Share | None, seed: int = 0) -> Tensor:
    turn = at(share)
    try:
        inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        result: Tensor = wrapper(inputs).square().sum()
        return result
    finally:
        turn.end()


def plain(*terms: tuple[float, int]) -> dict[str, Tensor]:
    model = net()
    for weight, seed in terms:
        (weight * forward(model, None, seed)).backward()
    return grads(model)


def test_even_shards_hook_nothing_and_a_weight_is_read_at_forward() -> None:
    model, wrapper = alone()
    forward(wrapper, Share(2, 4, 2)).backward()
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    model.zero_grad()
    loss = forward(wrapper, HEAVY)
    loss.backward()
    torch.testing.assert_close(grads(model), plain((1.5, 0)), **CLOSE)
    model.zero_grad()
    forward(wrapper, None).backward()
    torch.testing.assert_close(grads(model), plain((1.0, 0)), **CLOSE)


def test_two_forwards_then_two_backwards_each_with_its_own_weight() -> None:
    model, wrapper = alone()
    first, second = forward(wrapper, LIGHT, 1), forward(wrapper, HEAVY, 2)
    first.backward()
    second.backward()
    torch.testing.assert_close(grads(model), plain((0.5, 1), (1.5, 2)), **CLOSE)


def test_repeated_and_split_backwards() -> None:
    model, wrapper = alone()
    loss = forward(wrapper, HEAVY)
    loss.backward(retain_graph=True)
    forward(wrapper, LIGHT, 1).backward()
    loss.backward()
    torch.testing.assert_close(grads(model), plain((1.5, 0), (0.5, 1), (1.5, 0)), **CLOSE)


def test_one_backward_of_batches_that_weigh_differently_is_refused() -> None:
    model, wrapper = alone()
    total = forward(wrapper, LIGHT, 1) + forward(wrapper, HEAVY, 2)
    with pytest.raises(UsageError, match=r"weigh .* and .* on this rank"):
        total.backward()
    model.zero_grad()
    (forward(wrapper, HEAVY, 1) + forward(wrapper, HEAVY, 2)).backward()
    torch.testing.assert_close(grads(model), plain((1.5, 1), (1.5, 2)), **CLOSE)


def test_backward_past_the_wrapper_is_left_alone() -> None:
    model, wrapper = alone()
    forward(wrapper, HEAVY).backward()
    model.zero_grad()
    forward(model, HEAVY).backward()
    torch.testing.assert_close(grads(model), plain((1.0, 0)), **CLOSE)


def test_gradient_penalty() -> None:
    def penalty(called: nn.Module) -> Tensor:
        inputs = torch.ones(3, 6, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(called(inputs).square().sum(), inputs, create_graph=True)
        return slope.square().sum()

    model, wrapper = alone()
    turn = at(HEAVY)
    penalty(wrapper).backward()
    turn.end()
    reference = net()
    (1.5 * penalty(reference)).backward()
    torch.testing.assert_close(grads(model), grads(reference), **CLOSE)


def test_parameters_in_two_wrappers_are_scaled_once_and_by_either() -> None:
    model, first = alone()
    _, second = alone(model)
    for wrapper in (first, second):
        model.zero_grad()
        forward(wrapper, HEAVY).backward()
        torch.testing.assert_close(grads(model), plain((1.5, 0)), **CLOSE)
    model.zero_grad()
    (forward(first, HEAVY, 1) + forward(second, HEAVY, 2)).backward()
    torch.testing.assert_close(grads(model), plain((1.5, 1), (1.5, 2)), **CLOSE)


def test_unfrozen_later() -> None:
    model, wrapper = alone()
    first = next(model.parameters()).requires_grad_(False)
    forward(wrapper, HEAVY).backward()
    model.zero_grad()
    first.requires_grad_(True)
    forward(wrapper, HEAVY).backward()
    torch.testing.assert_close(grads(model), plain((1.5, 0)), **CLOSE)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_checkpointing_inside_the_wrapper_and_around_it(reentrant: bool, inside: bool) -> None:
    class Recomputed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, values: Tensor) -> Any:
            return checkpoint(self.inner, values.requires_grad_(), use_reentrant=reentrant)

    model = net()
    wrapper = Recomputed(alone(model)[1]) if not inside else alone(Recomputed(model))[1]
    for share, weight in ((Share(2, 4, 2), 1.0), (HEAVY, 1.5), (LIGHT, 0.5)):
        model.zero_grad()
        turn = at(share)
        inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        wrapper(inputs).square().sum().backward()
        turn.end()
        torch.testing.assert_close(grads(model), plain((weight, 0)), **CLOSE)


@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.`")  # models of other tests may still be watched
@pytest.mark.parametrize("inside", [True, False])
def test_compiled_before_wrapping_and_after(inside: bool) -> None:
    model = net()
    wrapper = alone(torch.compile(model, backend="eager"))[1] if inside else alone(model)[1]
    called = wrapper if inside else torch.compile(wrapper, backend="eager")
    for share, weight in ((Share(2, 4, 2), 1.0), (HEAVY, 1.5), (LIGHT, 0.5)):
        model.zero_grad()
        forward(called, share).backward()
        torch.testing.assert_close(grads(model), plain((weight, 0)), **CLOSE)


def test_a_loss_that_is_a_sum_is_left_alone(wrapping: Any) -> None:
    def sums(model: nn.Module, **options: Any) -> dict[str, Tensor]:
        loader = syncline.loader(dataset(), global_batch=6, shuffle=False, **options)
        for inputs, targets in loader:
            nn.functional.cross_entropy(model(inputs), targets, reduction="sum").backward()
        return {name: gradient.clone() for name, gradient in grads(model).items()}

    expected = sums(net())
    for found in wrapping(4, lambda _: sums(syncline.DataParallel(net(), "all-reduce"), weigh=False)):
        assert len(found) == len(expected)
        for own, (name, total) in zip(found.values(), expected.items(), strict=True):
            torch.testing.assert_close(4 * own, total, **CLOSE, msg=name)


def test_a_stand_in_counts_nothing_even_if_it_is_nan() -> None:
    model, wrapper = alone()
    (forward(wrapper, Share(0, 4, 2)) * float("nan")).backward()
    assert all(not gradient.any() for gradient in grads(model).values())


def test_copies_carry_nothing_and_garbage_takes_its_hooks_with_it() -> None:
    model, wrapper = alone()
    forward(wrapper, HEAVY).backward()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.zero_grad()
        assert not any(parameter._backward_hooks for parameter in other.parameters())
        forward(other, HEAVY).backward()
        torch.testing.assert_close(grads(other), plain((1.0, 0)), **CLOSE)
    for again in (copy.deepcopy(wrapper), pickle.loads(pickle.dumps(wrapper))):
        again.zero_grad()
        forward(again, LIGHT).backward()
        torch.testing.assert_close(grads(again.module), plain((0.5, 0)), **CLOSE)
    assert any(parameter._backward_hooks for parameter in model.parameters())
    del wrapper
    gc.collect()
    assert not any(parameter._backward_hooks for parameter in model.parameters())


# In processes.

IN_PROCESSES = ["bucketed", "shared-memory", "all-reduce", "ddp"]


def train_on_a_rank() -> dict[str, Gradients]:
    found = {}
    for method in IN_PROCESSES:
        for accumulate in (1, 3):
            torch.manual_seed(0)
            model = Net()
            found[f"{method} {accumulate}"] = train(syncline.DataParallel(model, method), accumulate=accumulate)
    return found


@pytest.mark.parametrize("workers", [2, 3])
def test_gradients_are_those_of_one_worker_in_processes(workers: int) -> None:
    """Ddp too, where torch's own reducer sends them. Three ranks and two samples in the last batch."""
    expected = {}
    for accumulate in (1, 3):
        torch.manual_seed(0)
        expected[accumulate] = train(Net(), accumulate=accumulate)
    for rank in syncline.launch(train_on_a_rank, workers=workers, threads=1):
        assert list(rank) == [f"{method} {accumulate}" for method in IN_PROCESSES for accumulate in (1, 3)]
        for name, found in rank.items():
            assert_close(found, expected[int(name[-1])])
