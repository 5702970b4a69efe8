"""GradientSync: what a method is. One small object, one verb: `finish`.

sync = AllReduce(communicator)
model = sync.attach(model)          # same start on every rank; returns the module to call
loss.backward()
sync.finish()                       # now every .grad is the mean over all ranks
optimizer.step()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from syncline.comm.communicator import Communicator
from syncline.errors import PlanError
from syncline.spans import EventLog
from syncline.sync.hooks import CommHook


class GradientSync(ABC):
    """A method of making every rank's .grad the mean over ranks."""

    rebuilds_after_first_backward = False
    """True if the summation order changes after the first backward: a run that must be repeatable bit for bit,
    also from a checkpoint, makes one discarded backward first."""
    holds_gradients = False
    """True if `.grad` lies in the method's buffers, so that gradients need no other memory."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.log = EventLog(keep=False)
        """Where time spent on copying gradients is noted; make_sync puts the rank's own here."""
        self._paused = False
        self._hooks: list[RemovableHandle] = []
        self._own_channels: list[Communicator] = []

    @abstractmethod
    def attach(self, model: nn.Module) -> nn.Module:
        """Give every rank rank 0's parameters and buffers; return the module to call. Collective."""

    @abstractmethod
    def finish(self) -> None:
        """Return when every .grad holds the mean over ranks. Idempotent until the next backward. Collective."""

    @property
    def buffer_bytes(self) -> int:
        """Memory that the method keeps from step to step for its transfers."""
        return 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward accumulates locally and nothing is sent; the next finish outside sends the sum."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def finish_without_gradients(self) -> None:
        """Take part in the others' finish with zeros: this rank has no batch left. Collective."""
        raise PlanError(f"method {type(self).__name__} cannot take part without a batch.")

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Let one of torch's communication hooks average the buckets."""
        raise PlanError(f"method {type(self).__name__} has no buckets for a communication hook.")

    def detach(self) -> None:
        """Remove what attach put on the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for channel in self._own_channels:
            channel.close()
        self._own_channels.clear()

    def own_channel(self, name: str) -> Communicator:
        """The same ranks on channels beside the gradients', closed by detach. Collective."""
        channel = self.communicator.split(name)
        self._own_channels.append(channel)
        return channel

    def share_buffers(self, model: nn.Module) -> None:
        """From now on, rank 0's buffers on every rank before each forward in training whose gradients are averaged.
        After attach."""

        def share(_module: nn.Module, _args: object) -> None:
            if model.training and torch.is_grad_enabled() and not self._paused:
                with self.communicator.scope("buffers"):
                    for name, buffer in model.named_buffers():
                        self.communicator.broadcast(buffer, label=name)

        self._hooks.append(model.register_forward_pre_hook(share))

    def state(self) -> dict[str, Any]:
        """What decides the order of summation; part of a checkpoint."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """After attach: sum in the order of the run that `state` comes from."""
        assert not state, f"{type(self).__name__} keeps no state"


class Single(GradientSync):
    """single: one worker on the whole batch. Nothing is sent."""

    def attach(self, model: nn.Module) -> nn.Module:
        return model

    def finish(self) -> None:
        pass

    def finish_without_gradients(self) -> None:
        pass


def broadcast_state(communicator: Communicator, model: nn.Module, *, root: int = 0) -> None:
    """The root's parameters and buffers on every rank."""
    with communicator.scope("attach"):
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            communicator.broadcast(tensor.data, root=root, label=name)
