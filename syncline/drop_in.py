"""DataParallel in DDP's place: attributes and private names of torch's class that scripts and libraries do use.

What public scripts reach for works here; the rest is refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation

from syncline.comm import Communicator
from syncline.comm.torch_backend import TorchCommunicator
from syncline.errors import UsageError
from syncline.sync.base import GradientSync, broadcast_state, share_buffers
from syncline.sync.flat import FlatSync
from syncline.sync.hooks import CommHook
from syncline.torch_keywords import check_comm_hook

MB = 1024 * 1024
REFUSED_NAMES = {
    "_ddp_init_helper": "wrap the model again instead; parameters may be frozen and unfrozen without it",
    "_build_params_for_reducer": "describe() lists the buckets and their parameters",
    "_build_debug_param_to_name_mapping": "errors name parameters without it",
    "_module_copies": "each process has one copy, `module`",
    "_register_fused_optim": "use torch.distributed.optim._apply_optimizer_in_backward, or step after backward",
    "_update_process_group": "wrap the model again with the new process_group",
    "_set_sparse_metadata": "sparse gradients are averaged without it",
    "_distributed_broadcast_coalesced": "use _sync_params_and_buffers(), or torch.distributed.broadcast",
    "_set_ddp_runtime_logging_sample_rate": "syncline.record measures every step",
    "_check_reducer_finalized": "an average that did not end raises an error by itself",
    "process_group": "torch.distributed does not connect its ranks",
    "logger": "use _get_ddp_logging_data() or syncline.record",
    "scatter": "each process uses one device",
    "gather": "each process uses one device",
    "bucket_bytes_cap": "its method has no buckets",
}
"""Names of torch's class that are not here, and what to do instead."""
IN_BACKWARD = "torch.distributed.optim.apply_optimizer_in_backward"


class DropIn(nn.Module):
    """What DataParallel has because torch's class has it."""

    module: nn.Module
    sync: GradientSync
    communicator: Communicator
    device_ids: list[int] | None
    bucket_bytes_cap_list: list[int]
    output_device: int | None
    dim: int
    static_graph: bool
    gradient_as_bucket_view: bool
    parameters_to_ignore: set[str]
    """Parameters and buffers that stay each rank's own."""
    require_forward_param_sync: bool
    """Kept for scripts that set it: buffers are shared before each forward in training that is averaged."""
    broadcast_bucket_size = 250 * MB
    """For torch's own functions that want it."""
    mixed_precision = None
    is_multi_device_module = False

    _set_params_and_buffers_to_ignore_for_model = staticmethod(
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    )
    _get_data_parallel_params = staticmethod(DistributedDataParallel._get_data_parallel_params)

    def _forget_hooks(self) -> None:
        self.device_mesh: dist.DeviceMesh | None = None
        self._accumulates = False
        self._comm_hooks: list[tuple[Callable[..., Any], object]] = []
        self._buffer_hook: tuple[object, Callable[..., Any], _BufferCommHookLocation] | None = None
        self._buffer_futures: list[torch.futures.Future[Any]] = []
        self._last_error = ""
        self._num_averages = 0
        self.require_forward_param_sync = True

    def __getattr__(self, name: str) -> Any:
        if name in REFUSED_NAMES:
            raise AttributeError(f"syncline.DataParallel has no {name}: {REFUSED_NAMES[name]}.")
        return super().__getattr__(name)

    @property
    def _torch_s(self) -> DistributedDataParallel | None:
        """With method ddp: torch's own wrapper below this one."""
        attached: Any = self._attached[0] if self._attached else None
        return attached if isinstance(attached, DistributedDataParallel) else None

    # Attributes that scripts read and set.

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the backward of the forwards to come is averaged; `no_sync` sets it for a while."""
        return not self._accumulates

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, wanted: bool) -> None:
        self._accumulates = not wanted
        self._tell_method()

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether every rank gets rank 0's buffers before each forward in training that is averaged."""
        return self._shares_buffers

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, wanted: bool) -> None:
        self._shares_buffers = bool(wanted)
        self._tell_method()

    broadcast_buffers = forward_sync_buffers
    """What older versions of torch call it."""

    @property
    def find_unused_parameters(self) -> bool:
        """Whether a parameter that only some ranks use counts as zero on the others."""
        return self._finds_unused

    @find_unused_parameters.setter
    def find_unused_parameters(self, wanted: bool) -> None:
        self._finds_unused = bool(wanted)
        self._tell_method()

    def _tell_method(self) -> None:
        """What may change while the model trains. A copy that has not met the other ranks yet tells it then."""
        if self._attached:
            self.sync.paused = self._accumulates
            self.sync.shares_buffers = self._shares_buffers and self._buffer_hook is None
            self.sync.unused = "zero" if self._finds_unused or self.static_graph else "error"
            self.sync.settings_changed()

    @property
    def process_group(self) -> dist.ProcessGroup:
        backend = self.communicator.backend
        if isinstance(backend, TorchCommunicator):
            return backend.group
        raise AttributeError  # __getattr__ says why

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def device_type(self) -> str:
        return self.device.type

    @property
    def bucket_bytes_cap(self) -> int:
        if isinstance(self.sync, FlatSync):
            return int(self.sync.bucket_cap_mb * MB)
        if self._torch_s is not None:
            return int(self._torch_s.bucket_bytes_cap)
        raise AttributeError  # __getattr__ says why

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        buffers = self.module.named_buffers()
        return {name: buffer for name, buffer in buffers if name not in self.parameters_to_ignore}

    @property
    def modules_buffers(self) -> list[Tensor]:
        return list(self.named_module_buffers.values())

    @property
    def reducer(self) -> Any:
        return Reducer(self.sync) if self._torch_s is None else self._torch_s.reducer

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return bool(self.sync.has_rebuilt)

    @property
    def _distributed_rank(self) -> int:
        return self.communicator.rank

    # Private methods.

    def will_sync_module_buffers(self) -> bool:
        return self.forward_sync_buffers and bool(self.modules_buffers)

    def _sync_params_and_buffers(self, authoritative_rank: int = 0) -> None:
        """That rank's parameters and buffers on every rank, as after loading a checkpoint on one. Collective."""
        ignored = frozenset(self.parameters_to_ignore)
        broadcast_state(self.communicator, self.module, root=authoritative_rank, ignored=ignored)

    _sync_params = _sync_params_and_buffers

    def _sync_buffers(self) -> None:
        share_buffers(self.communicator, self.modules_buffers)

    def _default_broadcast_coalesced(
        self, bufs: list[Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        share_buffers(self.communicator, self.modules_buffers if bufs is None else bufs, root=authoritative_rank)

    def _set_static_graph(self) -> None:
        if self._torch_s is not None:
            self._torch_s._set_static_graph()
        if self._num_averages:
            raise self._noted(UsageError("_set_static_graph should be called before training loop starts."))
        self.static_graph = self.sync.static_graph = True
        self._tell_method()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Nothing to choose: outputs are never copied."""

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        if self._torch_s is not None:
            self._torch_s._register_builtin_comm_hook(comm_hook_type)
            return
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # loads slowly, and few need it

        is_plain = comm_hook_type == dist.BuiltinCommHookType.ALLREDUCE
        hook = default_hooks.allreduce_hook if is_plain else default_hooks.fp16_compress_hook
        self._register_hook(self.process_group, hook, str(comm_hook_type))

    def _register_buffer_comm_hook(
        self,
        state: object,
        hook: Callable[..., Any],
        comm_hook_location: _BufferCommHookLocation = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """`hook(state, named_buffers)` shares the buffers; futures that it returns are waited for after backward."""
        if not callable(hook):
            raise self._noted(TypeError(f"hook must be callable, got {type(hook).__name__}"))
        if self._torch_s is not None:
            self._torch_s._register_buffer_comm_hook(state, hook, comm_hook_location)
            return
        self._buffer_hook = (state, hook, comm_hook_location)
        self._tell_method()

    def _remove_autograd_hooks(self) -> None:
        """From now on nothing is averaged here; the module can be wrapped again."""
        if self._torch_s is not None:
            self._torch_s._remove_autograd_hooks()
        self.sync.detach()
        self._attached = [self.module]

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """What is known of the wrapper under the keys of torch's class; times are for `syncline.record`."""
        if self._torch_s is not None:
            known: dict[str, Any] = self._torch_s._get_ddp_logging_data()
            return known
        return logging_data(self)

    # What DataParallel calls.

    def _make_buckets(self) -> None:
        """A communication hook is to be registered."""

    def _register_hook(self, state: object, hook: CommHook, name: str) -> None:
        try:
            check_comm_hook(hook)
            self._make_buckets()
            self.sync.register_comm_hook(state, hook)
        except Exception as error:
            raise self._noted(error) from None
        if self.communicator.world_size == 1:
            self._attached = [self.sync.attach(self.module)]  # else a world of one would have nothing to average
        self._comm_hooks.append((hook, state))
        self._comm_hook_name = name

    def _run_buffer_hook(self, location: _BufferCommHookLocation) -> None:
        if self._buffer_hook is None or self._buffer_hook[2] is not location:
            return
        if self.training and torch.is_grad_enabled() and self.forward_sync_buffers and not self._accumulates:
            state, hook, _ = self._buffer_hook
            self._buffer_futures += hook(state, self.named_module_buffers) or ()

    def _after_average(self) -> None:
        self._num_averages += 1
        for future in self._buffer_futures:
            future.wait()
        self._buffer_futures.clear()
        if self._optimized_in_backward:
            self.sync.synchronize()
        for parameter in self._optimized_in_backward or ():
            if parameter.grad is not None:
                for optimizer in parameter._in_backward_optimizers:
                    optimizer.step()
                parameter.grad = None

    def _take_over_optimizers(self) -> list[nn.Parameter]:
        """Optimizers that torch lets step inside backward (`_apply_optimizer_in_backward`) must wait for the mean."""
        if self._torch_s is not None:
            return []  # torch's class does so itself
        averaged = [p for name, p in self.module.named_parameters() if name not in self.parameters_to_ignore]
        optimized = [p for p in averaged if hasattr(p, "_in_backward_optimizers")]
        if optimized:
            handles = sys.modules[IN_BACKWARD].param_to_optim_hook_handle_map
            for parameter in optimized:
                for handle in handles.get(parameter, []):
                    handle.remove()
        return optimized

    def _noted(self, error: Exception) -> Exception:
        self._last_error = str(error)
        return error


class Reducer:
    """What public code does with torch's reducer."""

    def __init__(self, sync: GradientSync) -> None:
        self._sync = sync

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"syncline.DataParallel has no reducer.{name}: its methods have no reducer of torch's.")

    def _rebuild_buckets(self) -> bool:
        """Buckets are laid out anew by themselves, after the first average."""
        return False

    def prepare_for_backward(self, outputs: object) -> None:
        """The next backward is averaged, also if its forward ran inside `no_sync`."""
        self._sync.expect()

    def _ddp_graph_static(self) -> bool:
        return self._sync.graph_is_static


def logging_data(wrapper: DropIn) -> dict[str, Any]:
    trained = [p for p in wrapper.module.parameters() if p.requires_grad]
    sync, group = wrapper.sync, wrapper.communicator.backend
    known = {
        "world_size": wrapper.communicator.world_size,
        "rank": wrapper.communicator.rank,
        "iteration": wrapper._num_averages,
        "module_name": type(wrapper.module).__name__,
        "backend_name": dist.get_backend(group.group) if isinstance(group, TorchCommunicator) else "",
        "device_ids": ", ".join(map(str, wrapper.device_ids or ())),
        "output_device": -1 if wrapper.output_device is None else wrapper.output_device,
        "is_multi_device_module": 0,
        "broadcast_buffers": int(wrapper.broadcast_buffers),
        "find_unused_parameters": int(wrapper.find_unused_parameters),
        "gradient_as_bucket_view": int(wrapper.gradient_as_bucket_view),
        "static_graph": int(wrapper.static_graph),
        "num_parameter_tensors": len(trained),
        "total_parameter_size_bytes": sum(p.nbytes for p in trained),
        "dtypes": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in trained})),
        "can_set_static_graph": int(sync.graph_is_static),
        "has_rebuilt_buckets": int(wrapper._has_rebuilt_buckets),
    }
    if isinstance(sync, FlatSync):
        sizes = ", ".join(map(str, sync.bucket_sizes))
        known |= {"bucket_cap_bytes": wrapper.bucket_bytes_cap, "bucket_sizes": sizes}
    if wrapper._comm_hooks:
        known["comm_hook"] = wrapper._comm_hook_name
    if wrapper._last_error:
        known |= {"has_error": 1, "error": wrapper._last_error}
    return known
