"""Gradients in flat buffers: what the bucketed and the shared-memory method have in common.

After backward every `.grad` is a view of its place in the buffer, so averaging the buffer averages the gradients, and
nothing is copied back. `zero_grad(set_to_none=True)` drops the view; the next backward then makes a fresh gradient,
which is copied into its place as soon as it is ready: the only copy.

Ranks must learn, without a message of its own, that some rank has no gradient for a parameter (see layout.py). Its
place is filled with zeros and its flag with a 1; the flags are summed like gradients, so that a sum above 0 anywhere
sends all ranks, and only then, into one more exchange that says which rank misses what. No sum makes a flag 0 again:
flags are added, then divided at most. The same exchange tells ranks that parameters were frozen or unfrozen since the
last step: a rank where that happened sets a flag, all ranks compare, and lay their buffers out anew.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from syncline.comm.communicator import Communicator
from syncline.errors import ContractError, SynclineError
from syncline.methods import Unused
from syncline.sync.base import Announced, GradientSync, in_backward, in_one_piece
from syncline.sync.layout import MB, Group, Layout, Size, plan_layout
from syncline.sync.sparse import average_sparse, no_rows, sparse_weights

MOST_BUCKETS = 2048
"""A cap that would make more is raised: each bucket costs a message, and thousands cost seconds."""
MANY_BUCKETS, SMALL_BUCKET = 64, 64 * 1024
"""A smaller cap is raised too, if it would make many, and more than two for each parameter."""
USED, UNUSED, IDLE, FROZEN = 0, 1, 2, 3
"""What a rank says of a parameter; a rank without a batch says neither used nor unused."""


class FlatSync(GradientSync):
    """Watches gradients become ready; subclasses send buckets and wait for them."""

    first_bucket_mb = 1.0

    def __init__(
        self,
        communicator: Communicator,
        *,
        bucket_cap_mb: float = 25.0,
        unused: Unused = "error",
    ) -> None:
        super().__init__(communicator)
        self.bucket_cap_mb = bucket_cap_mb
        self.unused = unused
        self._named: list[tuple[str, nn.Parameter]] = []
        self._names: list[str] = []
        self._parameters: list[nn.Parameter] = []
        """Those that are trained now, and whose gradients lie in the buffers."""
        self._idle = False
        self._firings: dict[int, int] = {}
        """With a static graph: how often each parameter's gradient grew in this backward, the last to grow last."""
        self._expected_firings: list[int] = []
        """The same of the first backward; empty until it has ended."""
        self._unused_before: frozenset[int] | None = None
        self._frozen_anew = False
        """requires_grad of some parameter has changed since the buffers were laid out."""
        self._pack_start_ns = self._pack_end_ns = self._pack_busy_ns = 0
        self.layout = Layout((), (), {})
        self._buffers: dict[Group, Tensor] = {}

    # What a subclass adds.

    @abstractmethod
    def allocate(self, layout: Layout) -> dict[Group, Tensor]:
        """A zeroed buffer of the layout's length for each group. Collective."""

    @abstractmethod
    def bucket_ready(self, number: int) -> None:
        """All of this bucket's gradients are in place; buckets come in the order of sending."""

    @abstractmethod
    def complete(self) -> None:
        """Return when every bucket holds the mean. Collective."""

    @property
    def sees_gradients(self) -> bool:  # type: ignore[override]
        """Not where there is nobody to send them to."""
        return self._model is not None

    @property
    def changes_gradients(self) -> bool:
        """Also where there is nobody to average with."""
        return False

    @property
    def scale_early(self) -> float | None:
        """Factor applied while a gradient is copied into place, which costs nothing there.

        Dividing by a power of two is exact at any moment; by another number it is done once, on the sum.
        """
        world_size = self.communicator.world_size
        return 1 / world_size if world_size & (world_size - 1) == 0 else None

    # The contract.

    def attach(self, model: nn.Module) -> nn.Module:
        self._start(model)
        self._named = self._averaged(model)
        if self.communicator.world_size == 1 and not self.changes_gradients:
            return model  # the gradients are the mean already
        self._model = model
        self._with_sparse_gradients = sparse_weights(model)
        self._take_parameters()
        return Announced(model, self)

    def forward_begins(self) -> None:
        if in_backward():
            return
        if self._ready:
            self._after_a_backward_that_raised()
        now = self._kinds()
        if now != self._taken:
            trained_differently = [kind for kind, _ in now] != [kind for kind, _ in self._taken]
            if not trained_differently or not self.layout.slots:
                self._take_parameters()  # another dtype, or nothing was trained: there is no flag to say it with
            elif not self._frozen_anew:
                self._frozen_anew = True
                slot = self.layout.slots[0]
                self._buffers[slot.group][slot.flag] = 1

    def finish(self) -> None:
        if not self._expects:
            return
        self._compare_with_last_backward()
        for number in [*self._firings, *range(len(self._parameters))]:
            if number not in self._ready:
                self._settle_untouched(number, self._parameters[number])
        if self.static_graph and not self._expected_firings:
            self._expected_firings = [self._firings.get(number, 1) for number in range(len(self._parameters))]
        self._announce()
        self._note_pack()
        self.complete()
        self._average_sparse()
        self._settle_unused()
        self._begin_step()
        self._expects = False

    def finish_without_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
        self._expects = self._idle = True
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
    def bucket_sizes(self) -> list[int]:
        """Bytes of gradients in each bucket, in the order in which they are sent."""
        ends = self._num_gradients if self._buffers else {}
        return [
            max(0, min(bucket.stop, ends[bucket.group]) - bucket.start) * self._buffers[bucket.group].element_size()
            for bucket in self.layout.buckets
        ]

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

    # What is in the buffers.

    def _kinds(self) -> list[tuple[bool, torch.dtype]]:
        return [(parameter.requires_grad, parameter.dtype) for _, parameter in self._named]

    def _take_parameters(self) -> None:
        """Buffers and hooks for what is trained now. Collective."""
        self._taken, self._frozen_anew, self._expected_firings = self._kinds(), False, []
        trained = [(name, parameter) for name, parameter in self._named if parameter.requires_grad]
        dense = [pair for pair in trained if id(pair[1]) not in self._with_sparse_gradients]
        self._sparse = [pair for pair in trained if id(pair[1]) in self._with_sparse_gradients]
        self._names = [name for name, _ in dense]
        self._parameters = [parameter for _, parameter in dense]
        self._lay_out(list(reversed(range(len(dense)))))
        self._watch([parameter for _, parameter in [*dense, *self._sparse]], type(self)._on_ready)

    def _lay_out(self, order: Sequence[int]) -> None:
        sizes = [Size(p.numel(), p.element_size(), (p.dtype, p.device)) for p in self._parameters]
        total = sum(size.num_elements * size.element_size for size in sizes)
        needless = min(SMALL_BUCKET, total // max(MANY_BUCKETS, 2 * len(sizes)))
        cap_bytes = max(1, round(self.bucket_cap_mb * MB), total // MOST_BUCKETS, needless)
        first_cap_bytes = min(round(self.first_bucket_mb * MB), cap_bytes)
        self.layout = plan_layout(sizes, order, cap_bytes=cap_bytes, first_cap_bytes=first_cap_bytes)
        self._send_order: Sequence[int] = range(len(self.layout.buckets))
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
        return flat.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride())

    # How a step goes.

    def _begin_step(self) -> None:
        # When each parameter became ready, in that order; for each bucket, how many it still waits for; and how many
        # buckets were handed on.
        self._ready: dict[int, int] = {}
        self._missing = [len(bucket.parameters) for bucket in self.layout.buckets]
        self._announced = 0
        self._firings.clear()

    def _after_a_backward_that_raised(self) -> None:
        if self._announced:
            raise SynclineError(
                "the last backward raised an error after buckets had been sent, so ranks are out of step.",
                action="Wrap the model again on every rank.",
                rank=self.communicator.rank,
            )
        self._begin_step()

    def _on_ready(self, number: int, parameter: Tensor) -> None:
        if number >= len(self._parameters) or parameter.grad is None:
            return  # a sparse gradient, which is averaged after backward; or autograd left it undefined
        if self.static_graph and not self._is_last_firing(number):
            return
        if number in self._ready:
            raise ContractError(
                f"the gradient of {self._names[number]} became ready twice in one backward (torch's class says: "
                "Expected to mark a variable ready only once.).",
                action="Use checkpointing with use_reentrant=False where a parameter is used in two segments, or set "
                "static_graph=True if every backward does the same.",
                rank=self.communicator.rank,
            )
        self._put_in_place(number, parameter)
        self._announce()

    def _is_last_firing(self, number: int) -> bool:
        """A gradient is ready when it has grown as often as in the first backward, at whose end all are."""
        self._firings[number] = self._firings.pop(number, 0) + 1
        return bool(self._expected_firings) and self._firings[number] >= self._expected_firings[number]

    def _put_in_place(self, number: int, parameter: Tensor) -> None:
        """The gradient into its place in the buffer, and `.grad` onto that place."""
        view, gradient, factor = self._views[number], parameter.grad, self.scale_early
        assert gradient is not None
        start_ns = time.monotonic_ns()
        if gradient.is_sparse:
            raise ContractError(
                f"the gradient of {self._names[number]} is sparse, and its module does not say so.",
                action="Use nn.Embedding(..., sparse=True), or method all-reduce.",
                rank=self.communicator.rank,
            )
        with torch.no_grad():
            if gradient.data_ptr() != view.data_ptr():
                torch.mul(gradient, factor, out=view) if factor is not None else view.copy_(gradient)
                parameter.grad = view
            elif factor is not None:
                view.mul_(factor)
            self._look_at(self._names[number], view)
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
        """Hand on every bucket whose turn it is: in one order on all ranks, whatever order they fill in."""
        while self._announced < len(self._send_order) and self._missing[self._send_order[self._announced]] == 0:
            self._announced += 1
            self.bucket_ready(self._send_order[self._announced - 1])

    def _compare_with_last_backward(self) -> None:
        unused: frozenset[int] = frozenset()
        if len(self._ready) < len(self._parameters):
            unused = frozenset(range(len(self._parameters))) - self._ready.keys() - self._firings.keys()
        self.graph_is_static &= self._unused_before in (None, unused)
        self._unused_before = unused

    def _settle_untouched(self, number: int, parameter: nn.Parameter) -> None:
        """No gradient came in this backward: there is an older one to be averaged, or the flag is set."""
        if parameter.grad is not None:
            self._put_in_place(number, parameter)
            return
        slot, start_ns = self.layout.slots[number], time.monotonic_ns()
        self._views[number].zero_()
        self._buffers[slot.group][slot.flag] = 1
        self._note_ready(number, start_ns)

    def _average_sparse(self) -> None:
        for name, parameter in self._sparse:
            has_gradient = parameter.grad is not None
            gradient = parameter.grad if parameter.grad is not None else no_rows(parameter)
            self._look_at(name, gradient)
            with self.communicator.scope(name):
                average_sparse(self.communicator, name, gradient)
            parameter.grad = gradient if has_gradient or gradient._nnz() else None

    def _settle_unused(self) -> None:
        """A flag that is set on any rank is set in the sum, so either all ranks leave here or all go on."""
        flags = [buffer[self._num_gradients[group] :] for group, buffer in self._buffers.items()]
        if not any(bool(part.any()) for part in flags):
            return
        for part in flags:
            part.zero_()  # nothing else writes a 0 there before the next step
        own = torch.tensor([self._mark(parameter) for _, parameter in self._named], dtype=torch.uint8)
        with self.communicator.scope("unused parameters"):
            by_rank = self.communicator.all_gather(own.to(self.communicator.device), label="unused parameters")
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        for (name, parameter), marks in zip(self._named, torch.stack(by_rank).T.tolist(), strict=True):
            self._settle(name, parameter, marks, numbers.get(id(parameter)))
        if self._frozen_anew:
            self._take_parameters()

    def _mark(self, parameter: nn.Parameter) -> int:
        if not parameter.requires_grad:
            return FROZEN
        return IDLE if self._idle else UNUSED if parameter.grad is None else USED

    def _settle(self, name: str, parameter: nn.Parameter, marks: list[int], number: int | None) -> None:
        """What all ranks say of a parameter, and its number if its gradient lies in the buffers."""
        frozen = [rank for rank, mark in enumerate(marks) if mark == FROZEN]
        if frozen and len(frozen) < len(marks):
            raise ContractError(
                f"parameter {name} is frozen on some ranks ({', '.join(map(str, frozen))}), but not on all.",
                action="Set requires_grad to the same value on every rank.",
                rank=self.communicator.rank,
            )
        if frozen or id(parameter) in self._with_sparse_gradients:
            return
        unused = [rank for rank, mark in enumerate(marks) if mark == UNUSED]
        if unused and USED in marks and self.unused == "error":
            raise ContractError(
                f"parameter {name} has a gradient on some ranks, but not on {', '.join(map(str, unused))}.",
                action='Use it on every rank, or set unused="zero" to count it as zero there.',
                rank=self.communicator.rank,
            )
        if USED not in marks and unused:
            parameter.grad = None  # nobody who has a batch uses it
        elif number is None:
            self._average_at_once(name, parameter)
        elif unused:
            parameter.grad = self._views[number]

    def _average_at_once(self, name: str, parameter: nn.Parameter) -> None:
        """Of a parameter that was unfrozen since the last step: it is in the buffers from the next one on."""
        mean = torch.zeros_like(parameter) if parameter.grad is None else in_one_piece(parameter.grad)
        with self.communicator.scope(name), torch.no_grad():
            self.communicator.all_reduce(mean, label=name)
            parameter.grad = mean.div_(self.communicator.world_size)
