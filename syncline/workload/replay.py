"""Replayed compute: a model that sleeps recorded times, layer by layer, and whose gradients really travel.

Loads nothing but the network. Gradients have the recorded sizes, shapes and order; their values are all 1, so their
mean is 1 and the memory that holds them never has to be written again. Weights stay untouched, so all of them are
views of one piece of memory.

Forward calls a module for every layer, which sleeps, and the optimiser sleeps for the parameters that have a
gradient. So a method that updates a layer when it is next called does so here, too: the layer waits for its
gradients, then sleeps its part of the update, then its forward.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn

from syncline.workload.recorded import ComputeTimes, Gradient
from syncline.workload.sharding import Shard
from syncline.workload.tasks import classification

SHORTEST_SLEEP_NS = 100_000
"""A sleep overshoots by about 60 us: shorter ones are left out and added to the next."""


class Timeline:
    """Sleeps one duration after the other. A sleep that overshoots makes the next one shorter: errors do not add up.

    Only its own errors: what the method does between two sleeps (packing, sending) takes its own time on top.
    """

    def __init__(self) -> None:
        self._late_ns = 0

    def restart(self) -> None:
        """Forget what is owed: a long stall must not shorten the next step."""
        self._late_ns = 0

    def sleep(self, seconds: float) -> None:
        start = time.monotonic_ns()
        target = start - self._late_ns + round(seconds * 1e9)
        if target - start >= SHORTEST_SLEEP_NS:
            time.sleep((target - start) / 1e9)
        self._late_ns = time.monotonic_ns() - target


class _Layer(nn.Module):
    """Sleeps when it is called."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self.seconds = 0.0
        self._timeline = timeline

    def forward(self) -> None:
        self._timeline.sleep(self.seconds)


class ReplayedModel(nn.Module):
    """Takes any input and returns one logit for one class, which every classification loss accepts."""

    def __init__(self, times: ComputeTimes) -> None:
        super().__init__()
        self.times = times
        self.timeline = Timeline()
        weights, updates_s = _shared_memory_for(times), times.updates_s
        # Registered from input to output, as models do: methods guess the order of readiness from it.
        self._gradients = [
            _PlacedGradient(gradient, _register(self, gradient, weights), updates_s[gradient.parameter])
            for gradient in reversed(times.backward)
        ]
        self._updates_s = {placed.parameter: placed.update_s for placed in self._gradients}
        self._calls = self._forward_calls()
        for buffer in times.buffers:
            owner, name = _owner(self, buffer.name)
            owner._buffers[name] = torch.zeros(buffer.shape, dtype=getattr(torch, buffer.dtype))
        self._start = torch.zeros(1, 1, requires_grad=True)

    def forward(self, _inputs: Any) -> Tensor:
        self.timeline.restart()
        for layer in self._calls:
            layer()
        chain: Tensor = _Rest.apply(self._start, self)  # type: ignore[no-untyped-call]
        for placed in self._gradients:
            chain = _Ready.apply(chain, placed.parameter, placed, self.timeline)  # type: ignore[no-untyped-call]
        return chain

    def sleep_update(self, parameters: Iterable[nn.Parameter]) -> None:
        seconds = [self._updates_s[parameter] for parameter in parameters]
        self.timeline.sleep(sum(seconds))

    def _forward_calls(self) -> list[_Layer]:
        """The recorded layers, and before the first of a block the block itself: weights that are used without a call
        of the layer that owns them are waited for there."""
        calls: dict[str, _Layer] = {}
        for recorded in self.times.forward:
            path = recorded.layer.split(".")
            for end in range(1, len(path) + 1):
                block = ".".join(path[:end])
                if block not in calls:
                    calls[block] = _layer(self, block) if block else _Layer(self.timeline)  # a model of one layer
            calls[recorded.layer].seconds += recorded.seconds
        return list(calls.values())


class _PlacedGradient:
    """A parameter and the memory of its gradient."""

    def __init__(self, gradient: Gradient, parameter: nn.Parameter, update_s: float) -> None:
        self.parameter = parameter
        self.seconds = gradient.seconds
        self.update_s = update_s
        self.values = torch.ones(gradient.shape, dtype=parameter.dtype)


class _Ready(torch.autograd.Function):
    """One link of the chain: in backward, sleeps until its parameter's gradient is ready."""

    @staticmethod
    def forward(ctx: Any, chain: Tensor, _parameter: Tensor, placed: _PlacedGradient, timeline: Timeline) -> Tensor:
        ctx.placed, ctx.timeline = placed, timeline
        return chain.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.timeline.sleep(ctx.placed.seconds)
        # A new tensor on the same memory: autograd takes a tensor that nobody else holds as it is, and copies others.
        return gradients[0], ctx.placed.values.detach(), None, None


class _Rest(torch.autograd.Function):
    """The end of backward, after the last gradient."""

    @staticmethod
    def forward(ctx: Any, chain: Tensor, model: ReplayedModel) -> Tensor:
        ctx.model = model
        return chain.clone()

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> Any:
        ctx.model.timeline.sleep(ctx.model.times.backward_rest_s)
        return None, None


class ReplayedOptimizer(torch.optim.Optimizer):
    """Sleeps the update of the parameters that have a gradient. Has no state and leaves the weights alone."""

    per_parameter = True

    def __init__(self, model: ReplayedModel) -> None:
        # An option of its group: nothing else comes along when a method applies a part of a step later.
        super().__init__(model.parameters(), {"sleep": model.sleep_update})

    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["sleep"](parameter for parameter in group["params"] if parameter.grad is not None)


def _shared_memory_for(times: ComputeTimes) -> dict[str, Tensor]:
    """As large as the largest parameter, for each dtype."""
    longest: dict[str, int] = {}
    for gradient in times.backward:
        longest[gradient.dtype] = max(longest.get(gradient.dtype, 0), math.prod(gradient.shape))
    return {dtype: torch.zeros(length, dtype=getattr(torch, dtype)) for dtype, length in longest.items()}


def _register(model: ReplayedModel, gradient: Gradient, weights: dict[str, Tensor]) -> nn.Parameter:
    owner, name = _owner(model, gradient.parameter)
    flat = weights[gradient.dtype][: math.prod(gradient.shape)]
    parameter = nn.Parameter(flat.view(gradient.shape))
    owner._parameters[name] = parameter
    return parameter


def _owner(model: ReplayedModel, dotted: str) -> tuple[nn.Module, str]:
    """The module that a dotted name belongs to, so that names are those of the recorded model."""
    path, _, name = dotted.rpartition(".")
    return (_layer(model, path) if path else model), name


def _layer(model: ReplayedModel, dotted: str) -> _Layer:
    """The layer of that name, made if there is none yet.

    Into the tables themselves: the methods that add to them refuse names that nn.Module uses, such as 'type'.
    """
    owner, name = _owner(model, dotted)
    found = owner._modules.get(name)
    if not isinstance(found, _Layer):
        found = owner._modules[name] = _Layer(model.timeline)
    return found


class ReplayedBatches:
    """Nothing is loaded, the recorded time is slept: one made-up sample for ReplayedModel, whatever the shard."""

    task = classification(1, (1,))
    num_test = 0

    def __init__(self, data_s: float, *, num_train: int = 1, source: str = "") -> None:
        self.num_train = num_train
        self.source = source
        self._data_s = data_s
        self._timeline = Timeline()
        self._sample = torch.zeros(1), torch.zeros(1, dtype=torch.int64)

    def train(self, shard: Shard) -> tuple[Tensor, Tensor]:
        self._timeline.sleep(self._data_s)
        return self._sample

    def test(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self._sample

    def in_dtype(self, dtype: torch.dtype) -> Self:
        return self
