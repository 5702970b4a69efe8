"""ddp: PyTorch's own DistributedDataParallel, the control.

Gradients are packed into buckets that are all-reduced while backward still runs. The transfers are torch's own; a
communication hook that does what DDP does without one writes them into the event log.

DDP looks at the hook's annotations as objects, so this file does not postpone them.
"""

import inspect
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from syncline.comm.communicator import Communicator
from syncline.comm.torch_backend import TorchCommunicator, translate
from syncline.errors import PlanError
from syncline.launcher.outcome import is_about_connections
from syncline.methods import Unused
from syncline.spans import EventLog
from syncline.sync.base import GradientSync, keras_statistics, share_buffers
from syncline.sync.hooks import CommHook

_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)
"""What torch calls it: newer versions warn at the older name."""


class DDP(GradientSync):
    rebuilds_after_first_backward = True

    def __init__(
        self,
        communicator: Communicator,
        *,
        bucket_cap_mb: float | None = None,
        unused: Unused = "error",
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__(communicator)
        backend = communicator.backend
        if not isinstance(backend, TorchCommunicator):
            raise PlanError("method ddp needs torch.distributed: ranks that are threads cannot run it.")
        self._group = backend.group
        self._bucket_cap_mb = bucket_cap_mb
        self.unused = unused
        self.shares_buffers = broadcast_buffers
        self._module: DistributedDataParallel | None = None

    def attach(self, model: nn.Module) -> nn.Module:
        buffers: dict[str, Any] = {} if self.shares_buffers else {_BUFFERS: False}
        self._module = DistributedDataParallel(
            model,
            process_group=self._group,
            bucket_cap_mb=self._bucket_cap_mb,
            find_unused_parameters=self.unused == "zero" and not self.static_graph,
            static_graph=self.static_graph,
            init_sync=self.same_start != "nothing",
            **buffers,
        )
        if keras_statistics(model):
            self._module.register_forward_pre_hook(self._share_keras_statistics)
        if not self.log.off or self.looks_for_nan:  # a hook costs time, also where nobody wants it
            self.trace(self.log)
        if self.looks_for_nan:
            self._names = {id(parameter): name for name, parameter in model.named_parameters()}
            _tracers[self._module].look = weakly(self._look_at_bucket)
        return self._module

    @property
    def buffer_bytes(self) -> int:
        """Its buckets hold every gradient once more."""
        assert self._module is not None, "attach a model first"
        return sum(parameter.nbytes for parameter in self._module.parameters() if parameter.requires_grad)

    def _share_keras_statistics(self, *_: object) -> None:
        """torch's class shares buffers by itself, but not what Keras has in their place."""
        module = self._module
        if module is not None and module.training and self.shares_buffers and not self.paused:
            named = keras_statistics(module.module)
            share_buffers(self.communicator, [tensor for name, tensor in named if name not in self.ignored])

    def finish(self) -> None:
        """DDP ends its transfers inside backward."""

    def explained(self, error: RuntimeError) -> RuntimeError:
        """torch's own words name no rank; who is where is known all the same."""
        if not is_about_connections(error):
            return error
        return self.communicator.lost("a transfer of DistributedDataParallel", translate(error))

    def settings_changed(self) -> None:
        if self._module is not None:
            self._module.require_backward_grad_sync = not self.paused
            self._module.find_unused_parameters = self.unused == "zero"
            self._module.broadcast_buffers = self.shares_buffers

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        assert self._module is not None, "attach a model first"
        self._module.register_comm_hook(state, hook)

    def detach(self) -> None:
        super().detach()
        self._module = None

    def _look_at_bucket(self, bucket: GradBucket) -> None:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._look_at(self._names[id(parameter)], gradient)

    def trace(self, log: EventLog) -> None:
        """Write transfers into the log, unless another communication hook makes them."""
        assert self._module is not None, "attach a model first"
        trace_transfers(self._module, log)


class _Tracer:
    """Does what torch's class does without a hook, and notes it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.log = EventLog(keep=False)
        self.look: Callable[[GradBucket], None] = lambda bucket: None

    def all_reduce(self, _state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        # torch has copied the gradients into the bucket by now, and copies them out after the last bucket: neither
        # can be seen from here. What can is the division.
        self.look(bucket)
        ready_ns = time.monotonic_ns()
        buffer = bucket.buffer().div_(self.group.size())
        start_ns = time.monotonic_ns()
        work = dist.all_reduce(buffer, group=self.group, async_op=True)
        assert work is not None
        self.log.add("pack", label=f"bucket {bucket.index()}", start=ready_ns, end=start_ns, busy=start_ns - ready_ns)
        label, num_bytes = f"bucket {bucket.index()}", buffer.numel() * buffer.element_size()

        def note(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            self.log.add(
                "collective", name="all_reduce", label=label, bytes=num_bytes,
                ready=ready_ns, start=start_ns, end=time.monotonic_ns(),
            )  # fmt: skip
            return future.value()[0]

        noted: torch.futures.Future[Tensor] = work.get_future().then(note)
        return noted


def weakly(look: Callable[[GradBucket], None]) -> Callable[[GradBucket], None]:
    """The method's look at a bucket; torch keeps a hook for good, and it must not keep the method."""
    method = WeakMethod(look)
    return lambda bucket: None if (alive := method()) is None else alive(bucket)


_tracers: WeakKeyDictionary[DistributedDataParallel, _Tracer] = WeakKeyDictionary()


def trace_transfers(module: DistributedDataParallel, log: EventLog) -> bool:
    """Write the module's transfers into the log from now on; False if somebody else's hook makes them.

    torch's class keeps a hook for good, so another log later takes the place of the first.
    """
    tracer = _tracers.get(module)
    if tracer is None:
        if module._comm_hooks:
            return False
        tracer = _tracers[module] = _Tracer(module.process_group)
        module.register_comm_hook(None, tracer.all_reduce)
    tracer.log = log
    return True
