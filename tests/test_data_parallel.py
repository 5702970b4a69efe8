"""DataParallel: in anyone's own loop, for every method, what torch's own class does; groups and launchers.

Scenarios run in real processes, many per launch, because starting ranks is what takes the time.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import NEED_NO_OPTIMIZER, assert_same, expected_mean, gradients, integer_loss, integer_model
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import syncline
from syncline.errors import ContractError, PlanError

FLAT = [
    method for method in NEED_NO_OPTIMIZER if method not in ("gather-scatter", "point-to-point", "all-reduce", "ddp")
]
OURS = [method for method in NEED_NO_OPTIMIZER if method != "ddp"]
DEADLINE = timedelta(seconds=60)
"""Long enough for a busy machine; a test that hangs is ended after twice that."""
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Net(nn.Module):
    """Frozen and shared parameters, and a choice of outputs."""

    def __init__(self, output: str = "tensor") -> None:
        super().__init__()
        self.first, self.second, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.side = nn.Linear(6, 6)
        self.output = output

    def forward(self, values: Tensor) -> Any:
        main = self.second(torch.tanh(self.frozen(self.first(values))))
        if self.output == "tuple":
            return main, self.side(values)
        if self.output == "dict":
            return {"main": main, "side": [self.side(values)]}
        return main + self.side(values)


def same_start(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(1000 * rank + step))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def plain_loop(wrap: Callable[[nn.Module], nn.Module], rank: int) -> dict[str, Tensor]:
    """Parameter groups, momentum, clipping and accumulation: what people write."""
    model = same_start(Net)
    wrapped = wrap(model)
    groups = [{"params": [*model.first.parameters()], "lr": 0.05}, {"params": [model.second.bias]}]
    optimizer = torch.optim.SGD([*groups, {"params": model.side.parameters(), "lr": 0.2}], lr=0.1, momentum=0.9)
    for step in range(3):
        with wrapped.no_sync():
            wrapped(batch(rank, 10 * step)).square().mean().backward()
        wrapped(batch(rank, 10 * step + 1)).square().mean().backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def mean_after_backward(method: str, rank: int) -> list[dict[str, Tensor]]:
    """Nobody calls finish here; calling it again changes nothing."""
    model = integer_model("cnn")
    wrapped = syncline.DataParallel(model, method)
    found = []
    for _ in range(2):
        model.zero_grad()
        integer_loss(wrapped, rank).backward()
        found.append(gradients(model))
        wrapped.sync.finish()
        found.append(gradients(model))
    wrapped.close()
    return found


def outputs(method: str, rank: int, output: str, used: str) -> dict[str, Tensor]:
    model = same_start(lambda: Net(output))
    wrapped = syncline.DataParallel(model, method, find_unused_parameters=True)
    for step in range(2):
        model.zero_grad()
        given = wrapped(batch(rank, step))
        main, side = given if output == "tuple" else (given["main"], given["side"][0])
        {"both": main + side, "main": main}[used].square().sum().backward()
    return gradients(model)


def in_place_on_output(method: str, rank: int) -> dict[str, Tensor]:
    model = integer_model("mlp")
    wrapped = syncline.DataParallel(model, method)
    stream = torch.Generator().manual_seed(rank)
    images = torch.randint(-2, 3, (5, 3, 6, 6), generator=stream).float()
    out = wrapped(images)
    out *= 12.0 * torch.randint(-3, 4, (5, 4), generator=stream)
    out.sum().backward()
    return gradients(model)


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = integer_model("mlp")

    def forward(self, images: Tensor) -> Tensor:
        values = images.flatten(1).requires_grad_()
        for layer in list(self.net)[1:]:
            values = checkpoint(layer, values, use_reentrant=True)
        return values


def reentrant_checkpointing(method: str, rank: int) -> dict[str, Tensor]:
    model = Reentrant()
    wrapped = syncline.DataParallel(model, method)
    for _ in range(2):
        model.zero_grad()
        integer_loss(wrapped, rank).backward()
    return gradients(model.net)


def after_a_backward_that_raised(method: str, rank: int) -> dict[str, Tensor]:
    """The error is the user's own; the next step must be averaged again."""
    model = integer_model("mlp")
    wrapped = syncline.DataParallel(model, method)
    values = torch.ones(1, requires_grad=True)
    values.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        (integer_loss(wrapped, rank).detach() * values + wrapped(torch.ones(1, 3, 6, 6)).sum() * values).backward()
    model.zero_grad()
    integer_loss(wrapped, rank).backward()
    return gradients(model)


def every_method(_: object = None) -> dict[str, dict[str, Any]]:
    dist.init_process_group("gloo", timeout=DEADLINE)
    rank = dist.get_rank()
    found: dict[str, dict[str, Any]] = {}
    for method in NEED_NO_OPTIMIZER:
        found[method] = {
            "means": mean_after_backward(method, rank),
            "loop": plain_loop(lambda model, m=method: syncline.DataParallel(model, m), rank),
            "in place": in_place_on_output(method, rank),
        }
        if method != "ddp":
            found[method]["reentrant"] = reentrant_checkpointing(method, rank)
        if method not in ("ddp", *FLAT):
            found[method]["raised"] = after_a_backward_that_raised(method, rank)
        if method in ("ddp", *FLAT):
            for output in ("tuple", "dict"):
                for used in ("both", "main"):
                    found[method][f"{output}, {used} used"] = outputs(method, rank, output, used)
    found["torch"] = {"loop": plain_loop(DistributedDataParallel, rank)}
    return found


@pytest.fixture(scope="module")
def results_of_every_method() -> list[dict[str, dict[str, Any]]]:
    # torch warns on every rank where it finds no unused parameters; without a folder, what ranks write would be kept.
    with tempfile.TemporaryDirectory() as logs:
        return syncline.launch(every_method, workers=2, threads=1, log_dir=logs)


@pytest.mark.parametrize("method", NEED_NO_OPTIMIZER)
def test_backward_returns_with_averaged_gradients_and_finish_is_idempotent(
    method: str, results_of_every_method: list[dict[str, dict[str, Any]]]
) -> None:
    for found in results_of_every_method:
        for one in found[method]["means"]:
            assert_same(one, expected_mean("cnn", 2))


@pytest.mark.parametrize("method", NEED_NO_OPTIMIZER)
def test_plain_loop_gives_what_torch_s_class_gives(
    method: str, results_of_every_method: list[dict[str, dict[str, Any]]]
) -> None:
    """With groups, clipping, accumulation, frozen and shared parameters; and the same bits on both ranks."""
    first, second = results_of_every_method
    assert_same(first[method]["loop"], second[method]["loop"])
    torch.testing.assert_close(first[method]["loop"], first["torch"]["loop"], **CLOSE)
    assert not torch.equal(first[method]["loop"]["first.weight"], same_start(Net).first.weight)


@pytest.mark.parametrize("method", NEED_NO_OPTIMIZER)
def test_outputs_may_be_changed_in_place(
    method: str, results_of_every_method: list[dict[str, dict[str, Any]]]
) -> None:
    for found in results_of_every_method:
        assert_same(found[method]["in place"], expected_mean("mlp", 2))


@pytest.mark.parametrize("method", OURS)
def test_reentrant_checkpointing_ends_backward_once(
    method: str, results_of_every_method: list[dict[str, dict[str, Any]]]
) -> None:
    for found in results_of_every_method:
        assert_same(found[method]["reentrant"], expected_mean("mlp", 2))


@pytest.mark.parametrize("method", ["gather-scatter", "point-to-point", "all-reduce"])
def test_step_after_a_backward_that_raised_is_averaged(
    method: str, results_of_every_method: list[dict[str, dict[str, Any]]]
) -> None:
    for found in results_of_every_method:
        assert_same(found[method]["raised"], expected_mean("mlp", 2))


@pytest.mark.parametrize("used", ["both", "main"])
@pytest.mark.parametrize("output", ["tuple", "dict"])
@pytest.mark.parametrize("method", FLAT)
def test_several_outputs_and_unused_branches(
    method: str, output: str, used: str, results_of_every_method: list[dict[str, dict[str, Any]]]
) -> None:
    first, second = (found[method][f"{output}, {used} used"] for found in results_of_every_method)
    assert_same(first, second)
    assert ("side.weight" in first) == (used == "both")
    reference = results_of_every_method[0]["ddp"][f"{output}, {used} used"]
    torch.testing.assert_close(first, {key: reference[key] for key in first}, **CLOSE)


# Uneven inputs.


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))

    def forward(self, values: Tensor) -> Any:
        return self.layers(values)


def uneven_loop(wrapped: nn.Module, rank: int, steps: int, *, accumulates: bool = False) -> dict[str, Tensor]:
    model = wrapped.module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with wrapped.join():
        for step in range(steps):
            if accumulates:
                with wrapped.no_sync():
                    wrapped(batch(rank, 50 + step)).square().mean().backward()
            wrapped(batch(rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def looks_at_the_model_inside(wrapped: nn.Module, rank: int, steps: int) -> dict[str, Tensor]:
    """A forward without gradients leads to no average, so the others must not wait for it."""
    model = wrapped.module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with wrapped.join():
        for step in range(steps):
            wrapped(batch(rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                wrapped(batch(rank, step))
    return weights(model)


class WithUnused(Net):
    def __init__(self) -> None:
        super().__init__("tuple")

    def forward(self, values: Tensor) -> Any:
        return super().forward(values)[0]


UNEVEN: dict[str, tuple[Callable[[], nn.Module], Callable[..., dict[str, Tensor]], dict[str, Any]]] = {
    "plain": (Net, uneven_loop, {}),
    "accumulation": (Net, lambda *given: uneven_loop(*given, accumulates=True), {}),
    "evaluation inside": (Net, looks_at_the_model_inside, {}),
}
UNEVEN_FLAT = {
    **UNEVEN,
    "buffers": (Normed, uneven_loop, {"broadcast_buffers": True}),
    "unused everywhere": (WithUnused, uneven_loop, {}),
}


def join_with_every_method() -> dict[str, dict[str, dict[str, Tensor]]]:
    dist.init_process_group("gloo", timeout=DEADLINE)
    rank = dist.get_rank()
    steps = [4, 2, 3][rank]
    found: dict[str, dict[str, dict[str, Tensor]]] = {"torch": {}}
    for name, (make, loop, options) in UNEVEN_FLAT.items():
        if name != "evaluation inside":  # torch's own class crashes there; it should change nothing
            given = {
                "forward_sync_buffers": "broadcast_buffers" in options,
                "find_unused_parameters": make is WithUnused,
            }
            found["torch"][name] = loop(DistributedDataParallel(same_start(make), **given), rank, steps)
    found["torch"]["evaluation inside"] = found["torch"]["plain"]
    for method in OURS:
        cases = UNEVEN_FLAT if method in ("bucketed", "shared-memory") else UNEVEN
        found[method] = {}
        for name, (make, loop, options) in cases.items():
            wrapped = syncline.DataParallel(same_start(make), method, deadline_s=DEADLINE.total_seconds(), **options)
            found[method][name] = loop(wrapped, rank, steps)
    wrapped = syncline.DataParallel(same_start(Net), "ddp")
    found["ddp"] = {"plain": uneven_loop(wrapped, rank, steps)}
    return found


@pytest.fixture(scope="module")
def results_of_join() -> list[dict[str, dict[str, dict[str, Tensor]]]]:
    return syncline.launch(join_with_every_method, workers=3, threads=1)


@pytest.mark.parametrize("method", NEED_NO_OPTIMIZER)
def test_join_gives_what_torch_s_join_gives(
    method: str, results_of_join: list[dict[str, dict[str, dict[str, Tensor]]]]
) -> None:
    first, *others = results_of_join
    assert first[method].keys() >= {"plain"}
    for name, found in first[method].items():
        torch.testing.assert_close(found, first["torch"][name], **CLOSE, msg=lambda text, n=name: f"{n}: {text}")
        for other in others:
            assert_same(other[method][name], found)


# torch's communication hooks.


def with_hook(method: str, rank: int, hook: str) -> list[dict[str, Tensor]]:
    model = integer_model("mlp")
    wrapped = syncline.DataParallel(model, method, bucket_cap_mb=0.0005)
    if hook == "powerSGD":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        wrapped.register_comm_hook(None, getattr(default_hooks, hook))
    found = []
    for _ in range(5):
        model.zero_grad()
        integer_loss(wrapped, rank).backward()
        found.append(gradients(model))
    wrapped.close()
    return found


HOOKS = ["allreduce_hook", "fp16_compress_hook", "powerSGD"]


def every_hook() -> dict[tuple[str, str], list[dict[str, Tensor]]]:
    dist.init_process_group("gloo", timeout=DEADLINE)
    pairs = [(method, hook) for method in ("bucketed", "ddp") for hook in HOOKS]
    return {(method, hook): with_hook(method, dist.get_rank(), hook) for method, hook in pairs}


def test_torch_s_communication_hooks_average_our_buckets() -> None:
    first, second = syncline.launch(every_hook, workers=2, threads=1)
    expected = expected_mean("mlp", 2)
    for (method, hook), turns in first.items():
        for turn, (one, other) in enumerate(zip(turns, second[method, hook], strict=True)):
            assert_same(one, other)
            if hook == "allreduce_hook":
                assert_same(one, expected)
            elif hook == "fp16_compress_hook":
                torch.testing.assert_close(one, expected, rtol=1e-2, atol=1)
            elif turn >= 2:
                assert any(not torch.equal(one[key], expected[key]) for key in expected), "nothing was compressed"


def test_hook_is_for_methods_with_buckets_and_only_one() -> None:
    bucketed = syncline.DataParallel(nn.Linear(2, 2), "bucketed")
    bucketed.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(PlanError, match="already"):
        bucketed.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(PlanError, match="has no buckets"):
        syncline.DataParallel(nn.Linear(2, 2), "all-reduce").register_comm_hook(None, default_hooks.allreduce_hook)


# Groups and launchers.


def subgroup_and_choices() -> dict[str, Any]:
    dist.init_process_group("gloo", timeout=DEADLINE)
    group = dist.new_group([0, 2])
    rank = dist.get_rank()
    chosen = syncline.DataParallel(integer_model("mlp"))
    found: dict[str, Any] = {"auto": (chosen.method, chosen.reason, chosen.describe().splitlines())}
    found["disagree"] = disagreement(rank)
    if rank != 1:
        for method in NEED_NO_OPTIMIZER:
            model = integer_model("mlp")
            wrapped = syncline.DataParallel(model, method, process_group=group)
            assert (wrapped.rank, wrapped.world_size) == (rank // 2, 2)
            integer_loss(wrapped, wrapped.rank).backward()
            found[method] = gradients(model)
            wrapped.close()
        dist.all_reduce(torch.ones(1), group=group)  # the group is still the user's
    return found


def disagreement(rank: int) -> str:
    """A branch that one rank alone uses: an error that names it, in the middle of the user's own backward."""
    model = same_start(lambda: Net("tuple"))
    wrapped = syncline.DataParallel(model, "bucketed")
    main, side = wrapped(batch(rank, 0))
    with pytest.raises(ContractError) as error:
        (main.sum() + side.sum() if rank == 1 else main.sum()).backward()
    return error.value.message


def test_subgroup_is_adopted_and_auto_chooses_shared_memory(capfd: pytest.CaptureFixture[str]) -> None:
    first, absent, third = syncline.launch(subgroup_and_choices, workers=3, threads=1)
    for method in NEED_NO_OPTIMIZER:
        assert_same(first[method], expected_mean("mlp", 2))
        assert_same(third[method], expected_mean("mlp", 2))
    for found in (first, absent, third):
        method, reason, lines = found["auto"]
        assert (method, reason) == ("shared-memory", "all ranks are on one host")
        assert lines[0] == "method shared-memory: all ranks are on one host"
        assert lines[1].startswith("bucket 0: ")
        assert found["disagree"] == "parameter side.weight has a gradient on some ranks, but not on 0, 2."
    assert capfd.readouterr().err.count("syncline: method shared-memory: all ranks are on one host") == 1


def spawned(rank: int, folder: str, partial_environment: bool) -> None:
    """As in many a script: the group is made by hand, and only some of a launcher's variables are set."""
    if partial_environment:
        os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=DEADLINE)
    model = integer_model("mlp")
    integer_loss(syncline.DataParallel(model), rank).backward()
    torch.save(gradients(model), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_works_under_mp_spawn_with_a_group_made_by_hand(tmp_path: Path) -> None:
    mp.spawn(spawned, (str(tmp_path), True), nprocs=2)
    for rank in range(2):
        assert_same(torch.load(tmp_path / f"{rank}.pt"), expected_mean("mlp", 2))
