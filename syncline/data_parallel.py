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

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Never

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from syncline.comm import Communicator, instrumented
from syncline.comm.mpi_backend import connect_mpi
from syncline.comm.shared_memory import count_hosts
from syncline.comm.threads import ThreadCommunicator, ThreadWorld
from syncline.comm.torch_backend import adopt, connect
from syncline.errors import PlanError, UsageError
from syncline.launcher.adopt import placement_from_environment
from syncline.launcher.route import find_meeting
from syncline.methods import METHODS, BatchNorm, Collective, TransferDtype, Unused, current_name, method_of
from syncline.plan import parse_plan
from syncline.resolve import choose_method
from syncline.spans import EventLog
from syncline.sync import make_sync
from syncline.sync.base import broadcast_state
from syncline.sync.batch_norm import Statistics, SyncBatchNorm, attach, refuse_shared_channel, synchronise_batch_norm
from syncline.sync.ddp import DDP
from syncline.sync.flat import FlatSync
from syncline.sync.hooks import CommHook

REFUSED = {
    "init_sync": "every rank always starts with rank 0's parameters",
    "dim": "batches are split by the caller",
    "output_device": "a module on several devices is not supported",
    "check_reduction": "torch ignores it too",
    "delay_all_reduce_named_params": "buckets follow the order in which gradients become ready",
    "param_to_hook_all_reduce": "buckets follow the order in which gradients become ready",
    "mixed_precision": "use transfer_dtype for 16-bit transfers, and autocast for 16-bit compute",
    "device_mesh": "give process_group",
    "skip_all_reduce_unused_params": "use unused='zero' or 'error'",
    "bucket_cap_mb_list": "use bucket_cap_mb",
    "batched_grad_copy": "gradients are views of their bucket already",
}
"""Keywords of torch's DistributedDataParallel that have no meaning here, and what to do instead."""


class DataParallel(nn.Module):
    """`module` with gradients averaged over ranks by `method`. Collective."""

    def __init__(
        self,
        module: nn.Module,
        method: str = "auto",
        *,
        bucket_cap_mb: float | None = None,
        collective: Collective | None = None,
        transfer_dtype: TransferDtype | None = None,
        groups: int | None = None,
        overlap: bool | None = None,
        unused: Unused | None = None,
        batch_norm: BatchNorm | None = None,
        process_group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = False,
        forward_sync_buffers: bool | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        device_ids: list[int | torch.device] | None = None,
        deadline_s: float = 120.0,
        log: EventLog | None = None,
        **refused: Never,
    ) -> None:
        """Options from `bucket_cap_mb` to `unused` are a plan's; refuses one that the method does not have.

        `batch_norm` is local (statistics of the own batch), broadcast (rank 0's buffers before each forward) or
        sync (statistics over all ranks' batches); the default is broadcast for ddp and local for the others.

        For scripts written for torch's class, `find_unused_parameters` means `unused="zero"`, and
        `gradient_as_bucket_view`, `static_graph` and `device_ids` change nothing."""
        super().__init__()
        for name in refused.keys() & REFUSED.keys():
            raise PlanError(f"DataParallel does not accept {name}: {REFUSED[name]}.")
        options = {
            "bucket_cap_mb": bucket_cap_mb, "collective": collective, "transfer_dtype": transfer_dtype,
            "groups": groups, "overlap": overlap,
            "unused": unused or ("zero" if find_unused_parameters else None), **refused,
        }  # fmt: skip
        if device_ids is not None and len(device_ids) > 1:
            raise PlanError("DataParallel uses one device per process.", action="Start one process per device.")
        self.log = log or EventLog(keep=False)
        self.communicator = instrumented(_connect(process_group, deadline_s), self.log, deadline_s=deadline_s)
        self.method, self.reason = _choose(method, module, self.communicator)
        # Refuses options that the method does not have; what auto accepts suits whatever it chose.
        chosen = parse_plan({"method": method, "options": options}).options_for(self.method)
        row = METHODS[self.method]
        if row.world == "threads":
            raise PlanError(
                f"method {row.name} has no processes to average over.",
                action=f"Choose another method; for replicas on threads use `syncline train --method {row.name}`.",
            )
        self.log.method = self.method
        self.module = module
        self.sync = make_sync(self.method, self.communicator, log=self.log, batch_norm=batch_norm, **chosen)
        synchronised = batch_norm if batch_norm == "sync" else None
        # In a list, or it would be registered as a second submodule.
        self._attached = [attach(self.sync, module, synchronised)]
        self.register_state_dict_post_hook(_without_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_with_prefix)  # type: ignore[no-untyped-call]
        # The first is what older versions of torch call the second.
        self._broadcast_buffers = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        if batch_norm is not None:
            self._broadcast_buffers = batch_norm == "broadcast" and not row.broadcasts_buffers
        self._ends_backward = False
        self._accumulates = False
        self._uneven: _UnevenInputs | None = None
        if not isinstance(self.sync, DDP):
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(lambda _: self._at_end_of_backward())

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        return self.communicator.world_size

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:
            self._ends_backward = False  # a backward that raised did not come to its end
        if self._uneven is not None and torch.is_grad_enabled() and not self._accumulates:
            self._uneven.announce(active=True)
        if self._broadcast_buffers and self.training and torch.is_grad_enabled():
            self._share_buffers()
        outputs = self._attached[0](*args, **kwargs)
        if isinstance(self.sync, DDP) or not torch.is_grad_enabled():
            return outputs
        # The outermost backward passes here first. Hooks of parameters may run in a backward inside that one
        # (reentrant checkpointing), whose end is not the end.
        return tree_map(self._tied, outputs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward accumulates locally; the next backward outside averages the sum."""
        before, self._accumulates = self._accumulates, True
        try:
            with self.sync.no_sync():
                yield
        finally:
            self._accumulates = before

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """torch's communication hooks, for the methods with buckets: the hook averages each bucket."""
        self.sync.register_comm_hook(state, hook)

    @contextmanager
    def join(self) -> Iterator[None]:
        """Around a loop in which ranks may have different numbers of batches.

        A rank that is done takes part with zero gradients until all are, and ends with the others' parameters. As
        with torch's class, the mean is over the whole world.
        """
        if any(isinstance(layer, SyncBatchNorm) for layer in self.module.modules()):
            raise PlanError(
                "join does not work with batch-norm statistics over all ranks' batches.",
                action='Use batch_norm = "local", or give every rank the same number of batches.',
            )
        if isinstance(self.sync, DDP):
            with self._attached[0].join():  # type: ignore[operator]
                yield
            return
        self._uneven = _UnevenInputs(self)
        try:
            yield
            self._uneven.shadow()
        finally:
            self._uneven = None

    def describe(self) -> str:
        """What averages the gradients, why, and in which buckets."""
        lines = [f"method {self.method}: {self.reason}"]
        if isinstance(self.sync, FlatSync):
            lines.append(self.sync.describe())
        return "\n".join(lines)

    def close(self) -> None:
        """Leave the group, if it was joined here."""
        self.sync.detach()
        self.communicator.close()

    def _tied(self, output: Any) -> Any:
        # A hook leaves the output as it is: users may change it in place.
        if isinstance(output, Tensor) and output.grad_fn is not None:
            output.register_hook(lambda _: self._at_end_of_backward())
        return output

    def _at_end_of_backward(self) -> None:
        if not self._ends_backward:
            self._ends_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._ends_backward = False
        self.sync.finish()

    def _share_buffers(self) -> None:
        root = self._uneven.root if self._uneven is not None else 0
        with self.communicator.scope("buffers"):
            for name, buffer in self.module.named_buffers():
                self.communicator.broadcast(buffer, root=root, label=name)


def convert_sync_batch_norm(
    module: nn.Module, process_group: dist.ProcessGroup | None = None, *, deadline_s: float = 120.0
) -> nn.Module:
    """`module` with batch norm over all ranks' batches, on CPU as on GPU: for use with torch's own
    DistributedDataParallel and other wrappers. In place, but for a module that is itself a batch norm. Collective."""
    communicator = instrumented(_connect(process_group, deadline_s), EventLog(keep=False), deadline_s=deadline_s)
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


class _UnevenInputs:
    """Inside `join`: before every forward that leads to an average, ranks say whether they still have a batch."""

    def __init__(self, wrapper: DataParallel) -> None:
        self.wrapper = wrapper
        self.last_active: list[int] = []

    def announce(self, *, active: bool) -> bool:
        comm = self.wrapper.communicator
        with comm.scope("join"):
            flags = comm.all_gather(torch.tensor([int(active)], device=comm.device), label="still active")
        ranks = [rank for rank, flag in enumerate(flags) if flag.item()]
        self.last_active = ranks or self.last_active
        return bool(ranks)

    def shadow(self) -> None:
        """Join in with zeros until all ranks are done, then adopt the state of the last to finish."""
        while self.announce(active=False):
            if self.wrapper._broadcast_buffers and self.wrapper.training:
                self.wrapper._share_buffers()
            self.wrapper.sync.finish_without_gradients()
        broadcast_state(self.wrapper.communicator, self.wrapper.module, root=self.root)

    @property
    def root(self) -> int:
        """A rank that was there to the last: its parameters and buffers count."""
        return self.last_active[-1] if self.last_active else 0


def _connect(process_group: dist.ProcessGroup | None, deadline_s: float) -> Communicator:
    deadline = timedelta(seconds=deadline_s)
    if dist.is_initialized():
        return adopt(process_group, deadline=deadline, host_index=host_index())
    place = placement_from_environment()
    if process_group is not None:
        raise PlanError("you gave process_group, but torch.distributed is not initialised.")
    if place is None:
        return ThreadCommunicator(ThreadWorld(1), 0)
    meeting = None if place.master_addr else find_meeting(place)
    if not place.master_addr and (meeting is None or place.launcher == "mpi"):
        return connect_mpi(deadline)  # mpiexec names no place to meet: MPI itself is one
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    return connect(place, backend=backend, deadline=deadline, meeting=meeting)


def host_index() -> int:
    """As the launcher says; scripts that make the group themselves often set only some of its variables."""
    try:
        place = placement_from_environment()
    except UsageError:
        return 0
    return place.host_index if place else 0


def _choose(method: str, module: nn.Module, communicator: Communicator) -> tuple[str, str]:
    """The method that `auto` stands for here, and why."""
    method = current_name(method, typed=True)
    if not method_of(method).is_choice:
        return method, "asked for"
    devices = {parameter.device.type for parameter in module.parameters()} - {"cpu"}
    chosen, why = choose_method(
        device=min(devices, default="cpu"),
        workers=communicator.world_size,
        num_hosts=count_hosts(communicator),
    )
    if communicator.rank == 0:
        print(f"syncline: method {chosen}: {why}", file=sys.stderr)
    return chosen, why
