"""Gradients in flat buffers: what the bucketed and the shared-memory method have in common.

After backward every `.grad` is a view of its place in the buffer, so averaging the buffer averages the gradients, and
nothing is copied back. `zero_grad(set_to_none=True)` drops the view; the next backward then makes a fresh gradient,
which is copied into its place as soon as it is ready: the only copy.

Ranks must learn, without a message of its own, that some rank has no gradient for a parameter (see layout.py). Its
place is filled with zeros and its flag with a 1; the flags are summed like gradients, so that a sum above 0 anywhere
sends all ranks, and only then, into one more exchange that says which rank misses what. No sum makes a flag 0 again:
flags are added, then divided at most.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from syncline.comm.communicator import Communicator
from syncline.errors import ContractError, SynclineError
from syncline.methods import Unused
from syncline.sync.base import GradientSync, broadcast_state
from syncline.sync.layout import MB, Group, Layout, Size, plan_layout

FIRST_BUCKET_MB = 1.0
USED, UNUSED, IDLE = 0, 1, 2
"""What a rank says of a parameter; a rank without a batch says neither used nor unused."""


class FlatSync(GradientSync):
    """Watches gradients become ready; subclasses send buckets and wait for them."""

    def __init__(
        self,
        communicator: Communicator,
        *,
        bucket_cap_mb: float = 25.0,
        unused: Unused = "error",
    ) -> None:
        super().__init__(communicator)
        self._caps = {
            "cap_bytes": max(1, round(bucket_cap_mb * MB)),
            "first_cap_bytes": round(min(FIRST_BUCKET_MB, bucket_cap_mb) * MB),
        }
        self._unused = unused
        self._names: list[str] = []
        self._parameters: list[nn.Parameter] = []
        self._under_way = False
        """A forward or a gradient was seen since the last finish: until then finish has nothing to do."""
        self._idle = False
        self._pack_start_ns = self._pack_end_ns = self._pack_busy_ns = 0
        self.layout = Layout((), (), {})
        self._buffers: dict[Group, Tensor] = {}

    # What a subclass adds.

    @abstractmethod
    def allocate(self, layout: Layout) -> dict[Group, Tensor]:
        """A zeroed buffer of the layout's length for each group. Collective."""

    @abstractmethod
    def bucket_ready(self, number: int) -> None:
        """All of this bucket's gradients are in place; buckets come in order."""

    @abstractmethod
    def complete(self) -> None:
        """Return when every bucket holds the mean. Collective."""

    @property
    def scale_early(self) -> float | None:
        """Factor applied while a gradient is copied into place, which costs nothing there.

        Dividing by a power of two is exact at any moment; by another number it is done once, on the sum.
        """
        world_size = self.communicator.world_size
        return 1 / world_size if world_size & (world_size - 1) == 0 else None

    # The contract.

    def attach(self, model: nn.Module) -> nn.Module:
        broadcast_state(self.communicator, model)
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._names = [name for name, _ in trained]
        self._parameters = [parameter for _, parameter in trained]
        if self.communicator.world_size == 1:
            return model  # the gradients are the mean already
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self._lay_out(list(reversed(range(len(trained)))))
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._on_ready(number))
            for number, parameter in enumerate(self._parameters)
        ]
        self._hooks.append(model.register_forward_pre_hook(self._on_forward))
        return model

    def finish(self) -> None:
        if self._paused or not self._under_way:
            return
        for number, parameter in enumerate(self._parameters):
            if number not in self._ready:
                self._settle_untouched(number, parameter)
        self._announce()
        self._note_pack()
        self.complete()
        self._settle_unused()
        self._begin_step()

    def finish_without_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
        self._under_way = self._idle = True
        try:
            self.finish()
        finally:
            self._idle = False

    def detach(self) -> None:
        super().detach()
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()  # the buffer may go away

    @property
    def buffer_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    @property
    def holds_gradients(self) -> bool:  # type: ignore[override]
        return bool(self._buffers)

    def describe(self) -> str:
        """The bucket map: one line a bucket, in the order in which they are sent."""
        lines = []
        for position, bucket in enumerate(self.layout.buckets):
            size = (bucket.stop - bucket.start) * self._buffers[bucket.group].element_size()
            inside = [number for number in bucket.parameters if self.layout.slots[number].stop > bucket.start]
            ends = f"{self._names[inside[0]]} … {self._names[inside[-1]]}" if inside else "no elements"
            lines.append(f"bucket {position}: {size / MB:.2f} MB, {len(inside)} parameters, {ends}")
        return "\n".join(lines)

    # How a step goes.

    def _lay_out(self, order: Sequence[int]) -> None:
        sizes = [Size(p.numel(), p.element_size(), (p.dtype, p.device)) for p in self._parameters]
        self.layout = plan_layout(sizes, order, **self._caps)
        self._buffers = self.allocate(self.layout)
        # Where the flags begin in each buffer.
        self._num_gradients = {
            group: min(slot.flag for slot in self.layout.slots if slot.group == group)
            for group in self.layout.lengths
        }
        self._views = [self._view(number) for number in range(len(self._parameters))]
        self._buckets_of: list[list[int]] = [[] for _ in self._parameters]
        for number, bucket in enumerate(self.layout.buckets):
            for parameter in bucket.parameters:
                self._buckets_of[parameter].append(number)
        self._begin_step()

    def _view(self, number: int) -> Tensor:
        parameter, slot = self._parameters[number], self.layout.slots[number]
        flat = self._buffers[slot.group][slot.start : slot.stop]
        if parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last):
            return flat.as_strided(parameter.shape, parameter.stride())
        return flat.view(parameter.shape)

    def _begin_step(self) -> None:
        self._under_way = False
        # When each parameter became ready, in that order; for each bucket, how many it still waits for; and how many
        # buckets were handed on.
        self._ready: dict[int, int] = {}
        self._missing = [len(bucket.parameters) for bucket in self.layout.buckets]
        self._announced = 0

    def _on_forward(self, _module: nn.Module, _args: Any) -> None:
        if torch.is_grad_enabled():
            self._under_way = True
            self._check_frozen()

    def _check_frozen(self) -> None:
        changed = [n for n, p in zip(self._names, self._parameters, strict=True) if not p.requires_grad]
        changed += [name for name, parameter in self._frozen if parameter.requires_grad]
        if changed:
            raise SynclineError(
                f"requires_grad of {changed[0]} was changed after attach.",
                action="Freeze and unfreeze before attaching, or detach and attach again.",
                rank=self.communicator.rank,
            )

    def _on_ready(self, number: int) -> Callable[[Tensor], None]:
        def ready(parameter: Tensor) -> None:
            if self._paused:
                return
            if number in self._ready:
                raise ContractError(
                    f"the gradient of {self._names[number]} became ready twice in one backward.",
                    action="Use checkpointing with use_reentrant=False where a parameter is used in two segments.",
                    rank=self.communicator.rank,
                )
            self._under_way = True
            self._put_in_place(number, parameter)
            self._announce()

        return ready

    def _put_in_place(self, number: int, parameter: Tensor) -> None:
        """The gradient into its place in the buffer, and `.grad` onto that place."""
        view, gradient, factor = self._views[number], parameter.grad, self.scale_early
        assert gradient is not None
        start_ns = time.monotonic_ns()
        with torch.no_grad():
            if gradient.data_ptr() != view.data_ptr():
                torch.mul(gradient, factor, out=view) if factor is not None else view.copy_(gradient)
                parameter.grad = view
            elif factor is not None:
                view.mul_(factor)
        self._note_ready(number, start_ns)

    def _note_ready(self, number: int, start_ns: int) -> None:
        self._ready[number] = end_ns = time.monotonic_ns()
        for bucket in self._buckets_of[number]:
            self._missing[bucket] -= 1
        # Added up, because a record for each parameter would cost more than some copies do.
        self._pack_start_ns = self._pack_start_ns or start_ns
        self._pack_busy_ns += end_ns - start_ns
        self._pack_end_ns = end_ns

    def _note_pack(self) -> None:
        """All copying into the buffers of this step: one record."""
        if self._pack_start_ns:
            self.log.add(
                "pack",
                label="all gradients",
                start=self._pack_start_ns,
                end=self._pack_end_ns,
                busy=self._pack_busy_ns,
            )
        self._pack_start_ns = self._pack_busy_ns = 0

    def _announce(self) -> None:
        """Hand on every bucket whose turn it is: in bucket order on all ranks, whatever order they fill in."""
        while self._announced < len(self._missing) and self._missing[self._announced] == 0:
            self._announced += 1
            self.bucket_ready(self._announced - 1)

    def _settle_untouched(self, number: int, parameter: nn.Parameter) -> None:
        """No gradient came in this backward: there is an older one to be averaged, or the flag is set."""
        if parameter.grad is not None:
            self._put_in_place(number, parameter)
            return
        slot, start_ns = self.layout.slots[number], time.monotonic_ns()
        self._views[number].zero_()
        self._buffers[slot.group][slot.flag] = 1
        self._note_ready(number, start_ns)

    def _settle_unused(self) -> None:
        """A flag that is set on any rank is set in the sum, so either all ranks leave here or all go on."""
        flags = [buffer[self._num_gradients[group] :] for group, buffer in self._buffers.items()]
        if not any(bool(part.any()) for part in flags):
            return
        for part in flags:
            part.zero_()  # nothing else writes a 0 there before the next step
        marks = [IDLE if self._idle else int(parameter.grad is None) for parameter in self._parameters]
        own = torch.tensor(marks, dtype=torch.uint8)
        with self.communicator.scope("unused parameters"):
            by_rank = self.communicator.all_gather(own.to(self.communicator.device), label="unused parameters")
        for number, answers in enumerate(torch.stack(by_rank).T.tolist()):
            unused = [rank for rank, answer in enumerate(answers) if answer == UNUSED]
            if not unused:
                continue
            if USED in answers:
                self._settle_partly_unused(number, unused)
            else:
                self._parameters[number].grad = None  # nobody who has a batch uses it

    def _settle_partly_unused(self, number: int, ranks: list[int]) -> None:
        if self._unused == "zero":
            self._parameters[number].grad = self._views[number]
            return
        raise ContractError(
            f"parameter {self._names[number]} has a gradient on some ranks, but not on {', '.join(map(str, ranks))}.",
            action='Use it on every rank, or set unused="zero" to count it as zero there.',
            rank=self.communicator.rank,
        )
