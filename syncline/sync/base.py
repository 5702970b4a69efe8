"""GradientSync: what a method is. One small object, one verb: `finish`.

sync = AllReduce(communicator)
module = sync.attach(model)         # same start on every rank; returns the module to call
module(inputs).sum().backward()     # a forward through it says: the backward to come is averaged
sync.finish()                       # now every .grad is the mean over all ranks
optimizer.step()

Nothing is put on the model but hooks on its parameters, which hold the method weakly: a copy of the model carries
nothing of ours, and a method that nobody holds any more takes its hooks, threads and channels with it.
"""

from __future__ import annotations

import cmath
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.autograd import _unsafe_preserve_version_counter
from torch.utils.hooks import RemovableHandle

from syncline.comm.communicator import Communicator
from syncline.errors import PlanError
from syncline.methods import Unused
from syncline.spans import EventLog
from syncline.sync.hooks import CommHook

_expecting: weakref.WeakKeyDictionary[nn.Module, weakref.ref[GradientSync]] = weakref.WeakKeyDictionary()
"""Who averages the next backward of a model. Two methods on one model would divide its gradients twice."""


SameStart = Literal["all", "parameters", "nothing"]


_KERAS_STATISTICS = ("/moving_mean", "/moving_variance")


class GradientSync(ABC):
    """A method of making every rank's .grad the mean over ranks."""

    rebuilds_after_first_backward = False
    """True if the summation order changes after the first backward: a run that must be repeatable bit for bit,
    also from a checkpoint, makes one discarded backward first."""
    has_rebuilt = False
    """The buckets follow the order in which gradients became ready."""
    sees_gradients = True
    """It can look at each gradient before it is sent."""
    stands_alone = False
    """True if this process takes the whole batch, and no other rank takes part."""
    holds_gradients = False
    """True if `.grad` lies in the method's buffers, so that gradients need no other memory."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.log = EventLog(keep=False)
        """Where time spent on copying gradients is noted; make_sync puts the rank's own here."""
        self.on_gradient: Callable[[], None] | None = None
        """Called at each gradient of a backward that is averaged: how a caller learns that one is under way."""
        self.looks_for_nan = False
        """Keep the sum of each gradient before it is sent, for `not_finite`. Set before attach, as the next three."""
        self._sums: dict[str, Tensor] = {}
        self.ignored: frozenset[str] = frozenset()
        """Parameters and buffers that stay each rank's own."""
        self.same_start: SameStart = "all"
        """What every rank gets from rank 0 in attach."""
        self.static_graph = False
        """Each backward uses parameters as the first did, also several times."""
        self.unused: Unused = "error"
        self.graph_is_static = True
        """Every backward so far left the same parameters without a gradient."""
        self._model: nn.Module | None = None
        self.paused = False
        """The backward of a forward that begins now is not averaged."""
        self._expects = False
        """A backward that is to be averaged is on its way, or under way. Hooks do nothing otherwise."""
        self.shares_buffers = False
        """Every rank gets the buffers of rank `buffers_root` before each forward in training that is averaged."""
        self.buffers_root = 0
        self._hooks: list[RemovableHandle] = []
        self._channels: list[Communicator] = []

    @abstractmethod
    def attach(self, model: nn.Module) -> nn.Module:
        """Give every rank rank 0's parameters and buffers; return the module to call. Collective."""

    @abstractmethod
    def finish(self) -> None:
        """Return when every .grad holds the mean over ranks. Idempotent until the next backward. Collective."""

    @property
    def expects(self) -> bool:
        """The next backward, or the one under way, is averaged."""
        return self._expects

    @property
    def buffer_bytes(self) -> int:
        """Memory that the method keeps from step to step for its transfers."""
        return 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A forward inside is not averaged: its backward accumulates locally and nothing is sent. The next finish
        outside sends the sum."""
        before, self.paused = self.paused, True
        self.settings_changed()
        try:
            yield
        finally:
            self.paused = before
            self.settings_changed()

    def settings_changed(self) -> None:  # noqa: B027  (most methods read them where they need them)
        """`paused`, `shares_buffers` or `unused` was set after attach."""

    def expect_backward(self) -> None:
        """A forward begins: its backward is averaged, unless no_sync is on. Collective if buffers are shared."""
        if self.paused or not torch.is_grad_enabled() or self._model is None:
            return
        self.expect()
        if self.shares_buffers and self._model.training:
            share_buffers(self.communicator, self.buffers_to_share(), root=self.buffers_root)

    def expect(self) -> None:
        """The next backward is averaged, whatever its forward was."""
        if self._model is None:
            return
        other = _expecting.get(self._model)
        if other is None or (rival := other()) is not self:
            if other is not None and rival is not None:
                rival.synchronize()
                rival._expects = False  # the last forward decides who averages
            _expecting[self._model] = weakref.ref(self)
        self._expects = True
        self.forward_begins()

    def expect_again(self) -> None:
        """A backward has come to an output of a forward that was averaged before: this one is averaged too."""
        if self._expects or self._model is None:
            return
        rival = _expecting[self._model]()
        self._expects = rival is self or rival is None or not rival._expects

    def forward_begins(self) -> None:  # noqa: B027  (most methods prepare nothing)
        """A forward that is averaged begins."""

    def forward_ended(self) -> None:  # noqa: B027
        """That forward has come to its end."""

    def backward_ended(self) -> None:
        """By itself at the end of each backward that is averaged, where nobody calls `finish`. Collective."""
        self.finish()

    def finish_for_update(self) -> None:
        """Like `finish`, where `update` comes next: a method may leave gradients on their way. Collective."""
        self.finish()

    def not_finite(self) -> list[str]:
        """Parameters whose gradient of the last backward was NaN or infinite on this rank before it was sent."""
        sums, self._sums = self._sums, {}
        return [name for name, total in sums.items() if not cmath.isfinite(total.item())]

    def _look_at(self, name: str, gradient: Tensor) -> None:
        """Call it before a gradient is sent: afterwards every rank holds a NaN of one. A sum is NaN or infinite if a
        summand is, and takes a hundredth of the time that `isfinite` does; it is read after the step."""
        if self.looks_for_nan:
            values = gradient._values() if gradient.is_sparse else gradient
            # 16-bit numbers: their sum would overflow where they do not.
            self._sums[name] = values.sum(dtype=torch.float32 if values.dtype.itemsize == 2 else None)

    def explained(self, error: RuntimeError) -> RuntimeError:
        """The error that a backward raised, with what is known of it."""
        return error

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """One step of the optimiser on the averaged gradients, which are then dropped. A method may apply it to a
        layer when that layer is next used."""
        optimizer.step()
        optimizer.zero_grad()

    def bind(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027
        """Tell the method which optimiser updates the model, once it is attached."""

    def synchronize(self) -> None:  # noqa: B027
        """Wait for what is on its way: gradients hold the mean, and updates that were asked for are applied."""

    @property
    def predicted(self) -> dict[str, Any] | None:
        """What the method expects of a step once it has planned one: `step_s` as it goes on, which `waits` for all
        gradients or not, and `ahead_s`, `barrier_s` and `bound_s` for either way and at best."""
        return None

    def finish_without_gradients(self) -> None:
        """Take part in the others' finish with zeros: this rank has no batch left. Collective."""
        raise PlanError(f"method {self._name} cannot take part without a batch.")

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Let one of torch's communication hooks average the buckets."""
        raise PlanError(f"method {self._name} has no buckets for a communication hook.")

    @property
    def _name(self) -> str:
        """As users type it, where a log knows it."""
        return self.log.method or type(self).__name__

    def detach(self) -> None:
        """Remove what attach put on the model."""
        self._expects = False
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for channel in self._channels:
            channel.close()
        self._channels.clear()

    def own_channel(self, name: str) -> Communicator:
        """The same ranks on channels beside the gradients', closed by detach. Collective."""
        return self._closed_at_end(self.communicator.split(name))

    def _closed_at_end(self, channel: Communicator) -> Communicator:
        self._channels.append(channel)
        when_garbage(self, channel.close)
        return channel

    def state(self) -> dict[str, Any]:
        """What decides the order of summation; part of a checkpoint."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """After attach: sum in the order of the run that `state` comes from."""
        assert not state, f"{type(self).__name__} keeps no state"

    def _start(self, model: nn.Module) -> None:
        """The same start on every rank. Collective."""
        if self.same_start != "nothing":
            buffers = self.same_start == "all"
            broadcast_state(self.communicator, model, ignored=self.ignored, buffers=buffers)

    def buffers_to_share(self) -> list[Tensor]:
        assert self._model is not None, "attach a model first"
        return [buffer for name, buffer in running_state(self._model) if name not in self.ignored]

    def _averaged(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in model.named_parameters() if name not in self.ignored]

    def _watch(self, parameters: list[nn.Parameter], on_ready: Callable[[Self, int, Tensor], None]) -> None:
        """Call `on_ready(self, number, parameter)` for each gradient of a backward that is averaged.

        The hooks hold this method weakly, and are removed when it is garbage."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        this = weakref.ref(self)

        def hook_of(number: int) -> Callable[[Tensor], None]:
            def ready(parameter: Tensor) -> None:
                sync = this()
                if sync is not None and sync._expects:
                    if sync.on_gradient is not None:
                        sync.on_gradient()
                    on_ready(sync, number, parameter)

            return ready

        self._hooks += [p.register_post_accumulate_grad_hook(hook_of(n)) for n, p in enumerate(parameters)]
        for hook in self._hooks:
            when_garbage(self, hook.remove)


def when_garbage(owner: object, release: Callable[[], object]) -> None:
    """Call `release` when nobody holds the owner any more; not at the end of the process, which releases all."""
    weakref.finalize(owner, release).atexit = False


class Announced(nn.Module):
    """The module to call: a forward through it tells the method that a backward will follow. A forward through the
    model itself (a saliency map on one rank) does not, and is nobody else's business."""

    def __init__(self, model: nn.Module, sync: GradientSync) -> None:
        super().__init__()
        self.module = model
        self._sync = sync

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._sync.expect_backward()
        outputs = self.module(*args, **kwargs)
        self._sync.forward_ended()
        return outputs


class Single(GradientSync):
    """single: one worker on the whole batch. Nothing is sent."""

    sees_gradients = False
    stands_alone = True

    def attach(self, model: nn.Module) -> nn.Module:
        return model

    def finish(self) -> None:
        pass

    def finish_without_gradients(self) -> None:
        pass


def broadcast_state(
    communicator: Communicator,
    model: nn.Module,
    *,
    root: int = 0,
    ignored: Collection[str] = (),
    buffers: bool = True,
) -> None:
    """The root's parameters and buffers on every rank."""
    with communicator.scope("attach"):
        for name, tensor in [*model.named_parameters(), *(model.named_buffers() if buffers else ())]:
            if name not in ignored:
                values = tensor.data
                dense = in_one_piece(values)
                communicator.broadcast(dense, root=root, label=name)
                if dense is not values:
                    values.copy_(dense)


def running_state(model: nn.Module) -> list[tuple[str, Tensor]]:
    """What a forward in training changes: buffers, and batch-norm statistics that Keras keeps as parameters."""
    return [*model.named_buffers(), *keras_statistics(model)]


def keras_statistics(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Keras has no buffers: its statistics are parameters without gradients, known by the names of its variables."""
    named = model.named_parameters()
    return [(name, p) for name, p in named if not p.requires_grad and name.endswith(_KERAS_STATISTICS)]


def share_buffers(communicator: Communicator, buffers: Iterable[Tensor], *, root: int = 0) -> None:
    """The root's buffers on every rank: one message for each dtype and device."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in buffers:
        groups.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    with torch.no_grad(), communicator.scope("buffers"):
        for (dtype, _), alike in groups.items():
            flat = torch.cat([buffer.reshape(-1) for buffer in alike])
            communicator.broadcast(flat, root=root, label=f"buffers of {str(dtype).removeprefix('torch.')}")
            if communicator.rank != root:
                # A forward that is still to be backpropagated may have kept them; torch's class does the same.
                with _unsafe_preserve_version_counter(tuple(alike)):
                    for buffer, values in zip(alike, flat.split([b.numel() for b in alike]), strict=True):
                        buffer.copy_(values.view_as(buffer))


def in_one_piece(tensor: Tensor) -> Tensor:
    """The tensor itself if it can be sent as it lies in memory, otherwise a copy that can."""
    channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor if channels_last or tensor.is_contiguous() else tensor.contiguous()


def in_backward() -> bool:
    """Whether this thread is inside a backward: a forward there is a recomputation."""
    return torch._C._current_graph_task_id() != -1
