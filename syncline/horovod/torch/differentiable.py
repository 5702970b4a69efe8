"""The blocking forms, through which gradients pass as Horovod defines them.

An average's gradient is the average of the gradients, a sum's the sum. A gather or broadcast assumes that every rank
computes the same loss from its result: its gradient is the mean over ranks of what comes back for this rank's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from syncline.horovod.common.process_sets import ProcessSet, global_process_set
from syncline.horovod.torch.asynchronous import (
    Average,
    ReduceOp,
    Sum,
    allreduce_async_,
    alltoall_async,
    broadcast_async,
    broadcast_async_,
    grouped_allgather_async,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter_async,
    op_of,
    size_of,
    synchronize,
)
from syncline.horovod.torch.compression import Compression


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, options: dict[str, Any], *tensors: Tensor) -> Any:
        ctx.options = options
        return tuple(synchronize(grouped_allreduce_async(tensors, name=name, **options)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None, None, *grouped_allreduce(gradients, **ctx.options))


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> Any:
        ctx.rows, ctx.process_set = [tensor.shape[0] if tensor.dim() else 1 for tensor in tensors], process_set
        ctx.shapes = [tensor.shape for tensor in tensors]
        return tuple(synchronize(grouped_allgather_async(tensors, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        means = grouped_allreduce(gradients, op=Average, process_set=ctx.process_set)
        rows = allgather(torch.tensor([ctx.rows]), process_set=ctx.process_set)
        rank = ctx.process_set.rank()
        starts = rows[:rank].sum(0).tolist()
        own = [mean[start : start + n] for mean, start, n in zip(means, starts, ctx.rows, strict=True)]
        return (None, None, *(part.view(shape) for part, shape in zip(own, ctx.shapes, strict=True)))


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, in_place: bool
    ) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        if in_place:
            ctx.mark_dirty(tensor)
        start = broadcast_async_ if in_place else broadcast_async
        return synchronize(start(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        mean = allreduce(gradient, op=Average, process_set=ctx.process_set)
        ranks = ctx.process_set.ranks
        is_root = ranks[ctx.process_set.rank()] == ctx.root_rank
        return mean if is_root else torch.zeros_like(mean), None, None, None, None


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        rows, size = tensor.shape[0] if tensor.dim() else 0, size_of(process_set)
        ctx.process_set, ctx.rows = process_set, rows
        even = torch.full((size,), rows // size, dtype=torch.int32)
        wanted = splits if splits is not None or rows % size or not tensor.dim() else even
        result = synchronize(alltoall_async(tensor, wanted, name, process_set))
        output, received = result
        ctx.received = received
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:
        back, _rows = synchronize(alltoall_async(gradient, ctx.received, None, ctx.process_set))
        unsent = ctx.rows - back.shape[0]
        if unsent:  # rows that splits left out went nowhere
            back = torch.cat([back, back.new_zeros(unsent, *back.shape[1:])])
        return back, None, None, None


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, options: dict[str, Any], *tensors: Tensor) -> Any:
        ctx.options = options
        return tuple(synchronize(grouped_reducescatter_async(tensors, name, **options)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Horovod's: of a sum, the gathered gradients are multiplied by the number of ranks."""
        process_set = ctx.options["process_set"]
        factor = ctx.options["prescale_factor"] * ctx.options["postscale_factor"]
        factor *= size_of(process_set) if ctx.options["op"] is Sum else 1
        gathered = synchronize(grouped_allgather_async(gradients, None, process_set))
        return (None, None, *(part * factor for part in gathered))


def allreduce(
    tensor: Tensor, average: bool | None = None, name: str | None = None, compression: Any = Compression.none,
    op: ReduceOp | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:  # fmt: skip
    """The mean over ranks, or what `op` says, as a new tensor."""
    return grouped_allreduce(
        [tensor], None, name, compression, op_of(op, average), prescale_factor, postscale_factor, process_set
    )[0]


def allreduce_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Tensor:  # fmt: skip
    """In place."""
    how = (op_of(op, average), prescale_factor, postscale_factor, process_set)
    done: Tensor = synchronize(allreduce_async_(tensor, None, name, *how))
    return done


def grouped_allreduce(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None,
    compression: Any = Compression.none, op: ReduceOp | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[Tensor]:  # fmt: skip
    """As one request."""
    options = {
        "op": op_of(op, average),
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
        "process_set": process_set,
    }
    compressed = [compression.compress(tensor) for tensor in tensors]
    reduced = _Allreduce.apply(name, options, *(values for values, _ in compressed))  # type: ignore[no-untyped-call]
    contexts = [context for _, context in compressed]
    return [compression.decompress(values, context) for values, context in zip(reduced, contexts, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[Tensor]:  # fmt: skip
    how = (op_of(op, average), prescale_factor, postscale_factor, process_set)
    done: list[Tensor] = synchronize(grouped_allreduce_async_(tensors, None, name, *how))
    return done


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """All ranks' tensors one after the other; their first dimensions may differ."""
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    return list(_Allgather.apply(name, process_set, *tensors))  # type: ignore[no-untyped-call]


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The root's values as a new tensor."""
    received: Tensor = _Broadcast.apply(tensor, root_rank, name, process_set, False)  # type: ignore[no-untyped-call]
    return received


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """In place."""
    done: Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return done


def alltoall(
    tensor: Tensor, splits: Tensor | Sequence[int] | None = None, name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:  # fmt: skip
    """Rows of each rank to each rank. With splits: the rows, and how many came from each rank."""
    output, received = _Alltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    return output if splits is None else (output, received)


def reducescatter(
    tensor: Tensor, name: str | None = None, compression: Any = Compression.none, op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """This rank's rows of the mean or sum."""
    return grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor], name: str | None = None, compression: Any = Compression.none, op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[Tensor]:  # fmt: skip
    options = {
        "op": op,
        "process_set": process_set,
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
    }
    compressed = [compression.compress(tensor) for tensor in tensors]
    reduced = _Reducescatter.apply(name, options, *(values for values, _ in compressed))  # type: ignore[no-untyped-call]
    contexts = [context for _, context in compressed]
    return [compression.decompress(values, context) for values, context in zip(reduced, contexts, strict=True)]
