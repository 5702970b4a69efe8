"""DataParallel in DDP's place: each keyword of torch's class, `join`, communication hooks.

Ranks are threads, whose communicator takes the place of the one that a launcher would give.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import NEED_NO_OPTIMIZER, ON_THREADS, on_threads
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import syncline
from syncline import world
from syncline.errors import ContractError, PlanError, SynclineError
from syncline.plan import Plan
from syncline.resolve import resolve
from syncline.spans import EventLog
from syncline.torch_keywords import REFUSED, group_of, on_device

FLAT = ["bucketed", "ring", "shared-memory"]
AFTER_BACKWARD = ["shared-memory", "all-reduce"]
METHODS = [method for method in ON_THREADS if method in NEED_NO_OPTIMIZER]
here = threading.local()


@pytest.fixture(autouse=True)
def ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = world.meet
    monkeypatch.setattr(world, "meet", lambda *given: here.backend if hasattr(here, "backend") else alone(*given))


def on_ranks(world_size: int, live: Callable[[int], Any]) -> list[Any]:
    """live(rank) on every rank, by rank."""

    def inside(comm: Any, _: EventLog) -> Any:
        here.backend = comm.backend
        return live(comm.rank)

    return on_threads(world_size, inside)


def net(rank: int = 0) -> nn.Sequential:
    """Whole numbers, so that means over 2 ranks are exact; another start on each rank if so asked."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) + number + 10 * rank)
    return model


def inputs(rank: int, step: int = 0) -> Tensor:
    return torch.tensor([[2.0 * rank + 2, 4.0 + 2 * step]])


def mean_gradients(ranks: list[int], *, divisor: int | None = None, step: int = 0) -> list[Tensor]:
    model = net()
    for rank in ranks:
        model(inputs(rank, step)).sum().backward()
    return [p.grad / (divisor or len(ranks)) for p in model.parameters() if p.grad is not None]


def grads(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def equal(found: list[Tensor | None], expected: list[Tensor]) -> bool:
    return all(a is not None and torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# The list of keywords.

NEAR_TORCH_S_DEFAULTS: dict[str, Any] = {
    "device_ids": None,
    "output_device": None,
    "dim": 0,
    "broadcast_buffers": True,
    "init_sync": True,
    "process_group": None,
    "bucket_cap_mb": 25,
    "find_unused_parameters": True,
    "check_reduction": True,
    "gradient_as_bucket_view": True,
    "static_graph": True,
    "delay_all_reduce_named_params": None,
    "param_to_hook_all_reduce": None,
    "mixed_precision": None,
    "device_mesh": None,
    "skip_all_reduce_unused_params": True,
    "bucket_cap_mb_list": [1, 2],
    "batched_grad_copy": True,
    "forward_sync_buffers": True,
}


FOR_BUCKETS = ("bucket_cap_mb", "bucket_cap_mb_list")


@pytest.mark.parametrize(
    ("name", "method"),
    [(name, method) for name in NEAR_TORCH_S_DEFAULTS for method in ("auto", "bucketed")]
    + [(name, method) for name in NEAR_TORCH_S_DEFAULTS if name not in FOR_BUCKETS for method in AFTER_BACKWARD],
)
def test_keyword_near_torch_s_default_changes_no_mean(name: str, method: str) -> None:
    def live(rank: int) -> list[Tensor | None]:
        wrapped = syncline.DataParallel(net(), method, **{name: NEAR_TORCH_S_DEFAULTS[name]})
        wrapped(inputs(rank)).sum().backward()
        return grads(wrapped)

    for found in on_ranks(2, live):
        assert equal(found, mean_gradients([0, 1]))


def test_no_keyword_of_torch_s_class_is_forgotten() -> None:
    torch_s = set(inspect.signature(DistributedDataParallel.__init__).parameters) - {"self", "module"}
    assert torch_s - NEAR_TORCH_S_DEFAULTS.keys() == set()


@pytest.mark.parametrize("name", REFUSED)
def test_keyword_that_is_not_supported_is_refused_by_name(name: str) -> None:
    with pytest.raises(PlanError, match=f"does not accept {name}: use "):
        syncline.DataParallel(net(), "bucketed", **{name: object()})


def test_positions_after_the_second_are_torch_s() -> None:
    torch_s = list(inspect.signature(DistributedDataParallel.__init__).parameters)[3:9]
    ours = list(inspect.signature(syncline.DataParallel.__init__).parameters)[3:9]
    assert ours == torch_s


@pytest.mark.parametrize("given", [([0],), (None,), ([], None, 0), ([torch.device("cpu")], 0, 0, False)])
def test_list_or_nothing_in_the_method_s_place_is_device_ids(given: tuple[Any, ...]) -> None:
    wrapped = syncline.DataParallel(net(), *given)
    assert (wrapped.method, wrapped.device_ids, wrapped.output_device) == ("single", None, None)
    assert wrapped.broadcast_buffers is (len(given) < 4)


def test_devices_are_those_of_the_module() -> None:
    model = nn.Linear(2, 2, device="meta")
    assert syncline.DataParallel(model, device_ids=[torch.device("meta")]).device_ids == [None]
    with pytest.raises(PlanError, match="output_device says cpu, but the module is on meta"):
        syncline.DataParallel(model, output_device=torch.device("cpu"))
    moved = on_device(((torch.ones(1), 3), {"x": [torch.ones(2)]}), torch.device("meta"))
    assert (moved[0][0].device.type, moved[0][1], moved[1]["x"][0].device.type) == ("meta", 3, "meta")


def test_delayed_parameters_need_both_keywords_and_are_averaged_as_all_others() -> None:
    model = net()
    with pytest.raises(PlanError, match="go together"):
        syncline.DataParallel(model, "bucketed", delay_all_reduce_named_params=[("0.weight", model[0].weight)])

    def live(rank: int) -> list[Tensor | None]:
        model = net()
        wrapped = syncline.DataParallel(
            model, "bucketed", delay_all_reduce_named_params=[("0.weight", model[0].weight)],
            param_to_hook_all_reduce=model[1].weight,
        )  # fmt: skip
        wrapped(inputs(rank)).sum().backward()
        return grads(wrapped)

    assert all(equal(found, mean_gradients([0, 1])) for found in on_ranks(2, live))


def test_mesh_has_one_dimension_and_no_group_beside_it() -> None:
    class Mesh:
        ndim = 2

    with pytest.raises(PlanError, match="Only 1D"):
        group_of(None, Mesh())  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="both process_group and device_mesh"):
        group_of(object(), Mesh())  # type: ignore[arg-type]


def test_auto_takes_a_bucket_size_in_plans_too() -> None:
    plan = Plan(method="auto", workers=2, data="synthetic", options={"bucket_cap_mb": 3.0})
    here, _ = resolve(plan, ranks_per_host=2)
    assert (here.method, here.options.bucket_cap_mb) == ("shared-memory", None)
    apart, _ = resolve(plan, ranks_per_host=1, num_hosts=2)
    assert (apart.method, apart.options.bucket_cap_mb) == ("bucketed", 3.0)


def test_errors_are_caught_by_scripts_that_catch_torch_s() -> None:
    assert issubclass(SynclineError, RuntimeError)


# The start and buffers.


class WithBuffers(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.inner = net(rank)
        self.register_buffer("shift", torch.full((2,), float(rank)))
        self.register_buffer("scale", torch.full((3,), float(rank)))
        self.register_buffer("seen", torch.tensor(rank))

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.inner(values + self.get_buffer("shift"))
        return result


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("keywords", "weights_differ", "buffers_differ"),
    [
        ({}, False, False),
        ({"init_sync": False}, True, True),
        ({"broadcast_buffers": False}, False, True),
        ({"forward_sync_buffers": False}, False, False),
        ({"broadcast_buffers": False, "forward_sync_buffers": True}, False, False),
    ],
)
def test_start_is_rank_0_s_unless_said(
    method: str, keywords: dict[str, bool], weights_differ: bool, buffers_differ: bool
) -> None:
    def live(rank: int) -> tuple[float, float]:
        model = WithBuffers(rank)
        syncline.DataParallel(model, method, **keywords)
        return model.inner[0].weight[0, 0].item(), model.shift[0].item()  # type: ignore[index]

    first, second = on_ranks(2, live)
    assert (first[0] != second[0], first[1] != second[1]) == (weights_differ, buffers_differ)


@pytest.mark.parametrize("method", ["bucketed", "all-reduce"])
def test_buffers_are_rank_0_s_before_each_forward_in_one_message_for_each_dtype(method: str) -> None:
    def live(rank: int) -> tuple[list[float], list[str]]:
        model, log = WithBuffers(rank), EventLog(rank=rank, world_size=2)
        wrapped = syncline.DataParallel(model, method, log=log)
        found = []
        for on in (True, False):
            model.shift.fill_(10.0 + rank)
            wrapped.broadcast_buffers = on
            wrapped(inputs(rank)).sum().backward()
            found.append(model.shift[0].item())  # type: ignore[index]
        assert wrapped.forward_sync_buffers is False
        labels = [record["label"] for record in log.records if record.get("label", "").startswith("buffers")]
        return found, labels

    first, second = on_ranks(2, live)
    assert (first[0], second[0]) == ([10.0, 10.0], [10.0, 11.0])
    assert first[1] == ["buffers of float32", "buffers of int64"]


def test_rank_0_alone_may_evaluate_though_buffers_are_shared() -> None:
    def live(rank: int) -> list[Tensor | None]:
        wrapped = syncline.DataParallel(WithBuffers(0), "bucketed")
        wrapped(inputs(rank)).sum().backward()
        if rank == 0:
            with torch.no_grad():
                wrapped(inputs(rank))
            wrapped.eval()
            wrapped.module(inputs(rank))
            wrapped.train()
        wrapped.zero_grad()
        wrapped(inputs(rank)).sum().backward()
        return grads(wrapped)

    first, second = on_ranks(2, live)
    assert equal(first, second)  # type: ignore[arg-type]


def test_buffers_kept_by_a_forward_may_be_shared_before_its_backward() -> None:
    """Two forwards, then their backwards: the second forward's broadcast must not count as a change in place."""

    class Keeps(WithBuffers):
        def forward(self, values: Tensor) -> Tensor:
            return super().forward(values * self.get_buffer("scale")[:1])

    def live(rank: int) -> bool:
        wrapped = syncline.DataParallel(Keeps(rank + 1), "bucketed")
        (wrapped(inputs(rank)).sum() + wrapped(inputs(rank)).sum()).backward()
        return wrapped.module.inner[0].weight.grad is not None  # type: ignore[index, union-attr]

    assert on_ranks(2, live) == [True, True]


# Attributes that scripts set.


@pytest.mark.parametrize("method", METHODS)
def test_require_backward_grad_sync_is_no_sync(method: str) -> None:
    def live(rank: int) -> list[list[Tensor | None]]:
        wrapped = syncline.DataParallel(net(), method)
        found = []
        for last in (False, True):
            wrapped.require_backward_grad_sync = last
            wrapped(inputs(rank)).sum().backward()
            found.append(grads(wrapped))
        with wrapped.no_sync():
            assert not wrapped.require_backward_grad_sync
        assert wrapped.require_backward_grad_sync
        return found

    for rank, (local, averaged) in enumerate(on_ranks(2, live)):
        assert equal(local, mean_gradients([rank]))
        assert equal(averaged, mean_gradients([0, 1, 0, 1], divisor=2))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.side, self.never = nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, values: Tensor, with_side: bool) -> Tensor:
        result: Tensor = self.used(values) + (self.side(values) if with_side else 0)
        return result


@pytest.mark.parametrize("how", ["keyword", "attribute", "static_graph"])
@pytest.mark.parametrize("method", METHODS)
def test_find_unused_parameters_with_every_method(method: str, how: str) -> None:
    def live(rank: int) -> list[Any]:
        model = Branches()
        keywords = {how: True} if how == "static_graph" else {"find_unused_parameters": how == "keyword"}
        wrapped = syncline.DataParallel(model, method, **keywords)
        wrapped.find_unused_parameters = True
        for _ in range(2):
            model.zero_grad()
            wrapped(inputs(rank), rank == 1).sum().backward()
        return [model.side.weight.grad, model.never.weight.grad]

    for side, never in on_ranks(2, live):
        assert side.tolist() == [[2.0, 2.0]]  # rank 1's 4, 4 and nothing
        assert never is None


# A static graph.


class TwiceCheckpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        with torch.no_grad():
            self.inner.weight.copy_(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
            self.inner.bias.zero_()

    def forward(self, values: Tensor, times: int = 2) -> Tensor:
        values = values.clone().requires_grad_()
        for _ in range(times):
            values = checkpoint(self.inner, values, use_reentrant=True)  # type: ignore[assignment]
        return values


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", ["keyword", "private name"])
def test_static_graph_allows_reentrant_checkpointing_of_a_layer_used_twice(method: str, how: str) -> None:
    def live(rank: int) -> list[list[Tensor | None]]:
        wrapped = syncline.DataParallel(TwiceCheckpointed(), method, static_graph=how == "keyword")
        if how == "private name":
            wrapped._set_static_graph()
        found = []
        for step in range(3):
            wrapped.zero_grad()
            wrapped(inputs(rank, step)).sum().backward()
            found.append(grads(wrapped))
        return found

    for found in on_ranks(2, live):
        for step, one in enumerate(found):
            model = TwiceCheckpointed()
            for rank in range(2):
                (model(inputs(rank, step)).sum() / 2).backward()
            assert equal(one, [p.grad for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("method", FLAT)
def test_layer_used_twice_without_a_static_graph_is_an_error_that_names_it(method: str) -> None:
    def live(rank: int) -> str:
        wrapped = syncline.DataParallel(TwiceCheckpointed(), method)
        with pytest.raises(ContractError) as error:
            wrapped(inputs(rank)).sum().backward()
        return str(error.value)

    for words in on_ranks(2, live):
        assert "inner." in words
        assert "static_graph=True" in words


def test_graph_that_is_not_static_after_all_is_an_error() -> None:
    def live(rank: int) -> str:
        wrapped = syncline.DataParallel(TwiceCheckpointed(), "bucketed", static_graph=True)
        wrapped(inputs(rank)).sum().backward()
        with pytest.raises(ContractError) as error:
            wrapped(inputs(rank), 3).sum().backward()
        return str(error.value)

    assert all("ready twice" in words for words in on_ranks(2, live))


# Uneven inputs.


def uneven(wrapped: syncline.DataParallel, rank: int, steps: int, **keywords: Any) -> Iterator[list[Tensor | None]]:
    with wrapped.join(**keywords):
        for step in range(steps):
            wrapped.zero_grad()
            wrapped(inputs(rank, step)).sum().backward()
            yield grads(wrapped)
        wrapped.zero_grad()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("by_world_size", [True, False])
def test_join_divides_by_the_world_or_by_those_that_have_a_batch(method: str, by_world_size: bool) -> None:
    def live(rank: int) -> tuple[list[list[Tensor | None]], list[Tensor | None]]:
        wrapped = syncline.DataParallel(net(), method)
        steps = 1 if rank == 0 else 2
        return list(uneven(wrapped, rank, steps, divide_by_initial_world_size=by_world_size)), grads(wrapped)

    (first, left), (second, _) = on_ranks(2, live)
    assert equal(first[0], mean_gradients([0, 1]))
    assert equal(second[0], mean_gradients([0, 1]))
    assert equal(second[1], mean_gradients([1], divisor=2 if by_world_size else 1, step=1))
    assert left == [None] * 4, "what others averaged must not be added to this rank's next gradients"


def test_join_that_is_not_enabled_does_nothing() -> None:
    def live(rank: int) -> list[list[Tensor | None]]:
        return list(uneven(syncline.DataParallel(net(), "bucketed"), rank, 2, enable=False))

    for found in on_ranks(2, live):
        assert equal(found[1], mean_gradients([0, 1], step=1))


@pytest.mark.parametrize("method", ["bucketed", "all-reduce"])
def test_join_may_throw_on_all_ranks_as_soon_as_one_is_done(method: str) -> None:
    def live(rank: int) -> str:
        wrapped = syncline.DataParallel(net(), method)
        with pytest.raises(RuntimeError) as error:
            list(uneven(wrapped, rank, 1 + rank, throw_on_early_termination=True))
        return str(error.value)

    first, second = on_ranks(2, live)
    assert first == "Rank 0 exhausted all inputs."
    assert second == "Detected at least one rank that exhausted inputs. Throwing across all ranks."


def test_join_shadows_forwards_that_only_accumulate() -> None:
    def live(rank: int) -> list[Tensor | None]:
        wrapped = syncline.DataParallel(net(), "bucketed")
        with wrapped.join():
            for step in range(1 + rank):
                wrapped.zero_grad()
                with wrapped.no_sync():
                    wrapped(inputs(rank, step)).sum().backward()
                wrapped(inputs(rank, step)).sum().backward()
        return grads(wrapped)

    _, second = on_ranks(2, live)
    assert equal(second, mean_gradients([1, 1], divisor=2, step=1))


# Communication hooks.


def doubled(_: object, bucket: Any) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer() * 2)
    return future


@pytest.mark.parametrize(("method", "world_size"), [("auto", 2), ("bucketed", 2), ("auto", 1), ("bucketed", 1)])
def test_hook_averages_with_auto_and_alone_too(method: str, world_size: int) -> None:
    def live(rank: int) -> list[list[Tensor | None]]:
        wrapped = syncline.DataParallel(net(), method, bucket_cap_mb=1)
        wrapped.register_comm_hook(None, doubled)
        assert wrapped.method == "bucketed"
        found = []
        for _ in range(2):
            wrapped.zero_grad()
            wrapped(inputs(rank)).sum().backward()
            found.append(grads(wrapped))
        return found

    for rank, found in enumerate(on_ranks(world_size, live)):
        for one in found:
            assert equal(one, [2 * gradient for gradient in mean_gradients([rank])])


def annotated_bucket(state: object, bucket: int) -> torch.futures.Future[Tensor]:
    raise NotImplementedError


def annotated_result(state: object, bucket: Any) -> int:
    raise NotImplementedError


annotated_bucket.__annotations__ = {"bucket": int}
annotated_result.__annotations__ = {"return": int}


@pytest.mark.parametrize(
    ("hook", "error", "words"),
    [
        ({}, TypeError, "must be callable"),
        (annotated_bucket, ValueError, "bucket annotation should be dist.GradBucket"),
        (annotated_result, ValueError, "return annotation should be torch.futures.Future"),
    ],
)
def test_what_is_no_hook_is_refused_and_noted(hook: Any, error: type[Exception], words: str) -> None:
    wrapped = syncline.DataParallel(net(), "bucketed")
    with pytest.raises(error, match=words):
        wrapped.register_comm_hook(None, hook)
    assert words in wrapped._get_ddp_logging_data()["error"]


def test_hook_that_returns_no_future_is_an_error() -> None:
    wrapped = syncline.DataParallel(net(), "bucketed")
    wrapped.register_comm_hook(None, lambda _, bucket: 1)  # type: ignore[arg-type, return-value]
    with pytest.raises(PlanError, match=r"must return a torch\.futures\.Future object, but got int"):
        wrapped(inputs(0)).sum().backward()


def test_one_hook_only_and_only_where_there_are_buckets() -> None:
    wrapped = syncline.DataParallel(net(), "bucketed")
    wrapped.register_comm_hook(None, doubled)
    with pytest.raises(PlanError, match="can only be called once"):
        wrapped.register_comm_hook(None, doubled)
    with pytest.raises(PlanError, match="has no buckets"):
        syncline.DataParallel(net(), "all-reduce").register_comm_hook(None, doubled)
