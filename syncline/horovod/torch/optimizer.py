"""DistributedOptimizer: the user's optimiser, whose step first averages the gradients over ranks."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from syncline.horovod import world
from syncline.horovod.common.process_sets import ProcessSet, global_process_set
from syncline.horovod.torch.asynchronous import Adasum, Average, ReduceOp, Sum
from syncline.horovod.torch.averaging import Averaging, ByName, InBuckets, Named, OfDeltas
from syncline.horovod.torch.compression import Compression, FP16Compressor, NoneCompressor


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Any]] | None = None,
    compression: Any = Compression.none, backward_passes_per_step: int = 1, op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Any = None, sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:  # fmt: skip
    """The optimiser, of a subclass of its own class, with the same state and groups. `loss.backward()` sends
    gradients as they become ready, and `step()` waits for their average (or sum).

    `groups` and `num_groups` say what Horovod should send together; buckets do that by themselves, so they are only
    checked. `Compression.fp16` sends 16 bits between hosts; within a host nothing is sent, and nothing is rounded.
    """
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    _check_groups(groups, num_groups)
    named = _names(optimizer, named_parameters)
    kind = type(optimizer)
    adasum = op is Adasum and world.current().size > 1
    made_of = (_AdasumOptimizer if adasum else _DistributedOptimizer, kind)
    cls: Any = type(kind.__name__, made_of, {"__module__": kind.__module__, "__doc__": kind.__doc__})
    made = cls.__new__(cls)
    # A schedule that was made before replaces `step` on the object itself, with the old object's.
    made.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    made._parameter_names = {parameter: name for name, parameter in named}  # Horovod's, which scripts look into
    if adasum:
        made._deltas = OfDeltas(compression, process_set)
    else:
        options = {
            "op": Average if op is Adasum else op,
            "compression": compression,
            "sparse_as_dense": sparse_as_dense,
            "predivide": gradient_predivide_factor,
        }
        fits = compression in (NoneCompressor, FP16Compressor) and options["op"] in (Average, Sum)
        if fits and process_set.process_set_id == global_process_set.process_set_id:
            made.averaging = InBuckets(named, backward_passes_per_step, **options)
        else:
            made.averaging = ByName(named, backward_passes_per_step, process_set=process_set, **options)
    return made


class _DistributedOptimizer(torch.optim.Optimizer):
    """What is put in front of the user's own class."""

    averaging: Averaging | None = None
    """None in a copy, which is the user's own optimiser again."""
    _synchronized = False
    _should_synchronize = True

    def synchronize(self) -> None:
        """Return when gradients hold the average: before you clip or look at them. Collective."""
        if self.averaging is not None:
            self.averaging.synchronize()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A `step()` inside does not average: `synchronize()` was called before."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step(closure)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if self.averaging is not None and self.averaging.in_flight:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(*args, **kwargs)

    def set_backward_passes_per_step(self, passes: int) -> None:
        if self.averaging is not None:
            self.averaging.set_passes(passes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self.averaging is not None:
            known = {id(parameter) for _, parameter in self.averaging.named}
            group = len(self.param_groups) - 1
            self.averaging.take([
                (f"allreduce.noname.{group}.{number}", parameter)
                for number, parameter in enumerate(self.param_groups[-1]["params"])
                if id(parameter) not in known
            ])  # fmt: skip


class _AdasumOptimizer(torch.optim.Optimizer):
    """Each rank makes its own step; the changes of parameters are combined by Adasum."""

    _deltas: OfDeltas | None = None

    def synchronize(self) -> None:
        """Nothing to do before a step: gradients are not averaged."""

    def skip_synchronize(self) -> None:
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        own_step = super().step
        if self._deltas is None:
            return own_step(closure)
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        return self._deltas.step(parameters, lambda: own_step(closure), Adasum)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """A step is made when the loop says so, after however many passes."""


def _names(optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Any]] | None) -> Named:
    """The optimiser's parameters with their names."""
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is None:
        numbered = enumerate(optimizer.param_groups)
        return [
            (f"allreduce.noname.{group}.{number}", parameter)
            for group, content in numbered
            for number, parameter in enumerate(content["params"])
        ]
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(map(str, twice))}"
        )
    by_id = {id(parameter): name for name, parameter in pairs}
    unnamed = [id(parameter) for parameter in trained if id(parameter) not in by_id]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. Python object ids: "
            f"{', '.join(map(str, unnamed))}"
        )
    return [(by_id[id(parameter)], parameter) for parameter in trained]


def _check_groups(groups: Any, num_groups: int) -> None:
    if num_groups:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.",
            DeprecationWarning,
            stacklevel=3,
        )
        groups = num_groups if groups is None else groups
    if groups is None:
        return
    if not isinstance(groups, list):
        if not isinstance(groups, int) or groups < 0:
            raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
        return
    if any(not isinstance(group, Sequence) or not all(isinstance(p, Tensor) for p in group) for group in groups):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    members = [id(parameter) for group in groups for parameter in group]
    if len(set(members)) < len(members):
        raise ValueError("A parameter can only appear once in groups.")
