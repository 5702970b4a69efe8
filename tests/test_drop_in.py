"""DataParallel in DDP's place: wrapped again, copied, pickled, called past the wrapper; odd gradients and parameters.

All scenarios run in two launches of real processes, because starting ranks is what takes the time.
"""

from __future__ import annotations

import copy
import gc
import io
import tempfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import gradients
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import syncline
from syncline.errors import PlanError

METHODS = ["all-reduce", "gather-scatter", "bucketed", "ring", "shared-memory", "hierarchical", "ddp"]
WORLDS = (2, 3)


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.BatchNorm1d(5), nn.Linear(5, 4))


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(1000 * rank + step))


def loss_of(outputs: Tensor) -> Tensor:
    return outputs.square().sum()


def mean_of(
    world: int, steps: tuple[int, ...] = (0,), make: Callable[[], nn.Module] = small_net
) -> dict[str, Tensor]:
    """What one worker gets that runs the ranks' batches one after the other."""
    model = make()
    sum(loss_of(model(batch(rank, step))) / world for rank in range(world) for step in steps).backward()  # type: ignore[union-attr]
    return gradients(model)


def backward(module: nn.Module, rank: int, step: int = 0) -> None:
    loss_of(module(batch(rank, step))).backward()


# Scenarios: (method, rank) -> gradients, and what to compare them with.


def wrapped_again(method: str, rank: int) -> Any:
    model = small_net()
    first = syncline.DataParallel(model, method)
    backward(first, rank)
    model.zero_grad()
    del first
    second = syncline.DataParallel(model, method)
    backward(second, rank)
    return gradients(model)


def two_wrappers(method: str, rank: int) -> Any:
    """A notebook cell that is run twice; the first was interrupted after its forward."""
    model = small_net()
    first = syncline.DataParallel(model, method)
    loss_of(first(batch(rank)))
    second = syncline.DataParallel(model, method)
    found = []
    for wrapper in (second, first, second):
        model.zero_grad()
        backward(wrapper, rank)
        found.append(gradients(model))
    return found


def garbage(method: str, rank: int) -> Any:
    """Hooks, threads and groups that are left when nobody holds the wrapper any more."""
    model = small_net()
    syncline.DataParallel(model, method)  # the store's own threads and such
    gc.collect()
    before = threading.active_count(), len(dist.distributed_c10d._world.pg_map)
    wrapper = syncline.DataParallel(model, method)
    backward(wrapper, rank)
    del wrapper
    gc.collect()
    hooks = [len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters()]
    return hooks, before, (threading.active_count(), len(dist.distributed_c10d._world.pg_map))


def copied_module(method: str, rank: int) -> Any:
    """A copy of `.module` is the user's own; only rank 0 makes one, and trains it alone."""
    model = small_net()
    wrapper = syncline.DataParallel(model, method)
    backward(wrapper, rank)
    if rank == 0:
        for twin in (copy.deepcopy(wrapper.module), reloaded(wrapper.module)):
            assert not any("syncline" in type(value).__module__ for value in vars(twin).values())
            twin.zero_grad()
            backward(twin, rank)
        averaged = AveragedModel(wrapper.module)
        averaged.update_parameters(wrapper.module)
        with torch.no_grad():
            AveragedModel(wrapper)(batch(0))
    model.zero_grad()
    backward(wrapper, rank)
    return gradients(model)


def copied_wrapper(method: str, rank: int) -> Any:
    """Copies by rank 0 alone talk to nobody; copies on all ranks average from their first forward on."""
    wrapper = syncline.DataParallel(small_net(), method)
    backward(wrapper, rank)
    if rank == 0:
        copy.deepcopy(wrapper)
        reloaded(wrapper)
    found = []
    for twin in (copy.deepcopy(wrapper), reloaded(wrapper)):
        with torch.no_grad():
            twin(batch(rank))
        for _ in range(2):
            twin.zero_grad()
            backward(twin, rank)
        found.append(gradients(twin.module))
    return found


def reloaded(model: nn.Module) -> Any:
    content = io.BytesIO()
    torch.save(model, content)
    content.seek(0)
    return torch.load(content, weights_only=False)


def past_the_wrapper(method: str, rank: int) -> Any:
    """One rank alone backpropagates through `.module`; nobody waits for the others."""
    model = small_net()
    wrapper = syncline.DataParallel(model, method)
    backward(wrapper, rank)
    model.zero_grad()
    if rank == 0:
        backward(wrapper.module, rank, step=7)
    alone = gradients(model)
    model.zero_grad()
    backward(wrapper, rank)
    return alone, gradients(model)


@dataclass
class Answer:
    logits: Tensor


class Dataclassed(nn.Module):
    def __init__(self, keeps_loss: bool) -> None:
        super().__init__()
        self.net = small_net()
        self.keeps_loss = keeps_loss

    def forward(self, values: Tensor) -> Answer | None:
        outputs = self.net(values)
        if not self.keeps_loss:
            return Answer(outputs)
        self.loss = loss_of(outputs)
        return None


def outputs_of_any_kind(method: str, rank: int) -> Any:
    found = []
    for keeps_loss in (False, True):
        model = Dataclassed(keeps_loss)
        wrapper = syncline.DataParallel(model, method)
        for _ in range(2):
            model.zero_grad()
            answer = wrapper(batch(rank))
            (model.loss if keeps_loss else loss_of(answer.logits)).backward()
        found.append(gradients(model.net))
    return found


def repeated_backwards(method: str, rank: int) -> Any:
    model = small_net()
    wrapper = syncline.DataParallel(model, method)
    outputs = wrapper(batch(rank))
    loss_of(outputs).backward(retain_graph=True)
    model.zero_grad()
    loss_of(outputs).backward()
    return gradients(model)


def two_forwards_then_two_backwards(method: str, rank: int) -> Any:
    model = small_net()
    wrapper = syncline.DataParallel(model, method, broadcast_buffers=False)
    losses = [loss_of(wrapper(batch(rank, step))) for step in (0, 1)]
    for loss in losses:
        loss.backward()
    return gradients(model)


def no_sync_counts_where_forward_runs(method: str, rank: int) -> Any:
    model = small_net()
    wrapper = syncline.DataParallel(model, method)
    with wrapper.no_sync():
        loss = loss_of(wrapper(batch(rank)))
    loss.backward()
    local = gradients(model)
    model.zero_grad()
    loss = loss_of(wrapper(batch(rank)))
    with wrapper.no_sync():
        loss.backward()
    return local, gradients(model)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.left, self.right = nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.trunk(values))
        return self.left(hidden), self.right(hidden)


def one_of_two_outputs_first(method: str, rank: int) -> Any:
    model = TwoHeads()
    wrapper = syncline.DataParallel(model, method)
    for step in range(2):
        model.zero_grad()
        left, right = wrapper(batch(rank, step))
        loss_of(left).backward(retain_graph=True)
        loss_of(right).backward()
    return gradients(model)


class Embedded(nn.Module):
    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(50, 4, sparse=sparse), nn.Linear(4, 3)

    def forward(self, values: Tensor) -> Tensor:
        return self.out(self.words((values.abs() * 10).long().clamp(max=49)).mean(1))


def sparse_gradients(method: str, rank: int) -> Any:
    model = Embedded()
    wrapper = syncline.DataParallel(model, method)
    for step in (0, 1):
        model.zero_grad()
        backward(wrapper, rank, step)
    assert model.words.weight.grad is not None
    is_sparse = model.words.weight.grad.is_sparse
    return is_sparse, {name: gradient.to_dense() for name, gradient in gradients(model).items()}


class Undefined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor) -> Tensor:
        return values * 1.0

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[0], None


class Odd(nn.Module):
    """A gradient that autograd leaves undefined, and a weight that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.undefined = nn.Parameter(torch.ones(3))
        self.turned = nn.Parameter(torch.randn(4, 6).t())

    def forward(self, values: Tensor) -> Tensor:
        return Undefined.apply(values @ self.turned, self.undefined)  # type: ignore[no-any-return, no-untyped-call]


def odd_parameters(method: str, rank: int) -> Any:
    model = Odd()
    wrapper = syncline.DataParallel(model, method, find_unused_parameters=True)
    for step in (0, 1):
        model.zero_grad()
        backward(wrapper, rank, step)
    return gradients(model)


def another_dtype_after_wrapping(method: str, rank: int) -> Any:
    model = small_net()
    wrapper = syncline.DataParallel(model, method)
    backward(wrapper, rank)
    wrapper.double()
    model.zero_grad()
    loss_of(wrapper(batch(rank).double())).backward()
    return gradients(model)


def compiled(method: str, rank: int) -> Any:
    found = []
    for before in (True, False):
        model = small_net()
        inner = torch.compile(model, backend="aot_eager") if before else model
        wrapper: Any = syncline.DataParallel(inner, method)
        call = wrapper if before else torch.compile(wrapper, backend="aot_eager")
        for _ in range(2):
            model.zero_grad()
            backward(call, rank)
        found.append(gradients(model))
    return found


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()

    def forward(self, values: Tensor) -> Answer:
        for layer in self.net:  # type: ignore[attr-defined]
            values = checkpoint(layer, values.requires_grad_() if values.is_leaf else values, use_reentrant=True)
        return Answer(values)


def reentrant_checkpointing_in_a_dataclass(method: str, rank: int) -> Any:
    model = Checkpointed()
    wrapper = syncline.DataParallel(model, method)
    for _ in range(2):
        model.zero_grad()
        loss_of(wrapper(batch(rank)).logits).backward()
    return {name: gradient for name, gradient in gradients(model.net).items() if "running" not in name}


FOR_EVERY_METHOD = [
    wrapped_again, two_wrappers, copied_module, copied_wrapper, past_the_wrapper, outputs_of_any_kind,
    no_sync_counts_where_forward_runs, odd_parameters, sparse_gradients,
]  # fmt: skip
OURS_ONLY = [
    garbage, repeated_backwards, two_forwards_then_two_backwards, one_of_two_outputs_first,
    another_dtype_after_wrapping, reentrant_checkpointing_in_a_dataclass,
]  # fmt: skip
"""Where DDP is wrong, or refuses."""


def every_scenario(_: object = None) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # torch's own, about what it finds in its DDP
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    for method in METHODS:
        for scenario in [*FOR_EVERY_METHOD, *(OURS_ONLY if method != "ddp" else ())]:
            found[f"{scenario.__name__} {method}"] = scenario(method, rank)  # type: ignore[operator]
    found["compiled bucketed"] = compiled("bucketed", rank)
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def results() -> dict[int, list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as logs:
        return {world: syncline.launch(every_scenario, workers=world, threads=1, log_dir=logs) for world in WORLDS}


def check(results: dict[int, list[dict[str, Any]]], name: str, look: Callable[[Any, int, int], None]) -> None:
    for world, by_rank in results.items():
        for rank, found in enumerate(by_rank):
            look(found[name], world, rank)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


ONE_BATCH = [
    "wrapped_again", "two_wrappers", "copied_module", "copied_wrapper", "outputs_of_any_kind", "repeated_backwards",
    "reentrant_checkpointing_in_a_dataclass",
]  # fmt: skip
"""Scenarios whose gradients, or each of them, are the mean over the ranks' batches of step 0."""


CASES = [
    (scenario, method)
    for scenario in ONE_BATCH
    for method in METHODS
    if method != "ddp" or scenario not in [function.__name__ for function in OURS_ONLY]
]


@pytest.mark.parametrize(("scenario", "method"), CASES)
def test_gradients_are_the_mean_however_the_wrapper_is_used(results: Any, scenario: str, method: str) -> None:
    def look(found: Any, world: int, _: int) -> None:
        for gradient in found if isinstance(found, list) else [found]:
            same(gradient, mean_of(world))

    check(results, f"{scenario} {method}", look)


OURS = [method for method in METHODS if method != "ddp"]


@pytest.mark.parametrize("method", OURS)
def test_garbage_leaves_no_hook_no_thread_and_no_group(results: Any, method: str) -> None:
    def look(found: Any, _world: int, _rank: int) -> None:
        hooks, before, after = found
        assert not any(hooks)
        assert after == before

    check(results, f"garbage {method}", look)


@pytest.mark.parametrize("method", METHODS)
def test_backward_past_the_wrapper_on_one_rank_sends_nothing(results: Any, method: str) -> None:
    def look(found: Any, world: int, rank: int) -> None:
        alone, averaged = found
        model = small_net()
        backward(model, 0, step=7)
        same(alone, gradients(model) if rank == 0 else {})
        same(averaged, mean_of(world))

    check(results, f"past_the_wrapper {method}", look)


@pytest.mark.parametrize("method", METHODS)
def test_no_sync_counts_where_forward_runs(results: Any, method: str) -> None:
    def look(found: Any, world: int, rank: int) -> None:
        local, averaged = found
        model = small_net()
        backward(model, rank)
        same(local, gradients(model))
        same(averaged, mean_of(world))

    check(results, f"no_sync_counts_where_forward_runs {method}", look)


@pytest.mark.parametrize("method", OURS)
def test_two_forwards_then_two_backwards_add_up(results: Any, method: str) -> None:
    name = f"two_forwards_then_two_backwards {method}"
    check(results, name, lambda found, world, _: same(found, mean_of(world, (0, 1))))


@pytest.mark.parametrize("method", OURS)
def test_outputs_may_be_backpropagated_one_after_the_other(results: Any, method: str) -> None:
    def look(found: Any, world: int, _: int) -> None:
        model = TwoHeads()
        for rank in range(world):
            left, right = model(batch(rank, 1))
            ((loss_of(left) + loss_of(right)) / world).backward()
        same(found, gradients(model))

    check(results, f"one_of_two_outputs_first {method}", look)


@pytest.mark.parametrize("method", METHODS)
def test_sparse_gradients_are_averaged_and_stay_sparse(results: Any, method: str) -> None:
    def look(found: Any, world: int, _: int) -> None:
        is_sparse, averaged = found
        assert is_sparse
        same(averaged, mean_of(world, (1,), lambda: Embedded(sparse=False)))

    check(results, f"sparse_gradients {method}", look)


@pytest.mark.parametrize("method", METHODS)
def test_undefined_gradient_and_weight_that_is_not_contiguous(results: Any, method: str) -> None:
    def look(found: dict[str, Tensor], world: int, _: int) -> None:
        found.pop("undefined", None)  # DDP makes it zero
        same(found, mean_of(world, (1,), Odd))

    check(results, f"odd_parameters {method}", look)


@pytest.mark.parametrize("method", OURS)
def test_dtype_may_change_after_wrapping(results: Any, method: str) -> None:
    name = f"another_dtype_after_wrapping {method}"

    def look(found: dict[str, Tensor], world: int, _: int) -> None:
        assert all(gradient.dtype == torch.float64 for gradient in found.values())
        same({name: gradient.float() for name, gradient in found.items()}, mean_of(world))

    check(results, name, look)


def test_compiled_before_and_after_wrapping(results: Any) -> None:
    def look(found: Any, world: int, _: int) -> None:
        for gradient in found:
            same(gradient, mean_of(world))

    check(results, "compiled bucketed", look)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.ReLU(), "no parameter that requires a gradient"),
        (lambda: nn.LazyLinear(3), "uninitialized parameters"),
    ],
)
def test_module_that_cannot_be_wrapped_is_refused(make: Callable[[], nn.Module], words: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about lazy modules
        module = make()
    with pytest.raises(PlanError, match=words):
        syncline.DataParallel(module)
