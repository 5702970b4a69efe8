"""mean, sum and gather: a number or a tensor over all ranks, the same result on every rank.

    loss = syncline.mean(loss)                                     # over the global batch, in the loop
    accuracy = syncline.sum(correct) / syncline.sum(count)         # after an evaluation
    predictions = torch.cat(syncline.gather(predictions))          # in rank order

Collective: every rank calls them. They run alone, under any launcher, and in a group that the script has made. What
they return carries no gradient.
"""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from syncline import world
from syncline.comm import Communicator
from syncline.errors import UsageError
from syncline.shares import Share, current_share

_DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_MOST_DIMENSIONS = 8


@overload
def mean(value: Tensor, *, weight: float | None = None) -> Tensor: ...
@overload
def mean(value: float, *, weight: float | None = None) -> float: ...
def mean(value: Tensor | float, *, weight: float | None = None) -> Tensor | float:
    """The mean over ranks, each counted by its weight: by default the samples that the rank has of the batch of the
    loop's `syncline.loader`, outside such a loop 1.

    A rank of weight 0 does not count, whatever its value, nan included. The mean of nothing is nan.
    """
    share = _share_of_all()
    if weight is None:
        weight = share.num_samples if share is not None else 1
    if not weight >= 0:
        raise UsageError(f"weight {weight} is not a weight.", action="Give 0 or a positive number.")
    own = _as_tensor(value).to(torch.float64)
    sums = torch.zeros(own.numel() + 1, dtype=torch.float64)
    if weight:
        sums[:-1], sums[-1] = own.reshape(-1) * weight, weight
    sums = _summed(sums, "mean")
    result = (sums[:-1] / sums[-1]).reshape(own.shape)
    if not isinstance(value, Tensor):
        return float(result)
    return result.to(value.device, value.dtype if value.is_floating_point() else torch.get_default_dtype())


@overload
def sum(value: Tensor) -> Tensor: ...
@overload
def sum(value: int) -> int: ...
@overload
def sum(value: float) -> float: ...
def sum(value: Tensor | float) -> Tensor | float:
    """The sum over ranks. Whole numbers are exact up to 2**53."""
    _share_of_all()
    own = _as_tensor(value)
    result = _summed(own.to(torch.float64).reshape(-1), "sum").reshape(own.shape)
    if isinstance(value, Tensor):
        return result.to(value.device, value.dtype if value.is_floating_point() else torch.int64)
    return float(result) if own.is_floating_point() else int(result)


@overload
def gather(value: Tensor) -> list[Tensor]: ...
@overload
def gather(value: int) -> list[int]: ...
@overload
def gather(value: float) -> list[float]: ...
def gather(value: Tensor | float) -> list[Tensor] | list[int] | list[float]:
    """Every rank's value, by rank. Tensors may differ in shape, and be empty where a rank has nothing."""
    _share_of_all()
    own = _as_tensor(value)
    if own.dim() > _MOST_DIMENSIONS or own.dtype not in _DTYPES:
        raise UsageError(f"cannot gather a tensor of {own.dim()} dimensions and type {own.dtype}.")
    with world.talking() as channel:
        parts = _gathered(own, channel)
    if isinstance(value, Tensor):
        return [part.to(value.device) for part in parts]
    return [part.item() for part in parts]


def _share_of_all() -> Share | None:
    """The share that the loop is at; an error rather than a wait for ranks that are not in this turn of the loop."""
    share = current_share()
    if share is not None and not share.everywhere:
        raise UsageError(
            f"the last batch has {share.num_global} samples: not all of the {share.world_size} ranks have one, and "
            "in evaluation those that have none are not given the batch.",
            action="Add up over the batches, and call syncline's mean, sum or gather after the loop.",
        )
    return share


def _as_tensor(value: Tensor | float) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to("cpu")
    return torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def _summed(own: Tensor, what: str) -> Tensor:
    with world.talking() as channel:
        if channel.world_size == 1:
            return own
        total = own.to(channel.device, copy=True)
        with channel.scope(what):
            channel.all_reduce(total, label=what)
        return total.cpu()


def _gathered(own: Tensor, channel: Communicator) -> list[Tensor]:
    """As bytes, as many as the longest rank has: any type, and shapes that differ."""
    if channel.world_size == 1:
        return [own]
    filler = [0] * (_MOST_DIMENSIONS - own.dim())
    about = torch.tensor([_DTYPES.index(own.dtype), own.dim(), *own.shape, *filler], device=channel.device)
    with channel.scope("gather"):
        descriptions = [part.tolist() for part in channel.all_gather(about, label="shapes")]
        others = [(_DTYPES[kind], shape[:num_dims]) for kind, num_dims, *shape in descriptions]
        lengths = [torch.Size(shape).numel() * dtype.itemsize for dtype, shape in others]
        sent = torch.zeros(max(lengths), dtype=torch.uint8)
        sent[: own.nbytes] = own.contiguous().reshape(-1).view(torch.uint8)
        received = [part.cpu() for part in channel.all_gather(sent.to(channel.device), label="values")]
    return [
        part[:length].clone().view(dtype).reshape(shape)
        for part, length, (dtype, shape) in zip(received, lengths, others, strict=True)
    ]
