"""DataParallel in DDP's place: attributes and private names of torch's class that public code uses; what is refused.

Most ranks are threads, as in test_ddp_keywords.py; torch's own `Join`, groups and hooks need one launch of processes.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_ddp_keywords import (  # noqa: F401  (a fixture)
    METHODS,
    Branches,
    TwiceCheckpointed,
    WithBuffers,
    equal,
    grads,
    inputs,
    mean_gradients,
    net,
    on_ranks,
    ranks_are_threads,
)
from torch import Tensor, nn
from torch.distributed.algorithms import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, about torch.jit
    from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward

import syncline
from syncline.drop_in import REFUSED_NAMES
from syncline.errors import PlanError, UsageError

# What is not there.


@pytest.mark.parametrize("name", [name for name in REFUSED_NAMES if name != "bucket_bytes_cap"])
def test_name_that_is_not_supported_is_refused_with_what_to_do(name: str) -> None:
    wrapped = syncline.DataParallel(net(), "bucketed")
    assert not hasattr(wrapped, name)
    with pytest.raises(AttributeError, match=f"syncline.DataParallel has no {name}: ") as error:
        getattr(wrapped, name)
    assert str(error.value).endswith(".")


def test_name_that_torch_does_not_have_either_is_refused_as_by_any_module() -> None:
    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        _ = syncline.DataParallel(net(), "bucketed").colour


def test_no_name_of_torch_s_class_is_forgotten() -> None:
    """Every name of torch's own is there, or refused, or of its inner workings."""
    inner = {
        "_active_ddp_module", "_assign_modules_buffers", "_check_and_sync_module_buffers", "_check_comm_hook",
        "_check_default_group", "_check_global_requires_backward_grad_sync", "_check_sync_bufs_post_fwd",
        "_check_sync_bufs_pre_fwd", "_clear_grad_buffer", "_delayed_all_reduce_hook", "_find_common_rank",
        "_fire_reducer_autograd_hook", "_get_active_ddp_module", "_get_parameters", "_inside_ddp_forward",
        "_lazy_init", "_log_and_throw", "_match_all_reduce_for_bwd_pass", "_match_unused_params_allreduce",
        "_module_wait_for_copy_hook", "_passing_sync_batchnorm_handle", "_post_forward", "_pre_forward",
        "_register_accum_grad_hook", "_register_delay_all_reduce_hook", "_root_copy_hook", "_run_ddp_forward",
        "_setup_in_backward_optimizers", "_sync_final_model", "_sync_module_buffers", "to_kwargs",
    }  # fmt: skip
    names = set(vars(DistributedDataParallel)) - set(vars(nn.Module)) - {"__orig_bases__", "__parameters__"}
    missing = {name for name in names if not hasattr(syncline.DataParallel, name)}
    assert missing - REFUSED_NAMES.keys() - inner == set()


def test_methods_without_buckets_have_no_bucket_size() -> None:
    assert syncline.DataParallel(net(), "bucketed", bucket_cap_mb=2).bucket_bytes_cap == 2 * 2**20
    with pytest.raises(AttributeError, match="its method has no buckets"):
        _ = syncline.DataParallel(net(), "all-reduce").bucket_bytes_cap


# Parameters and buffers that stay each rank's own.


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", ["class", "attribute"])
def test_ignored_parameters_and_buffers_stay_each_rank_s_own(method: str, how: str) -> None:
    names = ["inner.1.weight", "shift"]

    def live(rank: int) -> Any:
        model = WithBuffers(rank)
        if how == "class":
            syncline.DataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        else:
            model._ddp_params_and_buffers_to_ignore = names
        wrapped = syncline.DataParallel(model, method)
        wrapped(inputs(rank)).sum().backward()
        with torch.no_grad():
            hidden = model.inner[0](inputs(rank) + model.shift)
        own = model.inner[1].weight.grad
        kept = len(list(syncline.DataParallel._get_data_parallel_params(model)))
        return own, hidden, model.shift[0].item(), model.seen.item(), model.inner[1].bias.grad, kept, wrapped

    for rank, (own, hidden, shift, seen, bias, kept, wrapped) in enumerate(on_ranks(2, live)):
        assert torch.equal(own, hidden), "the gradient of this rank alone"
        assert (shift, seen, bias.item()) == (rank, 0, 1.0)
        assert kept == (3 if how == "class" else 4)
        assert wrapped.parameters_to_ignore == set(names)
        assert list(wrapped.named_module_buffers) == ["scale", "seen"]


# The reducer.


@pytest.mark.parametrize("method", METHODS)
def test_backward_of_a_forward_inside_no_sync_is_averaged_if_the_reducer_was_told(method: str) -> None:
    """As accelerate's trigger_sync_in_backward and Lightning's manual optimisation do."""

    def live(rank: int) -> list[Tensor | None]:
        wrapped = syncline.DataParallel(net(), method)
        assert wrapped.reducer._rebuild_buckets() is False
        with wrapped.no_sync():
            loss = wrapped(inputs(rank)).sum()
        wrapped.reducer.prepare_for_backward([])
        loss.backward()
        return grads(wrapped)

    assert all(equal(found, mean_gradients([0, 1])) for found in on_ranks(2, live))


def test_reducer_has_nothing_else() -> None:
    with pytest.raises(AttributeError, match=r"no reducer\._get_local_used_map"):
        syncline.DataParallel(net(), "bucketed").reducer._get_local_used_map()


# State.


@pytest.mark.parametrize("name", ["_sync_params_and_buffers", "_sync_params"])
def test_state_of_one_rank_on_all(name: str) -> None:
    def live(rank: int) -> tuple[float, float]:
        model = WithBuffers(rank)
        wrapped = syncline.DataParallel(model, "bucketed", init_sync=False)
        getattr(wrapped, name)(1)
        return model.inner[0].weight[0, 0].item(), model.shift[0].item()  # type: ignore[index]

    first, second = on_ranks(2, live)
    assert first == second == (10.0, 1.0)


def test_buffers_of_rank_0_on_all() -> None:
    def live(rank: int) -> tuple[float, float]:
        model = WithBuffers(rank)
        wrapped = syncline.DataParallel(model, "bucketed", init_sync=False)
        assert wrapped.will_sync_module_buffers()
        wrapped._sync_buffers()
        return model.inner[0].weight[0, 0].item(), model.shift[0].item()  # type: ignore[index]

    assert on_ranks(2, live) == [(0.0, 0.0), (10.0, 0.0)]


@pytest.mark.parametrize("where", list(_BufferCommHookLocation))
@pytest.mark.parametrize("later", [False, True])
def test_buffer_hook_shares_buffers_in_rank_0_s_place(where: _BufferCommHookLocation, later: bool) -> None:
    def live(rank: int) -> list[float]:
        model, waited = WithBuffers(rank), []

        class Waits(torch.futures.Future):  # type: ignore[type-arg]
            def wait(self) -> None:
                waited.append(1)

        def hook(state: object, named: dict[str, Tensor]) -> Any:
            assert state == "mine"
            assert named["seen"] is model.seen
            named["seen"] += 10
            return [Waits()] if later else None

        wrapped = syncline.DataParallel(model, "bucketed", init_sync=False)
        wrapped._register_buffer_comm_hook("mine", hook, where)
        wrapped(inputs(rank)).sum().backward()
        with wrapped.no_sync():
            wrapped(inputs(rank))
        wrapped.eval()
        wrapped(inputs(rank))
        return [model.seen.item(), model.shift[0].item(), len(waited)]  # type: ignore[index]

    assert on_ranks(2, live) == [[10, 0.0, later], [11, 1.0, later]]
    with pytest.raises(TypeError, match="must be callable"):
        syncline.DataParallel(net(), "bucketed")._register_buffer_comm_hook(None, 3)  # type: ignore[arg-type]


def test_removed_hooks_leave_the_module_to_the_next_wrapper() -> None:
    def live(rank: int) -> list[list[Tensor | None]]:
        model = net()
        first = syncline.DataParallel(model, "bucketed")
        first._remove_autograd_hooks()
        first(inputs(rank)).sum().backward()
        local = grads(model)
        model.zero_grad()
        syncline.DataParallel(model, "bucketed")(inputs(rank)).sum().backward()
        return [local, grads(model)]

    for rank, (local, averaged) in enumerate(on_ranks(2, live)):
        assert equal(local, mean_gradients([rank]))
        assert equal(averaged, mean_gradients([0, 1]))


# What is known of the wrapper.


def test_logging_data_says_what_is_known_under_torch_s_keys() -> None:
    def live(rank: int) -> dict[str, Any]:
        wrapped = syncline.DataParallel(WithBuffers(rank), "bucketed", bucket_cap_mb=3)
        wrapped(inputs(rank)).sum().backward()
        known: dict[str, Any] = wrapped._get_ddp_logging_data()
        return known

    known = on_ranks(2, live)[1]
    assert (known["world_size"], known["rank"], known["iteration"]) == (2, 1, 1)
    assert (known["module_name"], known["dtypes"], known["output_device"]) == ("WithBuffers", "float32", -1)
    assert (known["num_parameter_tensors"], known["total_parameter_size_bytes"]) == (4, 13 * 4)
    assert (known["bucket_cap_bytes"], known["bucket_sizes"]) == (3 * 2**20, str(13 * 4))
    assert (known["broadcast_buffers"], known["static_graph"], known["has_rebuilt_buckets"]) == (1, 0, 1)
    assert known["can_set_static_graph"] == 1
    assert not {"comm_hook", "error"} & known.keys()


@pytest.mark.parametrize("method", ["bucketed", "all-reduce", "gather-scatter"])
def test_graph_whose_unused_parameters_change_cannot_be_static(method: str) -> None:
    def live(rank: int) -> list[int]:
        found = []
        for changes in (False, True):
            wrapped = syncline.DataParallel(Branches(), method, find_unused_parameters=True)
            for step in range(3):
                wrapped.zero_grad()
                wrapped(inputs(rank), changes and step == 1).sum().backward()
            found.append(wrapped._get_ddp_logging_data()["can_set_static_graph"])
            assert wrapped.reducer._ddp_graph_static() == bool(found[-1])
        return found

    assert on_ranks(2, live) == [[1, 0], [1, 0]]


def test_static_graph_is_set_before_training() -> None:
    wrapped = syncline.DataParallel(TwiceCheckpointed(), "bucketed")
    wrapped.register_comm_hook(None, lambda _, bucket: _done(bucket.buffer()))  # averages also in a world of one
    wrapped._set_static_graph()
    assert wrapped.static_graph
    wrapped(inputs(0)).sum().backward()
    with pytest.raises(UsageError, match="before training loop starts"):
        wrapped._set_static_graph()
    assert wrapped._get_ddp_logging_data()["has_error"] == 1


def _done(values: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(values)
    return future


# Optimizers inside backward.


@pytest.mark.parametrize("method", METHODS)
def test_optimizer_inside_backward_waits_for_the_mean(method: str) -> None:
    def live(rank: int) -> list[Tensor]:
        model = net()
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1.0})
        wrapped = syncline.DataParallel(model, method)
        wrapped(inputs(rank)).sum().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        return [parameter.detach().clone() for parameter in model.parameters()]

    expected = [p - mean for p, mean in zip(net().parameters(), mean_gradients([0, 1]), strict=True)]
    for found in on_ranks(2, live):
        assert all(torch.equal(one, right) for one, right in zip(found, expected, strict=True))


# With torch.distributed: one launch.


def with_join(wrap: Any, rank: int) -> list[Tensor]:
    """ZeRO beside the model in torch's own context; rank 1 has two batches more."""
    model = wrap(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01)
    with Join([model, optimizer]):
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            model(inputs(rank, step)).sum().backward()
            optimizer.step()
    model.module(inputs(rank)).sum().backward()  # talks to nobody, also after the context
    return [parameter.detach().clone() for parameter in model.parameters()]


def join_by_itself(wrap: Any, rank: int) -> list[Tensor]:
    model = wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with model.join(divide_by_initial_world_size=False):
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            model(inputs(rank, step)).sum().backward()
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def names_of_torch(method: str, rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    wrapped = syncline.DataParallel(net(), method, device_mesh=mesh)
    wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    wrapped(inputs(rank)).sum().backward()
    known = wrapped._get_ddp_logging_data()
    wrapped.require_backward_grad_sync = False
    averaged = grads(wrapped)
    wrapped.zero_grad()
    wrapped(inputs(rank)).sum().backward()
    return {
        "group": wrapped.process_group.size(),
        "hook": known["comm_hook"],
        "backend": known["backend_name"],
        "averaged": averaged,
        "local": grads(wrapped),
    }


def in_processes() -> dict[str, Any]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: dict[str, Any] = {
        "torch": (with_join(DistributedDataParallel, rank), join_by_itself(DistributedDataParallel, rank))
    }
    for method in ("bucketed", "shared-memory", "all-reduce", "ddp"):

        def wrap(model: nn.Module, method: str = method) -> nn.Module:
            return syncline.DataParallel(model, method)

        found[method] = (with_join(wrap, rank), join_by_itself(wrap, rank))
    found["names"] = {method: names_of_torch(method, rank) for method in ("bucketed", "ddp")}
    # On one host auto is shared-memory: a hook makes it bucketed.
    auto = syncline.DataParallel(net())
    before = auto.method
    auto._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    auto(inputs(rank)).sum().backward()
    found["auto"] = (before, auto.method, auto.reason, grads(auto))
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return syncline.launch(in_processes, workers=2, threads=1, log_dir=tmp_path_factory.mktemp("logs"))


@pytest.mark.parametrize("method", ["bucketed", "shared-memory", "all-reduce", "ddp"])
def test_torch_s_join_context_gives_what_it_gives_torch_s_class(results: list[dict[str, Any]], method: str) -> None:
    for found in results:
        for ours, torch_s in zip(found[method], found["torch"], strict=True):
            torch.testing.assert_close(ours, torch_s)
            assert not equal(ours, [p.detach() for p in net().parameters()])


@pytest.mark.parametrize("method", ["bucketed", "ddp"])
def test_group_and_builtin_hooks(results: list[dict[str, Any]], method: str) -> None:
    for rank, found in enumerate(results):
        names = found["names"][method]
        assert (names["group"], names["backend"]) == (2, "gloo")
        assert names["hook"] == "BuiltinCommHookType.ALLREDUCE"
        assert equal(names["averaged"], mean_gradients([0, 1]))
        assert equal(names["local"], mean_gradients([rank]))


def test_hook_makes_auto_bucketed(results: list[dict[str, Any]]) -> None:
    for found in results:
        before, after, reason, gradients = found["auto"]
        assert (before, after) == ("shared-memory", "bucketed")
        assert reason == "a communication hook needs buckets"
        torch.testing.assert_close(gradients, mean_gradients([0, 1]), rtol=1e-2, atol=1e-2)


def test_groups_are_for_ranks_that_torch_connects() -> None:
    with pytest.raises(AttributeError, match=r"torch\.distributed does not connect its ranks"):
        _ = syncline.DataParallel(net(), "bucketed").process_group
    with pytest.raises((AttributeError, PlanError)):
        Join([syncline.DataParallel(net(), "bucketed")])
