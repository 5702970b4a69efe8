"""Gradients scaled by the weight of the batch that they come from, so that their average over ranks is the mean over
the global batch, also where ranks have different numbers of samples.

The loader notes the weight (shares.py), a forward of the wrapper reads it, and a hook on each parameter multiplies
the gradients of that forward's backward before they are added to `.grad`. So it is right for every method, and where
gradients are accumulated. Nothing is hooked, and nothing costs anything, until a weight other than 1 is seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from syncline.errors import UsageError
from syncline.shares import current_share
from syncline.sync.base import in_backward
from syncline.sync.batch_norm import SyncBatchNorm


class _Scale:
    """What the next gradient of one parameter is multiplied by. One for all wrappers that the parameter is in: each
    may lead a backward there, but it is scaled once."""

    def __init__(self, parameter: Tensor) -> None:
        self.weight = 1.0
        self.used = False
        this = weakref.ref(self)

        def scaled(gradient: Tensor) -> Tensor | None:
            scale = this()
            return scale.apply(gradient) if scale is not None else None

        weakref.finalize(self, parameter.register_hook(scaled).remove).atexit = False

    def apply(self, gradient: Tensor) -> Tensor | None:
        self.used = True
        if self.weight == 1.0:
            return None
        if self.weight == 0.0:
            return torch.zeros_like(gradient)  # a stand-in's gradient does not count, not even if it is nan
        return gradient * self.weight


_scales = WeakIdKeyDictionary()
"""By parameter, as weak references: the wrappers' weighers hold them."""


class Weigher:
    """A wrapper's part in it."""

    def __init__(self) -> None:
        self._scales = WeakIdKeyDictionary()
        self._under_way: float | None = None
        """The weight of the forward whose backward is under way."""

    def forward_begins(self, model: nn.Module) -> float | None:
        """The weight of the batch of this forward; None if all weights so far were 1."""
        share = current_share()
        weight = 1.0 if share is None else share.weight
        if weight == 1.0 and not self._scales:
            return None
        if not in_backward():
            self._under_way = None  # of a backward that did not come to its end
        for parameter in model.parameters():
            if parameter.requires_grad and parameter not in self._scales:
                self._scales[parameter] = _scale_of(parameter)
        for layer in model.modules():
            if isinstance(layer, SyncBatchNorm):
                layer.statistics.weight = weight
        self._set(weight)
        return weight

    def watch(self, outputs: Iterable[Tensor], weight: float) -> None:
        """A backward that passes these outputs has this weight, whatever forwards came in between."""
        for output in outputs:
            output.register_hook(lambda _: self._backward_begins(weight))

    def _backward_begins(self, weight: float) -> None:
        if self._under_way is None:
            self._under_way = weight
            self._set(weight)
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)
        elif self._under_way != weight:
            raise UsageError(
                f"one backward covers batches that weigh {self._under_way:g} and {weight:g} on this rank: their "
                "gradients cannot be told apart.",
                action="Call backward for each batch, inside no_sync for all but the last.",
            )

    def _backward_ended(self) -> None:
        """Later gradients are not those of a batch, unless they pass an output again; but a backward that reached no
        parameter (a gradient penalty) is yet to be followed by one that does."""
        self._under_way = None
        if any(scale.used for scale in self._scales.values()):
            self._set(1.0)

    def _set(self, weight: float) -> None:
        for scale in self._scales.values():
            scale.weight, scale.used = weight, False


def _scale_of(parameter: Tensor) -> _Scale:
    known: weakref.ref[_Scale] | None = _scales.get(parameter)
    scale = known() if known is not None else None
    if scale is None:
        scale = _Scale(parameter)
        _scales[parameter] = weakref.ref(scale)
    return scale
