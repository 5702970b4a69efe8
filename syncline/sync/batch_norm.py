"""What batch norm does across ranks.

    local       each rank normalises its shard by itself, and keeps running statistics of its own
    broadcast   the same, but rank 0's running statistics replace the others' before every forward
    sync        mean and variance are those of the global batch: the model computes what one worker would compute

In a plan the default is broadcast for ddp, as in PyTorch, and local for the other methods.

SyncBatchNorm does `sync` on any Communicator; torch's is for GPUs only. Each layer sends its count, mean and sum of
squared deviations forward, and two sums backward. With m values per channel in all, xhat = (x - mean) / sqrt(variance
+ eps), y = w xhat + b, and sums over the samples of all ranks:

    dL/dx  =  w / sqrt(variance + eps)  x  (dy  -  sum(dy) / m  -  xhat sum(dy xhat) / m)

dL/dw and dL/db stay sums over the own shard: they are averaged with all other gradients. Ranks send what they have
and everybody adds it up in rank order, so all ranks hold the same bits, whatever carries them.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from syncline.comm.communicator import Communicator
from syncline.errors import PlanError
from syncline.methods import BatchNorm
from syncline.sync.base import GradientSync, keras_statistics
from syncline.sync.bucketed import Bucketed
from syncline.sync.ddp import DDP


def attach(sync: GradientSync, model: nn.Module, policy: BatchNorm | None) -> nn.Module:
    """`sync.attach`, with batch norm by the policy; None leaves it to the method. Collective."""
    if sync.stands_alone:
        return sync.attach(model)  # while other ranks wait, perhaps
    if policy == "sync" and sync.communicator.world_size > 1:
        refuse_keras(model)
        channel = sync.own_channel("batch norm")
        if isinstance(sync, DDP | Bucketed):
            refuse_shared_channel(sync.communicator, channel)
        if synchronise_batch_norm(model, Statistics(channel)) is not model:
            raise PlanError("cannot synchronise a model that is itself a batch norm.")
    module = sync.attach(model)
    if policy == "broadcast" and not isinstance(sync, DDP):  # which does so by itself
        sync.shares_buffers = True
    return module


def refuse_keras(model: nn.Module) -> None:
    if keras_statistics(model):
        raise PlanError(
            "Keras's batch norm has no layers in torch, so its statistics cannot be those of all ranks' batches.",
            action="Use batch_norm='broadcast'.",
        )


def refuse_shared_channel(communicator: Communicator, channel: Communicator) -> None:
    """In a group that is not the whole world torch gives no second channel; statistics would mix with gradients."""
    group = getattr(communicator.backend, "group", None)
    if group is not None and getattr(channel.backend, "group", None) is group:
        raise PlanError(
            "statistics over all ranks' batches need a channel beside that of gradients sent during backward, "
            "and torch gives a subgroup only one.",
            action="Use method all-reduce or shared-memory, or the whole world.",
        )


class Statistics:
    """What the layers of one model share: a channel of their own, and whether this rank's samples count."""

    def __init__(self, channel: Communicator) -> None:
        self.channel = channel
        self.counted = True
        self.weight = 1.0
        """By which this rank's gradients will be multiplied before they are averaged; see weighing.py."""

    def gather(self, own: Tensor, what: str) -> Tensor:
        """Every rank's vector, by rank. Collective."""
        own = own.to(self.channel.device)
        with self.channel.scope(what):
            return torch.stack(self.channel.all_gather(own, label=what))


class SyncBatchNorm(_BatchNorm):
    """Batch norm of any dimension whose training statistics are those of the global batch. Forward and backward are
    collective in training mode; in evaluation nothing is sent."""

    statistics: Statistics
    label: str
    kind: type[_BatchNorm]
    """Of the layer that this one replaces, and that a copy becomes again."""

    @classmethod
    def over(cls, layer: _BatchNorm, statistics: Statistics, label: str) -> SyncBatchNorm:
        """In place of `layer`, with its very parameters and buffers."""
        made = cls(layer.num_features, layer.eps, layer.momentum, affine=False, track_running_stats=False)
        for name in ("affine", "track_running_stats", "training"):
            setattr(made, name, getattr(layer, name))
        made._parameters, made._buffers = dict(layer._parameters), dict(layer._buffers)
        made.statistics, made.label = statistics, label
        made.kind = layer.kind if isinstance(layer, SyncBatchNorm) else type(layer)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy, in memory or in a file, is the plain layer: it talks to nobody, and needs no Syncline."""
        state = {key: value for key, value in vars(self).items() if key not in ("statistics", "label", "kind")}
        if self.kind is nn.SyncBatchNorm:
            state["process_group"] = None
        return copyreg._reconstructor, (self.kind, object, None), state  # type: ignore[attr-defined]

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(f"expected (samples, {self.num_features}, ...), got {list(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training:
            return self._in_evaluation(input)
        mean, variance, count = self._global_statistics(input)
        self._track(mean, variance, count)
        parts = (input, self.weight, self.bias, mean, variance, count, self)
        normalised: Tensor = _Normalise.apply(*parts)  # type: ignore[no-untyped-call]
        return normalised

    def _in_evaluation(self, input: Tensor) -> Tensor:
        by_batch = self.running_mean is None and self.running_var is None
        return batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, by_batch, 0.0, self.eps)

    def _global_statistics(self, input: Tensor) -> tuple[Tensor, Tensor, int]:
        own = torch.zeros(1 + 2 * self.num_features, dtype=torch.float64)
        count = input.numel() // self.num_features if self.statistics.counted else 0
        if count:
            with torch.no_grad():
                variance, mean = torch.var_mean(_wide(input), _all_but_channels(input), correction=0)
            own = torch.cat([own[:1].to(input.device) + count, mean.double(), variance.double() * count])
        parts = self.statistics.gather(own, f"statistics of {self.label}").to(input.device)
        return self._combined(*parts.split([1, self.num_features, self.num_features], dim=1))

    def _combined(self, counts: Tensor, means: Tensor, squares: Tensor) -> tuple[Tensor, Tensor, int]:
        """Chan's formula: the deviations within each rank, and those of the ranks' means."""
        count = counts.sum()
        if count == 0:  # stand-ins on every rank: anything will do
            return torch.zeros_like(means[0]), torch.ones_like(means[0]), 0
        if count == 1:
            raise ValueError(
                f"batch norm {self.label} cannot normalise one value per channel: "
                "give the global batch at least two samples"
            )
        mean = (counts * means).sum(0) / count
        variance = (squares + counts * (means - mean) ** 2).sum(0) / count
        return mean, variance, int(count)

    def _track(self, mean: Tensor, variance: Tensor, count: int) -> None:
        if count == 0 or not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            self.running_var.lerp_((variance * (count / (count - 1))).to(self.running_var.dtype), share)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: int,
        layer: SyncBatchNorm,
    ) -> Tensor:
        kind = torch.promote_types(input.dtype, torch.float32)
        mean, variance = mean.to(kind), variance.to(kind)
        ctx.save_for_backward(input, weight, mean, variance)
        ctx.count, ctx.layer, ctx.counted = count, layer, layer.statistics.counted
        ctx.weight = layer.statistics.weight if layer.statistics.counted else 1.0
        # What evaluation does with running statistics, with those of the batch.
        return batch_norm(input, mean, variance, weight, bias, False, 0.0, layer.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, variance = ctx.saved_tensors
        layer: SyncBatchNorm = ctx.layer
        scale = torch.rsqrt(variance + layer.eps)
        own = _own_sums(input, gradient, mean, scale)
        # Each rank's part as it counts in the end; what comes back, as it counts before this rank's weight.
        sent = own.double() * ctx.weight if ctx.counted else torch.zeros_like(own, dtype=torch.float64)
        sums = layer.statistics.gather(sent, f"gradient statistics of {layer.label}").sum(0) / ctx.weight
        sum_gradient, sum_product = sums.to(input.device, scale.dtype).chunk(2)
        factor = scale if weight is None else scale * weight
        result = gradient * _along(factor, input)
        if ctx.counted:  # stand-ins took no part in the statistics
            slope = -factor * scale * sum_product / ctx.count
            level = -factor * sum_gradient / ctx.count - slope * mean
            result = result + torch.addcmul(_along(level, input), _along(slope, input), input)
        own_bias, own_weight = own.chunk(2)
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        return (
            result.to(input.dtype) if ctx.needs_input_grad[0] else None,
            own_weight.to(weight.dtype) if needs_weight else None,
            own_bias.to(weight.dtype) if needs_bias else None,
            None, None, None, None,
        )  # fmt: skip


def _own_sums(input: Tensor, gradient: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Sums over this rank's samples: of the gradient, and of its product with the normalised input."""
    around, wide = _all_but_channels(input), _wide(gradient)
    sum_gradient = wide.sum(around)
    sum_product = (wide * (_wide(input) - _along(mean, input))).sum(around) * scale
    return torch.cat([sum_gradient, sum_product])


def _wide(values: Tensor) -> Tensor:
    """Statistics of 16-bit values are computed in 32 bits."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _all_but_channels(input: Tensor) -> list[int]:
    return [0, *range(2, input.dim())]


def _along(values: Tensor, input: Tensor) -> Tensor:
    """One value per channel, in a shape that goes with the input's."""
    return values.view(1, -1, *[1] * (input.dim() - 2))


def synchronise_batch_norm(module: nn.Module, statistics: Statistics) -> nn.Module:
    """Replace every batch norm of the module in place by a synchronised one; returns a new module if it is one."""
    return _converted(module, statistics, "", {})


def _converted(module: nn.Module, statistics: Statistics, label: str, done: dict[int, nn.Module]) -> nn.Module:
    """A layer that is used in several places is replaced by the same layer in all of them."""
    if id(module) not in done:
        done[id(module)] = module
        if isinstance(module, _BatchNorm):
            _refuse_what_is_more_than_batch_norm(module, label)
            done[id(module)] = SyncBatchNorm.over(module, statistics, label)
        for name, child in module._modules.items():
            if child is not None:
                inner = f"{label}.{name}" if label else name
                module._modules[name] = _converted(child, statistics, inner, done)
    return done[id(module)]


def _refuse_what_is_more_than_batch_norm(layer: _BatchNorm, label: str) -> None:
    kind = type(layer)
    if isinstance(layer, _LazyNormBase):
        raise PlanError(
            f"batch norm {label} has no size yet.", action="Run the model once before its batch norm is synchronised."
        )
    if kind.forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward):
        raise PlanError(
            f"cannot synchronise layer {label}: {kind.__name__} has its own forward.",
            action='Use batch_norm = "local" or "broadcast".',
        )


@contextmanager
def samples_not_counted(model: nn.Module) -> Iterator[None]:
    """Inside, this rank takes part in the statistics with nothing: its batch is a stand-in."""
    shared = {layer.statistics for layer in model.modules() if isinstance(layer, SyncBatchNorm)}
    for statistics in shared:
        statistics.counted = False
    try:
        yield
    finally:
        for statistics in shared:
            statistics.counted = True
