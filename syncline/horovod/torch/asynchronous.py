"""Collectives that return a handle at once: `synchronize(handle)` gives the result, `poll(handle)` asks for it.

Ranks are matched by name. Without a name, the n-th call of an operation on one rank belongs to the n-th on others.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from syncline import world as process_world
from syncline.horovod import world
from syncline.horovod.common.process_sets import ProcessSet, global_process_set
from syncline.horovod.common.util import num_rank_is_power_2
from syncline.horovod.lane import Task


@dataclass(frozen=True)
class ReduceOp:
    """How values of ranks become one."""

    name: str

    def __repr__(self) -> str:
        return f"hvd.{self.name.capitalize()}"


Average = ReduceOp("average")
Sum = ReduceOp("sum")
Adasum = ReduceOp("adasum")
Min = ReduceOp("min")
Max = ReduceOp("max")
Product = ReduceOp("product")


def op_of(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """`average` is how scripts said it before there was `op`."""
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn(
            "Parameter `average` has been replaced with `op` and will be removed in v1.0",
            DeprecationWarning,
            stacklevel=3,
        )
        return Average if average else Sum
    return Average if op is None else op


def allreduce_async(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Handle of the mean over ranks, or what `op` says, as a new tensor."""
    scale, outputs = [prescale_factor, postscale_factor], [_new_like(tensor)]
    return _reduce("allreduce", [tensor], outputs, op_of(op, average), scale, name, process_set, _only)


def allreduce_async_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """In place."""
    scale = [prescale_factor, postscale_factor]
    return _reduce("allreduce", [tensor], [tensor], op_of(op, average), scale, name, process_set, _only)


def grouped_allreduce_async(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """One request for all of them; the result is a list."""
    scale, outputs = [prescale_factor, postscale_factor], [_new_like(tensor) for tensor in tensors]
    return _reduce("allreduce", list(tensors), outputs, op_of(op, average), scale, name, process_set)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    scale = [prescale_factor, postscale_factor]
    return _reduce("allreduce", list(tensors), list(tensors), op_of(op, average), scale, name, process_set)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: ReduceOp, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Two gathers, of rows and of values. The handle is a function: call it for the result."""
    own = tensor if tensor.is_sparse else tensor.to_sparse()
    own = own.coalesce()
    label = name or f"sparse.{_next_sparse(process_set)}"
    indices = allgather_async(own.indices().t().contiguous(), f"{label}.indices", process_set)
    values = allgather_async(own.values(), f"{label}.values", process_set)

    def handle() -> Tensor:
        all_values, all_indices = synchronize(values), synchronize(indices)
        if op is Average:
            all_values = all_values / size_of(process_set)
        total = torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape, check_invariants=False)
        return total.coalesce()

    return handle


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """All ranks' tensors one after the other; their first dimensions may differ."""
    return _submit("allgather", [tensor], None, name, process_set, after=_only)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    return _submit("allgather", list(tensors), None, name, process_set)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """The root's values as a new tensor."""
    outputs = [_new_like(tensor)]
    root = _check_root(root_rank, process_set)
    return _submit("broadcast", [tensor], outputs, name, process_set, after=_only, root=root)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    root = _check_root(root_rank, process_set)
    return _submit("broadcast", [tensor], [tensor], name, process_set, after=_only, root=root)


def alltoall_async(
    tensor: Tensor, splits: Tensor | Sequence[int] | None = None, name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Rows of each rank to each rank, as many as `splits` says, or evenly. With splits, the result is the rows and
    how many came from each rank."""
    rows = _rows_for_each(tensor, splits, size_of(process_set))

    def after(result: tuple[Tensor, list[int]]) -> Any:
        output, received = result
        device = splits.device if isinstance(splits, Tensor) else None
        return output if splits is None else (output, torch.tensor(received, dtype=torch.int32, device=device))

    return _submit("alltoall", [tensor], None, name, process_set, after=after, splits=rows)


def reducescatter_async(
    tensor: Tensor, name: str | None = None, op: ReduceOp = Average, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:  # fmt: skip
    """This rank's rows of the mean or sum."""
    _check_rows([tensor], op)
    scale = [prescale_factor, postscale_factor]
    return _reduce("reducescatter", [tensor], None, op, scale, name, process_set, _only)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor], name: str | None = None, op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:  # fmt: skip
    _check_rows(tensors, op)
    return _reduce("reducescatter", list(tensors), None, op, [prescale_factor, postscale_factor], name, process_set)


def poll(handle: int) -> bool:
    """Whether `synchronize` would return at once."""
    return world.current().lane.poll(handle)


def synchronize(handle: Any) -> Any:
    """Wait for the result of a handle. A HorovodInternalError if ranks disagree, or one is lost."""
    if callable(handle):
        return handle()
    start_ns = time.monotonic_ns()
    result = world.current().lane.wait(handle)
    process_world.tell(start_ns)
    return result


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when all ranks have come here, whatever else is on its way."""
    synchronize(_submit("barrier", [], None, None, process_set))


def join(device: int = -1) -> int:
    """This rank has no more batches: supply zeros for what others still average, until all have joined. The last
    rank that did. Only averages and other reductions work meanwhile."""
    here = world.current()
    return here.lane.join(here.shadow)


def size_of(process_set: ProcessSet) -> int:
    size = process_set.size()
    if size is None:
        raise ValueError(f"{process_set} has not been added; use hvd.add_process_set.")
    return size


def _reduce(
    kind: str, tensors: list[Tensor], outputs: list[Tensor] | None, op: ReduceOp, scale: list[float],
    name: str | None, process_set: ProcessSet, after: Callable[[Any], Any] = lambda result: result,
) -> int:  # fmt: skip
    if op is Adasum and not num_rank_is_power_2(size_of(process_set)):
        raise NotImplementedError("Running Adasum with non-power of 2 ranks is not supported yet.")
    scale = [float(factor) for factor in scale]
    return _submit(kind, tensors, outputs, name, process_set, after=after, op=op.name, scale=scale)


def _submit(
    kind: str, tensors: list[Tensor], outputs: list[Tensor] | None, name: str | None, process_set: ProcessSet,
    *, after: Callable[[Any], Any] = lambda result: result, **more: Any,
) -> int:  # fmt: skip
    here = world.current()
    size_of(process_set)
    if not process_set.included():
        raise ValueError(f"rank {here.rank} is not in {process_set}.")
    if len({tensor.device.type for tensor in tensors}) > 1:
        raise ValueError("tensors of one request must be on one device.")
    for tensor in tensors:
        if tensor.is_sparse:
            raise ValueError(f"a sparse tensor cannot be given to {kind}; use sparse_allreduce_async.")
    request = {
        "kind": kind,
        "set": process_set.process_set_id,
        "shapes": [list(tensor.shape) for tensor in tensors],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
        "device": tensors[0].device.type if tensors else "cpu",
        **more,
    }
    return here.lane.submit(Task(request, tensors, outputs, after), name)


def _only(results: list[Any]) -> Any:
    return results[0]


def _new_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, requires_grad=False, memory_format=torch.contiguous_format)


def _check_root(root: int, process_set: ProcessSet) -> int:
    if root not in (process_set.ranks or ()):
        raise ValueError(f"broadcast received invalid root rank {root} for {process_set}.")
    return root


def _check_rows(tensors: Sequence[Tensor], op: ReduceOp) -> None:
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError("reducescatter does not support scalar inputs.")
    if op not in (Average, Sum):
        raise NotImplementedError("reducescatter supports Average and Sum only.")


def _rows_for_each(tensor: Tensor, splits: Tensor | Sequence[int] | None, size: int) -> list[int]:
    if tensor.dim() == 0:
        raise ValueError("alltoall does not support scalar inputs.")
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            raise ValueError(f"alltoall without splits: {rows} rows cannot be divided evenly among {size} ranks.")
        return [rows // size] * size
    if isinstance(splits, Tensor) and splits.dtype != torch.int32:
        raise ValueError(f"alltoall expects splits to contain 32-bit integer elements, not {splits.dtype}.")
    counts = [int(count) for count in (splits.tolist() if isinstance(splits, Tensor) else splits)]
    if len(counts) != size or min(counts, default=0) < 0:
        raise ValueError(f"alltoall needs one number of rows for each of {size} ranks, not {counts}.")
    if sum(counts) > rows:
        raise ValueError(f"Sum of splits entries is greater than the first dimension of tensor: {counts}, {rows}.")
    return counts


def _next_sparse(process_set: ProcessSet) -> int:
    return world.current().next_number(f"sparse {process_set.process_set_id}")
