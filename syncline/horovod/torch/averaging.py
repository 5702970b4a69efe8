"""How the gradients of a DistributedOptimizer are averaged: in buckets on Syncline's engine, or tensor by tensor.

Hooks count backward passes and hand each gradient on when its last pass has come. `InBuckets` is the fast lane: ranks
that share a host average in shared memory, leaders of hosts talk to each other, and nothing is asked of rank 0.
`ByName` is for what buckets cannot carry: compressors of the user's own, other operations than average and sum, and
sets of ranks. A gradient that is missing is a zero, as with Horovod.

Buckets are made at the first `synchronize`, when every rank takes part and sparse gradients are known. So making a
DistributedOptimizer talks to nobody.
"""

from __future__ import annotations

import itertools
import platform
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from syncline.comm import Communicator, instrumented
from syncline.errors import CommunicationError
from syncline.horovod import world
from syncline.horovod.common.exceptions import HorovodInternalError
from syncline.horovod.common.process_sets import ProcessSet
from syncline.horovod.torch.asynchronous import (
    Average,
    ReduceOp,
    Sum,
    allreduce_async,
    grouped_allreduce_async_,
    size_of,
    sparse_allreduce_async,
    synchronize,
)
from syncline.horovod.torch.compression import FP16Compressor
from syncline.machine import STRONG_MEMORY_ORDER
from syncline.methods import METHODS
from syncline.spans import EventLog
from syncline.sync.base import when_garbage
from syncline.sync.bucketed import Bucketed
from syncline.sync.flat import FlatSync
from syncline.sync.hierarchical import Hierarchical
from syncline.sync.shared_memory import SharedMemory

Named = list[tuple[str, nn.Parameter]]

_numbers = itertools.count()


class Averaging(ABC):
    """The hooks, and what becomes of a gradient whose last pass has come."""

    def __init__(self, named: Named, passes: int) -> None:
        self.passes = passes
        self.named: Named = []
        self.in_flight = False
        """Gradients are on their way: they must not be zeroed now."""
        self.on_synchronized: Callable[[int, int], None] | None = None
        """Told from when to when each `synchronize` lasted."""
        self._left: list[int] = []
        """Of each gradient, how many passes are still to come before it travels."""
        self._hooks: list[RemovableHandle] = []
        self.take(named)

    def take(self, named: Named) -> None:
        """Average these too."""
        for name, parameter in named:
            if parameter.requires_grad:
                self._watch(len(self.named), parameter)
                self.named.append((name, parameter))
                self._left.append(self.passes)

    def _watch(self, number: int, parameter: nn.Parameter) -> None:
        this = weakref.ref(self)

        def on_gradient(parameter: Tensor) -> None:
            averaging = this()
            if averaging is not None:
                averaging._count(number, parameter)

        hook = parameter.register_post_accumulate_grad_hook(on_gradient)
        self._hooks.append(hook)
        when_garbage(self, hook.remove)

    def _count(self, number: int, parameter: Tensor) -> None:
        if not world.is_initialized() or world.current().size == 1:
            return
        if self._left[number] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self._left[number] -= 1
        if self._left[number] == 0:
            self.in_flight = True
            self.gradient_ready(number, parameter)

    def set_passes(self, passes: int) -> None:
        self.passes = passes
        self._left = [passes] * len(self.named)

    def synchronize(self) -> None:
        """Return when every gradient is averaged. Collective."""
        if world.current().size == 1:
            return
        start_ns = time.monotonic_ns()
        try:
            self.average()
        except CommunicationError as error:
            raise HorovodInternalError(str(error)) from error
        finally:
            self._left = [self.passes] * len(self.named)
            self.in_flight = False
        if self.on_synchronized is not None:
            self.on_synchronized(start_ns, time.monotonic_ns())

    @abstractmethod
    def gradient_ready(self, number: int, parameter: Tensor) -> None: ...

    @abstractmethod
    def average(self) -> None: ...

    def zeros_where_missing(self) -> None:
        """Another rank may have a gradient where this one has none."""
        for _, parameter in self.named:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


class ByName(Averaging):
    """Each gradient is a named request of its own."""

    def __init__(
        self, named: Named, passes: int, *, op: ReduceOp, compression: Any, sparse_as_dense: bool, predivide: float,
        process_set: ProcessSet,
    ) -> None:  # fmt: skip
        self._op, self._compression, self._sparse_as_dense = op, compression, sparse_as_dense
        self._predivide, self._process_set = predivide, process_set
        self._under_way: dict[int, tuple[Any, Any]] = {}
        super().__init__(named, passes)

    def gradient_ready(self, number: int, parameter: Tensor) -> None:
        if not self._process_set.included():
            return
        name, gradient = self.named[number][0], parameter.grad
        assert gradient is not None
        if gradient.is_sparse and not self._sparse_as_dense:
            self._under_way[number] = (sparse_allreduce_async(gradient, name, self._op, self._process_set), None)
            return
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        values, context = self._compression.compress(dense)
        options = _scaling(self._op, self._predivide, size_of(self._process_set))
        handle = allreduce_async(values, name=name, process_set=self._process_set, **options)
        self._under_way[number] = (handle, (context,))

    def average(self) -> None:
        if not self._process_set.included():
            return
        self.zeros_where_missing()
        for number, (_, parameter) in enumerate(self.named):
            if number not in self._under_way:
                self.gradient_ready(number, parameter)
        under_way, self._under_way = self._under_way, {}
        for number, (handle, context) in under_way.items():
            mean, parameter = synchronize(handle), self.named[number][1]
            if context is not None:
                mean = self._compression.decompress(mean, context[0])
                own = parameter.grad
                if own is not None and own.is_sparse:
                    mean = mean.to_sparse(own.sparse_dim())
            parameter.grad = mean.to(parameter.dtype)


def _scaling(op: ReduceOp, predivide: float, size: int) -> dict[str, Any]:
    """A mean may be divided in part before the sum, which keeps 16-bit sums in range."""
    if op is Average and predivide != 1.0:
        return {"op": Sum, "prescale_factor": 1.0 / predivide, "postscale_factor": predivide / size}
    return {"op": op}


class InBuckets(Averaging):
    """In buckets, on the engine that suits where the ranks are."""

    def __init__(
        self, named: Named, passes: int, *, op: ReduceOp, compression: Any, sparse_as_dense: bool, predivide: float
    ) -> None:
        self.number, self.waits = next(_numbers), False
        self.log = EventLog(keep=False)
        self._op, self._predivide, self._sparse_as_dense = op, predivide, sparse_as_dense
        self._transfer = "fp16" if compression is FP16Compressor else None
        self._engine: FlatSync | None = None
        self._place: dict[int, int] = {}
        """By number here, the number in the buckets."""
        self._sparse: dict[int, Callable[[], Tensor]] = {}
        self._as_dense: dict[int, int] = {}
        """Gradients that travel dense and become sparse again, with how many of their dimensions are sparse."""
        self._kinds: list[tuple[torch.dtype, torch.device]] = []
        self._world = 0
        super().__init__(named, passes)
        if world.is_initialized():
            world.current().optimizers[self.number] = self

    @property
    def communicator(self) -> Communicator:
        return world.current().communicator

    @property
    def method(self) -> str:
        return _name_of(_kind(self.named))

    def gradient_ready(self, number: int, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        # One that was dense when buckets were made has its place in one, on every rank.
        if gradient.is_sparse and (self._sparse_as_dense or number in self._place):
            self._as_dense[number] = gradient.sparse_dim()
            parameter.grad = gradient = gradient.to_dense()
        if gradient.is_sparse:
            self._sparse[number] = sparse_allreduce_async(gradient, self.named[number][0], self._op)
        elif self._engine is not None and number in self._place:
            self._engine._on_ready(self._place[number], parameter)

    def average(self) -> None:
        here = world.current()
        here.optimizers[self.number] = self
        here.steps[self.number] += 1
        self.waits = True
        here.lane.begin_step(self.number, here.steps[self.number])
        try:
            self.zeros_where_missing()
            self._take_unfrozen()
            self._submit_sparse()
            engine = self._engine_of(here)
            engine.expect()
            engine.finish()
            if self._op is Average and self._predivide != 1.0:
                for buffer in engine._buffers.values():
                    buffer.mul_(self._predivide / here.size)
            for number, handle in self._sparse.items():
                self.named[number][1].grad = handle()
            for number, dimensions in self._as_dense.items():
                parameter = self.named[number][1]
                assert parameter.grad is not None
                parameter.grad = parameter.grad.to_sparse(dimensions)
        finally:
            self.waits = False
            self._sparse.clear()
            self._as_dense.clear()
            here.lane.did(here.step_in_words(self.number))

    def shadow(self) -> None:
        """Take part in a step of the others with zeros: this rank has joined."""
        kept = [None if parameter.grad is None else parameter.grad.clone() for _, parameter in self.named]
        for _, parameter in self.named:
            parameter.grad = None
        try:
            self.synchronize()
        finally:
            for (_, parameter), gradient in zip(self.named, kept, strict=True):
                parameter.grad = gradient

    def leave(self) -> None:
        """The world ends; buckets are made anew in the next one."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.detach()
        self.in_flight, self._left = False, [self.passes] * len(self.named)

    def take(self, named: Named) -> None:
        super().take(named)
        self._frozen = [pair for pair in [*getattr(self, "_frozen", []), *named] if not pair[1].requires_grad]
        self._kinds = []  # buckets are laid out anew

    def _take_unfrozen(self) -> None:
        if any(parameter.requires_grad for _, parameter in self._frozen):
            frozen, self._frozen = self._frozen, []
            self.take(frozen)
            self.zeros_where_missing()

    def _submit_sparse(self) -> None:
        """Those that had no hook call."""
        for number, (_, parameter) in enumerate(self.named):
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse and number not in self._sparse:
                self.gradient_ready(number, parameter)

    def _engine_of(self, here: world.World) -> FlatSync:
        kinds = [(parameter.dtype, parameter.device) for _, parameter in self.named]
        if self._engine is None or kinds != self._kinds or self._world != here.generation:
            if self._engine is not None:
                self._engine.detach()
            self._kinds, self._world = kinds, here.generation
            dense = [number for number in range(len(self.named)) if number not in self._sparse]
            self._place = {number: place for place, number in enumerate(dense)}
            self._engine = self._make(here, [self.named[number] for number in dense])
        return self._engine

    def _make(self, here: world.World, named: Named) -> FlatSync:
        """Collective."""
        kind = _kind(named)
        communicator = instrumented(here.again(), self.log, deadline_s=here.communicator.deadline_s)
        self.log.method = _name_of(kind)
        options: dict[str, Any] = {"unused": "zero"}
        if self._transfer is not None and kind is not FedSharedMemory:
            options["transfer_dtype"] = self._transfer
        made = kind(communicator, **options)
        assert isinstance(made, Fed)
        made.early = 1.0 if self._op is Sum else 1.0 / self._predivide if self._predivide != 1.0 else None
        made.log, made.same_start = self.log, "nothing"
        made.attach(Held(named))
        return made


def _kind(named: Named) -> type[FlatSync]:
    """What suits where the ranks and the parameters are."""
    hosts = world.current().hosts
    on_cpu = all(parameter.device.type == "cpu" for _, parameter in named)
    shares = len(hosts) < world.current().size and on_cpu and platform.machine() in STRONG_MEMORY_ORDER
    if not shares:
        return FedBucketed
    return FedSharedMemory if len(hosts) == 1 else FedHierarchical


def _name_of(kind: type[FlatSync]) -> str:
    """As `syncline methods` calls it: the plain method of that file."""
    file = next(base.__module__ for base in kind.__mro__ if base.__module__ != __name__)
    return next(row.name for row in METHODS.values() if row.made_by.startswith(f"{file}:") and not row.presets)


class Held(nn.Module):
    """Parameters under the names that the user gave, which may have any form."""

    def __init__(self, named: Named) -> None:
        super().__init__()
        self._held = named

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._held)


class Fed(FlatSync):
    """Buckets without hooks of their own: the optimiser hands over each gradient when its last pass has come. What is
    in them stays, also while a parameter is frozen."""

    early: float | None = None
    """What gradients are multiplied by on the way in; None divides them so that the sum is the mean."""

    def _watch(self, *args: Any) -> None:
        pass

    def forward_begins(self) -> None:
        pass

    @property
    def scale_early(self) -> float | None:
        return super().scale_early if self.early is None else self.early


class FedBucketed(Fed, Bucketed):
    _is_first = True

    def _rebuild(self, seen: list[int]) -> None:
        """Buckets are made after the first backward, so the second is the first whose gradients come one by one."""
        if self._is_first:
            self._is_first = False
        else:
            super()._rebuild(seen)


class FedSharedMemory(Fed, SharedMemory):
    pass


class FedHierarchical(FedBucketed, Hierarchical):
    pass


class OfDeltas:
    """Adasum: each rank makes its own step, and what it changed is combined."""

    def __init__(self, compression: Any, process_set: ProcessSet) -> None:
        self._compression, self._process_set = compression, process_set

    def step(self, parameters: list[nn.Parameter], own_step: Callable[[], Any], op: ReduceOp) -> Any:
        before = [parameter.detach().clone() for parameter in parameters]
        result = own_step()
        with torch.no_grad():
            deltas = [parameter - start for parameter, start in zip(parameters, before, strict=True)]
            compressed = [self._compression.compress(delta) for delta in deltas]
            values = [value for value, _ in compressed]
            synchronize(grouped_allreduce_async_(values, op=op, process_set=self._process_set))
            for parameter, start, (value, context) in zip(parameters, before, compressed, strict=True):
                parameter.copy_(start + self._compression.decompress(value, context))
        return result
