"""The state of a training with torch: models, optimisers, schedulers and samplers, each saved in its own way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol

import torch

from syncline.horovod.common.elastic import ObjectState
from syncline.horovod.torch.elastic.sampler import ElasticSampler
from syncline.horovod.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from syncline.horovod.torch.mpi_ops import rank


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class StateHandler:
    """Keeps a copy of one object's state. Write a subclass to sync an object of yours in another way."""

    def __init__(self, value: Any) -> None:
        self.value: Stateful = value
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # A copy: some objects, an optimiser among them, take over the tensors that they are given.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        self.save()

    def set_value(self, value: Any) -> None:
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    value: torch.nn.Module

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(StateHandler):
    value: torch.optim.Optimizer

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


_registry: list[tuple[type, Callable[[Any], StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, StateHandler),
    (ElasticSampler, StateHandler),
]


def get_handler_registry() -> list[tuple[type, Callable[[Any], StateHandler]]]:
    return _registry


def set_handler_registry(registry: list[tuple[type, Callable[[Any], StateHandler]]]) -> None:
    _registry[:] = registry


class TorchState(ObjectState):
    """A model, an optimiser, and whatever else is given by name: each becomes an attribute. Objects with a handler
    are saved and synced by it, all others are pickled."""

    _handlers: dict[str, StateHandler]

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        handlers = {name: _handler(value) for name, value in given.items()}
        object.__setattr__(self, "_handlers", {name: one for name, one in handlers.items() if one is not None})
        for name in self._handlers:
            object.__setattr__(self, name, given[name])
        plain = {name: value for name, value in given.items() if name not in self._handlers}
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **plain)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)


def _handler(value: Any) -> StateHandler | None:
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)
