"""State from one rank to the others: objects, parameters, optimiser state."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from syncline.horovod import world
from syncline.horovod.common.process_sets import ProcessSet, global_process_set
from syncline.horovod.torch.asynchronous import allgather_async, broadcast_async_, synchronize
from syncline.launcher.wire import pack, unpack


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:  # fmt: skip
    """The root's values on every rank, in place: of `model.state_dict()` or `model.named_parameters()`."""
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, str | Tensor) or not isinstance(params, Iterable):
        raise ValueError(f"invalid params of type: {type(params)}")
    else:
        pairs = [pair if isinstance(pair, tuple) else ("", pair) for pair in params]
    named = [(name or None, value) for name, value in pairs if isinstance(value, Tensor)]
    handles = [broadcast_async_(value, root_rank, name, process_set) for name, value in named]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:  # fmt: skip
    """The root's optimiser state on every rank: tensors, numbers, None and nested options. Parameters do not change,
    whether or not a rank has made a step yet. Collective."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    # The state's own description travels as an object, with tensors as shapes: ranks may not have made a step yet.
    own = optimizer.state_dict()
    tensors: list[Tensor] = []
    described = broadcast_object(_without_tensors(own, tensors), root_rank, "optimizer state", process_set)
    if not described["state"]:
        _zero_missing_gradients(optimizer)
    is_root = world.current().rank == root_rank
    received = tensors if is_root else _tensors_for(described, optimizer)
    handles = [
        broadcast_async_(tensor, root_rank, f"optimizer state.{number}", process_set)
        for number, tensor in enumerate(received)
    ]
    for handle in handles:
        synchronize(handle)
    if not is_root:
        optimizer.load_state_dict(_with_tensors(described, received))


def _zero_missing_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Horovod leaves zeros behind where the root has made no step yet, and scripts read them."""
    if isinstance(optimizer, torch.optim.SparseAdam):  # it refuses dense ones
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


class _Shape:
    """A tensor in the description of a state."""

    def __init__(self, number: int, tensor: Tensor) -> None:
        self.number, self.shape, self.dtype, self.device = number, tensor.shape, tensor.dtype, tensor.device.type


def _without_tensors(state: Any, tensors: list[Tensor]) -> Any:
    if isinstance(state, Tensor):
        tensors.append(state)
        return _Shape(len(tensors) - 1, state)
    if isinstance(state, Mapping):
        return {key: _without_tensors(value, tensors) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)([_without_tensors(value, tensors) for value in state])
    return copy.copy(state)


def _tensors_for(described: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Room for the tensors of a description, by number."""
    gpu = next((p.device for group in optimizer.param_groups for p in group["params"] if p.is_cuda), None)
    found: dict[int, Tensor] = {}

    def look(state: Any) -> None:
        if isinstance(state, _Shape):
            device = gpu if gpu is not None and state.device != "cpu" else torch.device("cpu")
            found[state.number] = torch.empty(state.shape, dtype=state.dtype, device=device)
        elif isinstance(state, Mapping):
            for value in state.values():
                look(value)
        elif isinstance(state, list | tuple):
            for value in state:
                look(value)

    look(described)
    return [found[number] for number in range(len(found))]


def _with_tensors(described: Any, tensors: list[Tensor]) -> Any:
    if isinstance(described, _Shape):
        return tensors[described.number]
    if isinstance(described, Mapping):
        return {key: _with_tensors(value, tensors) for key, value in described.items()}
    if isinstance(described, list | tuple):
        return type(described)([_with_tensors(value, tensors) for value in described])
    return described


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's object on every rank, pickled by cloudpickle. Collective."""
    is_root = world.current().rank == root_rank
    data = _bytes_of(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([data.numel()])
    synchronize(broadcast_async_(length, root_rank, name and f"{name}.length", process_set))
    if not is_root:
        data = torch.empty(int(length), dtype=torch.uint8)
    synchronize(broadcast_async_(data, root_rank, name and f"{name}.data", process_set))
    return obj if is_root else unpack(data.numpy().tobytes())


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """A function that broadcasts an object."""
    return lambda obj: broadcast_object(obj, root_rank, name, process_set)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Every rank's object, by rank. Collective."""
    data = _bytes_of(obj)
    length = torch.tensor([data.numel()])
    lengths = synchronize(allgather_async(length, name and f"{name}.length", process_set)).tolist()
    gathered = synchronize(allgather_async(data, name and f"{name}.data", process_set))
    return [unpack(part.numpy().tobytes()) for part in gathered.split(lengths)]


def _bytes_of(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(pack(obj)), dtype=torch.uint8)
