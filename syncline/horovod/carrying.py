"""What an agreed request does to tensors, over a Communicator. Called in one order on all ranks.

Tensors travel as flat copies. What only moves goes as bytes, so that every type travels. Gloo cannot add 16-bit and
Boolean integers: those are added as 32-bit ones. Smallest, largest, product and Adasum gather and compute here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from syncline.comm.communicator import Communicator

_WIDER = {torch.int16: torch.int32, torch.bool: torch.int32}


def allreduce(tensors: Sequence[Tensor], op: str, scale: Sequence[float], ranks: Communicator) -> list[Tensor]:
    """The reduced values of each, as flat tensors. Those of one type travel as one."""
    flat = [scaled(_flat(tensor), scale[0]) for tensor in tensors]
    reduced = [_adasum_of(part, ranks) for part in flat] if op == "adasum" else _reduce_by_type(flat, op, ranks)
    reduced = [scaled(part, scale[1]) for part in reduced]
    return [_divided(part, ranks.world_size) for part in reduced] if op == "average" else reduced


def _reduce_by_type(flat: list[Tensor], op: str, ranks: Communicator) -> list[Tensor]:
    reduced = list(flat)
    for kind in dict.fromkeys((part.dtype, part.device) for part in flat):
        numbers = [number for number, part in enumerate(flat) if (part.dtype, part.device) == kind]
        together = torch.cat([flat[number] for number in numbers])  # a copy, also of one
        total = _reduce(together, op, ranks)
        for number, part in zip(numbers, total.split([flat[number].numel() for number in numbers]), strict=True):
            reduced[number] = part
    return reduced


def _reduce(values: Tensor, op: str, ranks: Communicator) -> Tensor:
    if not values.numel() or ranks.world_size == 1:
        return values
    if op in _COMBINE:
        parts = gather(values, [values.numel()] * ranks.world_size, ranks)
        total = parts[0]
        for part in parts[1:]:
            total = _COMBINE[op](total, part)
        return total
    wide = values.to(_WIDER.get(values.dtype, values.dtype))
    ranks.all_reduce(wide)
    return wide.to(values.dtype)


_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}


def scaled(values: Tensor, factor: float) -> Tensor:
    """Integers are scaled as doubles and cut off, halves as floats."""
    if factor == 1.0:
        return values
    if not values.is_floating_point():
        return (values.double() * factor).to(values.dtype)
    if values.dtype in (torch.float16, torch.bfloat16):
        return (values.float() * factor).to(values.dtype)
    return values * factor


def _divided(values: Tensor, divisor: int) -> Tensor:
    if values.dtype == torch.bool:
        return values
    return values / divisor if values.is_floating_point() else values.div(divisor, rounding_mode="trunc")


def _adasum_of(values: Tensor, ranks: Communicator) -> Tensor:
    """Pairs of ranks, then pairs of pairs: what points the same way is averaged, what is orthogonal is added."""
    parts = [part.double() for part in gather(values, [values.numel()] * ranks.world_size, ranks)]
    while len(parts) > 1:
        parts = [_adasum(left, right) for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0].to(values.dtype)


def _adasum(left: Tensor, right: Tensor) -> Tensor:
    dot, left_norm, right_norm = (float(product) for product in (left @ right, left @ left, right @ right))
    left_factor = 1 - dot / (2 * left_norm) if left_norm else 1.0
    right_factor = 1 - dot / (2 * right_norm) if right_norm else 1.0
    return left_factor * left + right_factor * right


def gather(values: Tensor, counts: Sequence[int], ranks: Communicator) -> list[Tensor]:
    """Every rank's flat values; `counts` says how many each has."""
    if len(set(counts)) == 1:
        if not counts[0]:
            return [values.clone() for _ in counts]
        return [part.view(values.dtype) for part in ranks.all_gather(_bytes(values))]
    parts = []
    for rank, count in enumerate(counts):  # one after the other, so that nobody needs room for the longest of all
        part = values.clone() if rank == ranks.rank else values.new_empty(count)
        if count:
            ranks.broadcast(_bytes(part), root=rank)
        parts.append(part)
    return parts


def allgather(tensor: Tensor, shapes: Sequence[Sequence[int]], ranks: Communicator) -> Tensor:
    """Along the first dimension, in which ranks may differ. Numbers are gathered into a vector."""
    shapes = [shape or [1] for shape in shapes]
    parts = gather(_flat(tensor), [math.prod(shape) for shape in shapes], ranks)
    return torch.cat([part.view(*shape) for part, shape in zip(parts, shapes, strict=True)])


def broadcast(tensor: Tensor, root: int, ranks: Communicator) -> Tensor:
    flat = _flat(tensor).clone()
    if flat.numel():
        ranks.broadcast(_bytes(flat), root=root)
    return flat


def alltoall(
    tensor: Tensor, splits_by_rank: Sequence[Sequence[int]], ranks: Communicator
) -> tuple[Tensor, list[int]]:
    """What all ranks have for this one, in rank order, and how many rows came from each."""
    own = tensor.detach()[: sum(splits_by_rank[ranks.rank])].contiguous()
    received_rows = [splits[ranks.rank] for splits in splits_by_rank]
    outgoing = own.split(list(splits_by_rank[ranks.rank]))
    incoming = [own.new_empty(rows, *own.shape[1:]) for rows in received_rows]
    incoming[ranks.rank].copy_(outgoing[ranks.rank])
    peers = [rank for rank in range(ranks.world_size) if rank != ranks.rank]
    works = [ranks.receive(_bytes(incoming[peer].view(-1)), peer) for peer in peers if incoming[peer].numel()] + [
        ranks.send(_bytes(_flat(outgoing[peer])), peer) for peer in peers if outgoing[peer].numel()
    ]
    for work in works:
        work.wait()
    return torch.cat(incoming), received_rows


def reducescatter(tensors: Sequence[Tensor], op: str, scale: Sequence[float], ranks: Communicator) -> list[Tensor]:
    """This rank's rows of each sum. Rows are divided evenly; the first ranks have those that are left."""
    results = []
    for tensor, total in zip(tensors, allreduce(tensors, op, scale, ranks), strict=True):
        rows, left = divmod(tensor.shape[0], ranks.world_size)
        counts = [rows + (rank < left) for rank in range(ranks.world_size)]
        results.append(total.view(tensor.shape).split(counts)[ranks.rank].clone())
    return results


def zeros_for(request: dict[str, Any]) -> list[Tensor]:
    """What a rank that has joined supplies."""
    kinds = zip(request["shapes"], request["dtypes"], strict=True)
    return [torch.zeros(shape, dtype=getattr(torch, dtype), device=request["device"]) for shape, dtype in kinds]


def _flat(tensor: Tensor) -> Tensor:
    """In one piece; a tensor of one element may have any stride."""
    flat = tensor.detach().reshape(-1)
    return flat if flat.stride(0) == 1 else flat.new_empty(flat.shape).copy_(flat)


def _bytes(values: Tensor) -> Tensor:
    return values.view(torch.uint8)
