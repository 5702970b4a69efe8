"""DataParallel: any model, any method, in a user's own script.

    model = syncline.DataParallel(model, method="bucketed")
    ...
    loss.backward()            # returns with averaged gradients, whatever the method
    optimizer.step()

Runs under torchrun, mpiexec, mp.spawn, `syncline launch script.py`, or alone. A process group that is already
initialised is adopted; otherwise the launcher's environment is followed; a process that nobody launched is a world of
one.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Never

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import _BufferCommHookLocation

from syncline import world
from syncline.comm import instrumented
from syncline.comm.shared_memory import count_hosts
from syncline.errors import PlanError
from syncline.joining import Joining
from syncline.methods import (
    METHODS,
    ON_LINKS,
    BatchNorm,
    Collective,
    Order,
    TransferDtype,
    Unused,
    current_name,
    method_of,
)
from syncline.plan import parse_plan
from syncline.resolve import choose_method, why_no_chunks
from syncline.spans import EventLog
from syncline.sync import GradientSync, make_sync
from syncline.sync.base import SameStart, in_backward, when_garbage
from syncline.sync.batch_norm import Statistics, attach, refuse_shared_channel, synchronise_batch_norm
from syncline.sync.flat import FlatSync
from syncline.sync.hooks import CommHook
from syncline.sync.late_updates import why_not
from syncline.torch_keywords import (
    Device,
    batch_norm_of,
    check_delayed,
    check_parameters,
    group_of,
    method_and_devices,
    names_to_ignore,
    on_device,
    one_device,
    refuse,
    same_start,
)
from syncline.training.step import standing_in
from syncline.weighing import Weigher


class DataParallel(Joining):
    """`module` with gradients averaged over ranks by `method`. Collective."""

    def __init__(
        self,
        module: nn.Module,
        method: str | Sequence[Device] | None = "auto",
        output_device: Device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        *,
        collective: Collective | None = None,
        transfer_dtype: TransferDtype | None = None,
        groups: int | None = None,
        overlap: bool | None = None,
        unused: Unused | None = None,
        chunk_mb: float | None = None,
        order: Order | None = None,
        barrier: bool | None = None,
        ahead: bool | None = None,
        strict: bool | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        batch_norm: BatchNorm | None = None,
        device_ids: Sequence[Device] | None = None,
        device_mesh: dist.DeviceMesh | None = None,
        forward_sync_buffers: bool | None = None,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        check_reduction: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        deadline_s: float = 120.0,
        log: EventLog | None = None,
        **refused: Never,
    ) -> None:
        """`bucket_cap_mb` and those from `collective` to `strict` are options of a plan; refuses one that the method
        does not have. Method ahead needs the `optimizer` that updates the module, and `auto` takes it only with that
        one given; other methods ignore it.

        `batch_norm` is local (statistics of the own batch), broadcast (rank 0's buffers before each forward) or
        sync (statistics over all ranks' batches). The default is broadcast, as with torch's class.

        The other keywords are those of torch's DistributedDataParallel, and a list in the method's place is its
        `device_ids`: docs/drop_in.md says what each does here."""
        super().__init__()
        method, device_ids = method_and_devices(method, device_ids)
        bucket_cap_mb = max(bucket_cap_mb_list) if bucket_cap_mb_list else bucket_cap_mb
        options = dict(
            bucket_cap_mb=bucket_cap_mb, collective=collective, transfer_dtype=transfer_dtype, groups=groups,
            overlap=overlap, chunk_mb=chunk_mb, order=order, barrier=barrier, ahead=ahead, strict=strict,
            unused=unused or ("zero" if find_unused_parameters or static_graph else None), **refuse(refused),
        )  # fmt: skip
        check_parameters(module)
        check_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce)
        self.module, self.dim, self.static_graph = module, dim, static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.device_ids, self.output_device = one_device(module, device_ids, output_device)
        self.bucket_bytes_cap_list = [int(cap * 2**20) for cap in bucket_cap_mb_list or ()]
        self.parameters_to_ignore = names_to_ignore(module)
        self.log, self._counts_steps = log or _own_log(), log is None
        batch_norm = batch_norm or batch_norm_of(broadcast_buffers, forward_sync_buffers)
        start = same_start(init_sync, broadcast_buffers, forward_sync_buffers)
        self._settings = _Settings(method, options, batch_norm, start, deadline_s)
        self._shares_buffers = batch_norm == "broadcast"
        self._finds_unused = find_unused_parameters or unused == "zero"
        self._process_group = group_of(process_group, device_mesh)
        self._forget_ranks()
        self.device_mesh = device_mesh
        self.register_state_dict_post_hook(_without_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_with_prefix)  # type: ignore[no-untyped-call]
        if optimizer is None and method_of(method).goes_on(options):
            with_option = f" with ahead={ahead}" if ahead is not None else ""
            raise PlanError(
                f"method {method}{with_option} needs the optimizer.", action="Give optimizer=… beside the method."
            )
        self._attach(optimizer)
        if optimizer is not None:
            self.sync.bind(optimizer)

    def _forget_ranks(self) -> None:
        # In a list, or it would be registered as a second submodule. Empty in a copy that has not met the others yet.
        self._attached: list[nn.Module] = []
        self._forget_hooks()
        self._ends_backward = False
        self._optimized_in_backward: list[nn.Parameter] | None = None
        self._uneven = None
        self._weigher = Weigher()

    def _attach(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Meet the other ranks. Collective."""
        wanted, made_group = self._settings, not dist.is_initialized()
        backend = world.meet(self._process_group, wanted.deadline_s, self.module)
        name_of = world.name_of_rank()
        self.communicator = instrumented(backend, self.log, deadline_s=wanted.deadline_s, name_of=name_of)
        world.enter(self.communicator, self)
        self.method, self.reason = self._choose(optimizer)
        # Refuses options that the method does not have; what auto accepts suits whatever it chose.
        chosen = parse_plan({"method": wanted.method, "options": wanted.options}).options_for(self.method)
        row = METHODS[self.method]
        if row.one_process:
            raise PlanError(
                f"method {row.name} has no processes to average over.",
                action=f"Choose another; `syncline train --method {row.name}` has {row.world} of one process.",
            )
        self.log.method = self.method
        policy = wanted.batch_norm
        self.sync = make_sync(self.method, self.communicator, log=self.log, batch_norm=policy, **chosen)
        self.sync.ignored, self.sync.same_start = frozenset(self.parameters_to_ignore), wanted.same_start
        self.sync.static_graph = self.static_graph
        self._attached = [attach(self.sync, self.module, "sync" if policy == "sync" else None)]
        self._tell_method()
        # Weakly, or the two would hold each other until the garbage collector looks.
        this = weakref.ref(self)
        self.sync.on_gradient = lambda: None if (wrapper := this()) is None else wrapper._at_end_of_backward()
        if not made_group:  # a group that was made here serves other wrappers too
            when_garbage(self, self.communicator.close)
        # A script may drop the wrapper after its last step: the update that is on its way must still be applied.
        when_garbage(self, self.sync.synchronize)

    def _choose(self, optimizer: torch.optim.Optimizer | None) -> tuple[str, str]:
        """The method, or the one that `auto` stands for here, and why. Collective."""
        method = current_name(self._settings.method, typed=True)
        if not method_of(method).is_choice:
            return method, "asked for"
        devices = {parameter.device.type for parameter in self.module.parameters()} - {"cpu"}
        chosen, why = choose_method(
            device=min(devices, default="cpu"),
            workers=self.communicator.world_size,
            num_hosts=count_hosts(self.communicator),
            not_late=self._why_not_late(optimizer),
        )
        if self.communicator.rank == 0:
            print(f"syncline: method {chosen}: {why}", file=sys.stderr)
        return chosen, why

    def _why_not_late(self, optimizer: torch.optim.Optimizer | None) -> str | None:
        if optimizer is None:
            return "no optimizer is given"
        if self.world_size < dist.get_world_size():
            return "the process group is not the whole world"
        named = self.module.named_parameters()
        trained = [(name, p) for name, p in named if p.requires_grad and name not in self.parameters_to_ignore]
        options = self._settings.options
        return why_no_chunks(options["bucket_cap_mb"], options["unused"]) or why_not(optimizer, self.module, trained)

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        return self.communicator.world_size

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._attached:
            if not torch.is_grad_enabled():
                return self.module(*args, **kwargs)
            self._attach()
        if not in_backward():
            self._ends_backward = False  # a backward that raised did not come to its end
        if self._uneven is not None:
            self._uneven.before_forward()
        elif self._join_config.enable and self._torch_s is not None:
            self._torch_s._join_config = self._join_config
        if self._optimized_in_backward is None:
            self._optimized_in_backward = self._take_over_optimizers()
        module = self._modules["module"]  # to ask for self.module waits for what is on its way
        assert module is not None
        if self.device_ids:
            args, kwargs = on_device((args, kwargs), next(module.parameters()).device)
        weight = self._weigher.forward_begins(module) if torch.is_grad_enabled() else None
        self._run_buffer_hook(_BufferCommHookLocation.PRE_FORWARD)
        with standing_in(module, when=weight == 0):
            outputs = self._attached[0](*args, **kwargs)
        self._run_buffer_hook(_BufferCommHookLocation.POST_FORWARD)
        if weight is not None:
            self._weigher.watch(tensors_in(outputs), weight)
        if self.sync.expects and torch.is_grad_enabled() and not self._accumulates:
            # The outermost backward passes here first. Hooks of parameters may run in a backward inside that one
            # (reentrant checkpointing), whose end is not the end.
            for output in tensors_in(outputs):
                output.register_hook(lambda _: self._at_output())
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """The backward of a forward inside accumulates locally; the next average is of the sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def _make_buckets(self) -> None:
        if method_of(self._settings.method).is_choice and self.method != ON_LINKS:
            self.sync.detach()
            self._settings = replace(self._settings, method=ON_LINKS)
            self._attach()
            self.reason = "a communication hook needs buckets"

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """torch's communication hooks, for the methods with buckets: the hook averages each bucket. Method auto
        becomes bucketed; then it is collective."""
        self._register_hook(state, hook, getattr(hook, "__qualname__", ""))

    def synchronize(self) -> None:
        """Wait for what method ahead has left on its way: gradients hold the mean, updates are applied. Before you
        clip, scale or log gradients. Nothing to do for other methods, or after evaluation, saving and copying."""
        sync: GradientSync | None = self.__dict__.get("sync")
        if sync is not None:
            sync.synchronize()

    def __getattr__(self, name: str) -> Any:
        if name == "module":
            self.synchronize()  # whoever asks for the module may read its weights
        return super().__getattr__(name)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self.synchronize()
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.synchronize()
        return super().state_dict(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        module = self._modules["module"]  # the gradients alone, wherever they are on their way
        assert module is not None
        module.zero_grad(set_to_none)

    def describe(self) -> str:
        """What averages the gradients, why, and in which buckets."""
        lines = [f"method {self.method}: {self.reason}"]
        if isinstance(self.sync, FlatSync):
            lines.append(self.sync.describe())
        return "\n".join(lines)

    def close(self) -> None:
        """Leave the group, if it was joined here."""
        self.sync.detach()
        world.leave(self.communicator)
        self.communicator.close()

    def _at_output(self) -> None:
        self.sync.expect_again()
        self._at_end_of_backward()

    def _at_end_of_backward(self) -> None:
        if not self._ends_backward and self.sync.expects:
            self._ends_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._ends_backward = False
        self.sync.backward_ended()
        if not self.sync.expects:
            if self._uneven is not None:
                self._uneven.after_average()
            self._after_average()
            if self._counts_steps:
                self.log.step += 1  # for errors

    def __getstate__(self) -> dict[str, Any]:
        """What a copy needs to meet the other ranks by itself, at its first forward. Copying talks to nobody."""
        self.synchronize()
        left_here = (
            "communicator", "sync", "log", "device_mesh", "_attached", "_process_group", "_uneven", "_weigher",
            "_comm_hooks", "_buffer_hook", "_buffer_futures", "_optimized_in_backward",
        )  # fmt: skip
        return {key: value for key, value in self.__dict__.items() if key not in left_here}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.log, self._counts_steps = _own_log(), True
        self._process_group = None
        self._forget_ranks()

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        made: DataParallel = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        made._process_group = self._process_group
        return made


@dataclass(frozen=True)
class _Settings:
    """What a user asked for: enough to attach a copy."""

    method: str
    options: dict[str, Any]
    batch_norm: BatchNorm | None
    same_start: SameStart
    deadline_s: float


def _own_log() -> EventLog:
    log = EventLog(keep=False)
    log.step = 0
    return log


def tensors_in(outputs: Any) -> Iterator[Tensor]:
    """What a backward may start from in a forward's outputs: tensors in containers, dataclasses and plain objects."""
    if isinstance(outputs, Tensor):
        if outputs.grad_fn is not None:
            yield outputs
        return
    if isinstance(outputs, Mapping):
        inside: Iterable[Any] = outputs.values()
    elif isinstance(outputs, list | tuple | set):
        inside = outputs
    else:
        is_plain = not isinstance(outputs, nn.Module | type) and hasattr(outputs, "__dict__")
        inside = vars(outputs).values() if is_plain else ()
        inside = [part for part in inside if isinstance(part, Tensor | Mapping | list | tuple)]
    for part in inside:
        yield from tensors_in(part)


def convert_sync_batch_norm(
    module: nn.Module, process_group: dist.ProcessGroup | None = None, *, deadline_s: float = 120.0
) -> nn.Module:
    """`module` with batch norm over all ranks' batches, on CPU as on GPU: for use with torch's own
    DistributedDataParallel and other wrappers. In place, but for a module that is itself a batch norm. Collective."""
    backend = world.meet(process_group, deadline_s, module)
    log = EventLog(keep=False)
    communicator = instrumented(backend, log, deadline_s=deadline_s, name_of=world.name_of_rank())
    if communicator.world_size == 1:
        return module
    channel = communicator.split("batch norm")
    refuse_shared_channel(communicator, channel)
    return synchronise_batch_norm(module, Statistics(channel))


def _without_prefix(wrapper: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
    """The keys of the module itself in a state_dict, also where the wrapper is part of another module."""
    wrapped = f"{prefix}module."
    for key in [key for key in state if key.startswith(wrapped)]:
        state[prefix + key.removeprefix(wrapped)] = state.pop(key)


def _with_prefix(wrapper: DataParallel, state: dict[str, Any], prefix: str, *_rest: object) -> None:
    """Loading takes the keys of the module itself, and those of torch's wrapper, which begin with 'module.'."""
    own = wrapper.module.state_dict().keys()
    for key in [key for key in state if key.startswith(prefix) and key.removeprefix(prefix) in own]:
        state[f"{prefix}module.{key.removeprefix(prefix)}"] = state.pop(key)
