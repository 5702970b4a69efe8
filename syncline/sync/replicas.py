"""thread-replicas: one process, a replica of the model for each worker; torch's own DataParallel on GPUs.

The batch is split, each replica takes its part in a thread of its own, the outputs are put together, and the caller's
one backward runs every replica's backward in its thread again and adds the gradients up on the master copy. (One
backward over put-together outputs would run the replicas one after the other on a CPU.)

Replicas share the master's parameters in memory, so nothing is copied before a step. Batch norm is left as torch's
DataParallel leaves it: the first replica works on the master's buffers, what the others learn is forgotten.

All threads share one Python interpreter, which runs one of them at a time between operations: prefer processes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from syncline.comm.communicator import Communicator
from syncline.errors import PlanError
from syncline.sync.base import GradientSync

Result = TypeVar("Result")


class Replicated(GradientSync):
    sees_gradients = False
    stands_alone = True

    def __init__(self, communicator: Communicator, *, replicas: int = 2) -> None:
        super().__init__(communicator)
        self._num_replicas = replicas
        self._module: nn.Module | None = None

    def attach(self, model: nn.Module) -> nn.Module:
        if next(model.parameters()).is_cuda:
            self._module = nn.DataParallel(model, device_ids=list(range(self._num_replicas)))
        else:
            self._module = Replicas(model, self._num_replicas)
        return self._module

    def finish(self) -> None:
        """The gradients were added up inside backward."""

    def finish_without_gradients(self) -> None:
        pass

    def detach(self) -> None:
        super().detach()
        if isinstance(self._module, Replicas):
            self._module.close()
        self._module = None


class Replicas(nn.Module):
    """Call it like the model. Outputs must be a tensor, or a tuple of tensors, with samples along the first axis."""

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()
        self.module = model
        # Not registered as modules: an optimiser must see the master's parameters only.
        self._copies = [model, *(_sharing_parameters(model) for _ in range(count - 1))]
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="syncline-replica")

    def forward(self, inputs: Tensor) -> Any:
        parts = inputs.chunk(len(self._copies))
        for replica in self._copies[1 : len(parts)]:
            replica.train(self.module.training)
            for own, master in zip(replica.buffers(), self.module.buffers(), strict=True):
                own.copy_(master)
        if len(parts) == 1 or not torch.is_grad_enabled():
            return _joined([replica(part) for replica, part in zip(self._copies, parts, strict=False)])
        outputs = self._in_threads(lambda pair: pair[0](pair[1]), zip(self._copies, parts, strict=False))
        heads = [_as_tuple(output) for output in outputs]
        anchor = torch.zeros((), requires_grad=True)
        joined = _Gathered.apply(self, heads, anchor)  # type: ignore[no-untyped-call]
        return joined[0] if isinstance(outputs[0], Tensor) else joined

    def backward_in_threads(self, heads: list[tuple[Tensor, ...]], gradients: tuple[Tensor, ...]) -> None:
        """Every replica's backward at once, then the sum of their gradients on the master."""
        sizes = [len(outputs[0]) for outputs in heads]
        cut = list(zip(*(gradient.split(sizes) for gradient in gradients), strict=True))
        self._in_threads(lambda pair: torch.autograd.backward(pair[0], pair[1]), zip(heads, cut, strict=True))
        for replica in self._copies[1 : len(heads)]:
            for master, own in zip(self.module.parameters(), replica.parameters(), strict=True):
                if own.grad is not None:
                    master.grad = own.grad if master.grad is None else master.grad.add_(own.grad)
                    own.grad = None

    def close(self) -> None:
        self._pool.shutdown()

    def _in_threads(self, function: Callable[[Any], Result], items: Iterable[Any]) -> list[Result]:
        """In the caller's precision, which every thread has its own of."""
        enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

        def in_precision(item: Any) -> Result:
            with torch.autocast("cpu", dtype, enabled=enabled):
                return function(item)

        return list(self._pool.map(in_precision, items))


class _Gathered(torch.autograd.Function):
    """Puts the replicas' outputs together; its backward is theirs.

    Their graphs are not part of the caller's graph, which would walk them a second time: what makes the result need
    a gradient is the anchor.
    """

    @staticmethod
    def forward(ctx: Any, replicas: Replicas, heads: list[tuple[Tensor, ...]], anchor: Tensor) -> tuple[Tensor, ...]:
        ctx.replicas, ctx.heads = replicas, heads
        return tuple(torch.cat([outputs[number].detach() for outputs in heads]) for number in range(len(heads[0])))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.replicas.backward_in_threads(ctx.heads, gradients)
        return None, None, None


def _sharing_parameters(model: nn.Module) -> nn.Module:
    """A copy whose parameters are the master's own memory, with gradients of their own."""
    memo = {id(own): nn.Parameter(own.data, requires_grad=own.requires_grad) for own in model.parameters()}
    return copy.deepcopy(model, memo)


def _joined(outputs: list[Any]) -> Any:
    heads = list(zip(*(_as_tuple(output) for output in outputs), strict=True))
    joined = tuple(torch.cat(parts) for parts in heads)
    return joined[0] if isinstance(outputs[0], Tensor) else joined


def _as_tuple(output: Any) -> tuple[Tensor, ...]:
    parts = (output,) if isinstance(output, Tensor) else output
    if not isinstance(parts, tuple | list) or not all(isinstance(part, Tensor) for part in parts):
        raise PlanError(
            f"method thread-replicas needs outputs that are tensors or tuples of tensors, not {type(output)}.",
            action="Use another method, such as ddp.",
        )
    return tuple(parts)
