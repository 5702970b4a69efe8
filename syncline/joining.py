"""Uneven inputs: inside `join`, a rank without a batch takes part in the others' steps until all are done.

Before every forward with gradients, ranks tell each other whether they still have a batch, and whether its backward
will be averaged. `DataParallel.join` works on every kind of rank; torch's own `Join` context, which also holds other
joinables such as ZeRO, needs ranks that torch.distributed connects.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig

from syncline.drop_in import DropIn
from syncline.errors import PlanError
from syncline.sync.base import broadcast_state, share_buffers
from syncline.sync.batch_norm import SyncBatchNorm

DONE, ACCUMULATES, AVERAGES = 0, 1, 2


class UnevenInputs:
    """One `join`, from its begin to its end."""

    def __init__(
        self,
        wrapper: Joining,
        *,
        divide_by_initial_world_size: bool = True,
        throw_on_early_termination: bool = False,
        in_torch_s_context: bool = False,
    ) -> None:
        self._wrapper = wrapper
        self._by_world_size = divide_by_initial_world_size
        self._throws = throw_on_early_termination
        self._in_torch_s_context = in_torch_s_context
        self._active: list[int] = []
        """Ranks that had a batch when they last said so."""

    def before_forward(self) -> None:
        """This rank has a batch. Collective, together with the others' `shadow`."""
        if not torch.is_grad_enabled():
            return
        if self._in_torch_s_context:
            if not self._wrapper._join_config.enable:
                return
            work = Join.notify_join_context(self._wrapper)
            if work is not None:
                work.wait()
        self._announce(AVERAGES if self._wrapper.require_backward_grad_sync else ACCUMULATES)
        if self._throws and len(self._active) < self._wrapper.communicator.world_size:
            raise RuntimeError("Detected at least one rank that exhausted inputs. Throwing across all ranks.")

    def after_average(self) -> None:
        """Gradients hold the mean over all ranks: make it the mean over those that have a batch, if so asked."""
        world_size = self._wrapper.communicator.world_size
        if self._by_world_size or len(self._active) in (0, world_size):
            return
        self._wrapper.sync.synchronize()
        with torch.no_grad():
            for parameter in self._wrapper.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(world_size / len(self._active))

    def shadow(self) -> bool:
        """No batch is left here: take part in one forward and backward of the others, if there is one."""
        if not self._announce(DONE):
            return False
        wrapper = self._wrapper
        if self._throws:
            raise RuntimeError(f"Rank {wrapper.communicator.rank} exhausted all inputs.")
        if self._averages:
            if wrapper.sync.shares_buffers and wrapper.training:
                share_buffers(wrapper.communicator, wrapper.sync.buffers_to_share(), root=self.root)
            with _gradients_kept(wrapper.module):
                wrapper.sync.finish_without_gradients()
        return True

    def end(self) -> None:
        """All are done: every rank gets the state of the last. Collective."""
        sync = self._wrapper.sync
        broadcast_state(
            self._wrapper.communicator, self._wrapper.module, root=self.root, ignored=sync.ignored,
            buffers=sync.shares_buffers,
        )  # fmt: skip
        sync.buffers_root = 0

    @property
    def root(self) -> int:
        """A rank that was there to the last: its parameters and buffers count."""
        return self._active[-1] if self._active else 0

    def _announce(self, own: int) -> bool:
        comm = self._wrapper.communicator
        with comm.scope("join"):
            answers = comm.all_gather(torch.tensor([own], device=comm.device), label="still active")
        flags = [int(answer) for answer in answers]
        active = [rank for rank, flag in enumerate(flags) if flag != DONE]
        self._active = active or self._active
        self._averages = AVERAGES in flags
        self._wrapper.sync.buffers_root = self.root
        return bool(active)


@contextmanager
def uneven_inputs(wrapper: Joining, *, divide_by_initial_world_size: bool, throws: bool) -> Iterator[None]:
    """Around a loop in which ranks may have different numbers of batches."""
    uneven = UnevenInputs(
        wrapper, divide_by_initial_world_size=divide_by_initial_world_size, throw_on_early_termination=throws
    )
    wrapper._uneven = uneven
    try:
        yield
        while uneven.shadow():
            pass
        uneven.end()
    finally:
        wrapper._uneven = None


@contextmanager
def _gradients_kept(module: nn.Module) -> Iterator[None]:
    """The others' mean must not be added to this rank's next gradients."""
    kept = [(p, None if p.grad is None else p.grad.clone()) for p in module.parameters()]
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


class ShadowHook(JoinHook):
    """DataParallel in torch's own `Join` context."""

    def __init__(self, wrapper: Joining, *, divide_by_initial_world_size: bool = True) -> None:
        self._wrapper = wrapper
        self._uneven = UnevenInputs(
            wrapper, divide_by_initial_world_size=divide_by_initial_world_size, in_torch_s_context=True
        )
        wrapper._uneven = self._uneven

    def main_hook(self) -> None:
        self._uneven.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._uneven.end()
        self._wrapper._uneven = None
        # torch leaves it on, and every later forward would then ask the other ranks.
        self._wrapper._join_config = _JoinConfig.construct_disabled_join_config()


class Joining(DropIn, Joinable):
    """DataParallel's part in `join` and in torch's context."""

    _uneven: UnevenInputs | None
    """The `join` that is open."""

    def __init__(self) -> None:
        super().__init__()
        Joinable.__init__(self)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """Around a loop in which ranks may have different numbers of batches.

        A rank that is done takes part with zero gradients until all are, and ends with the others' parameters. The
        mean is over the whole world, or else over the ranks that still have a batch. With
        `throw_on_early_termination`, every rank raises as soon as one is done. If not enabled, it does nothing.
        """
        if not enable:
            return nullcontext()
        if not throw_on_early_termination:
            self._refuse_synchronised_batch_norm()
        if self._torch_s is not None:
            context: AbstractContextManager[None] = self._torch_s.join(
                divide_by_initial_world_size, enable, throw_on_early_termination
            )
            return context
        by_world_size, throws = divide_by_initial_world_size, throw_on_early_termination
        return uneven_inputs(self, divide_by_initial_world_size=by_world_size, throws=throws)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For torch's own `Join` context."""
        self._refuse_synchronised_batch_norm()
        if self._torch_s is not None:
            hook: JoinHook = self._torch_s.join_hook(**kwargs)
            return hook
        return ShadowHook(self, divide_by_initial_world_size=kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        return self.communicator.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    def _refuse_synchronised_batch_norm(self) -> None:
        if any(isinstance(layer, SyncBatchNorm) for layer in self.module.modules()):
            raise PlanError(
                "join does not work with batch-norm statistics over all ranks' batches.",
                action='Use batch_norm = "local", or give every rank the same number of batches.',
            )
