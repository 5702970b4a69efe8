"""ahead: gradients travel in the order in which the next forward needs them, and go on travelling while it runs.

The other methods end a step when the last gradient has arrived; that is the first layer's, which is ready last and
needed first. Here the update of a layer is applied when the layer is next called, so the link may work through the
next forward, and a step takes the longer of compute and wire instead of compute and what is left of the wire.

    backward        copies gradients into the flat buffer, hands chunks to the sender, leaves a tripwire in `.grad`
    optimizer.step  freezes the options of this moment (a scheduler changes them next) and is then a no-op
    next forward    each module waits for its parameters' chunks; the optimiser's own class then updates them

The layout is that of `bucketed` with chunks of one size, and sums depend on the layout alone: with `barrier=True`,
which waits for everything at the end of backward, all results are the same to the bit.

Of the chunks that are ready on all ranks, the one that the next forward needs first is sent (voting.py). A simulation
(predict/transfers.py) says what that gains, from the last rank's ready times, from when forward comes to each module,
and from the link's measured rate: first after steps with a barrier, then from steps without, because transfers slow
backward down. Where it gains too little, the barrier stays.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from syncline.comm.communicator import Communicator
from syncline.errors import ContractError, SynclineError
from syncline.methods import Collective, Order, TransferDtype, Unused
from syncline.predict.transfers import Prediction, chunk_bytes
from syncline.sync.base import in_backward, when_garbage
from syncline.sync.bucketed import Bucketed
from syncline.sync.hooks import CommHook
from syncline.sync.late_updates import LateUpdates, why_not
from syncline.sync.layout import MB
from syncline.sync.transfer_plan import StepTimes, measure_link, plan_transfers
from syncline.sync.voting import VotingSender
from syncline.sync.waits import forget_calls, waiting_places, watch_calls

PLAN_AFTER = (4, 8, 14)
"""Steps after which it is predicted what a step takes, from the steps since the last time. After the second it is
decided whether to go on without a barrier: steps with one know nothing of what transfers do to the next forward."""
STRICT_STEPS = 12
LEAST_GAIN = 0.03
SHORTEST_STALL_NS = 20_000
"""Asking for what has arrived already takes less."""


class Ahead(Bucketed):
    _sender: VotingSender
    first_bucket_mb = float(10**6)  # chunks of one size

    def __init__(
        self,
        communicator: Communicator,
        *,
        chunk_mb: float | None = None,
        order: Order = "next-use",
        barrier: bool | None = None,
        strict: bool | None = None,
        collective: Collective | None = None,
        transfer_dtype: TransferDtype | None = None,
        unused: Unused = "error",
    ) -> None:
        super().__init__(
            communicator, bucket_cap_mb=chunk_mb or 2.0, collective=collective, transfer_dtype=transfer_dtype,
            unused=unused,
        )  # fmt: skip
        self._chunk_mb = chunk_mb
        self._order_by = order
        self._strict = strict
        self._barrier_given = self._barrier = barrier
        """None until it is decided by what is predicted."""
        self._why_barrier = "it was asked for" if barrier else ""
        self.prediction: Prediction | None = None
        self.with_barrier: Prediction | None = None
        self._updates: LateUpdates | None = None
        self._bound_to: torch.optim.Optimizer | None = None
        self._optimizer_hooks: list[RemovableHandle] = []
        self._waits = True
        """Whether the step that runs now ends with a barrier: the first ones do, to be measured."""
        # A step whose gradients are on their way.
        self._pending = False
        self._asked = False
        """optimizer.step has been called for it."""
        self._outstanding: set[int] = set()
        """Parameters whose update is to be applied."""
        self._arrived: set[int] = set()
        self._flags_seen = False
        self._hidden_weights: dict[int, Tensor] = {}
        """In a strict step: what parameters really hold, while they show NaN."""
        # What is watched, to plan with.
        self._places: dict[nn.Module, list[int]] = {}
        self._seen = False
        """The model was called since the wrapper's forward began."""
        self._steps = 0
        """Since the buffers were laid out."""
        self._times = StepTimes()
        self._last_ready: dict[int, int] = {}
        if unused == "zero":
            self._wait_always('unused="zero" needs every rank\'s word on every gradient')

    def make_sender(
        self, channels: list[Communicator], collective: Collective, wire_dtype: torch.dtype | None
    ) -> VotingSender:
        return VotingSender(channels, collective, wire_dtype, self.own_channel("votes"))

    # The contract.

    def attach(self, model: nn.Module) -> nn.Module:
        if self.communicator.world_size > 1:
            self.link = measure_link(self._sender, self.communicator)
            if self._chunk_mb is None:
                total = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
                self.bucket_cap_mb = chunk_bytes(self.link, total) / MB
        module = super().attach(model)
        if self.communicator.world_size > 1:
            this = weakref.ref(self)
            watch_calls(model, lambda called: None if (sync := this()) is None else sync._before(called))
            when_garbage(self, lambda: forget_calls(model))
        return module

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        if self._bound_to is optimizer or self.communicator.world_size == 1:
            return
        self.synchronize()
        self._unbind()
        self._bound_to = optimizer
        reason = self._why_not_late(optimizer)
        if reason is not None:
            self._wait_always(reason)
            return
        self._updates = LateUpdates(optimizer)
        this = weakref.ref(self)
        self._optimizer_hooks = [
            optimizer.register_step_pre_hook(_weakly(this, Ahead._before_step)),
            optimizer.register_state_dict_pre_hook(_weakly(this, Ahead._before_state)),
            optimizer.register_load_state_dict_pre_hook(_weakly(this, Ahead._before_state)),
        ]
        for hook in self._optimizer_hooks:
            when_garbage(self, hook.remove)

    def _unbind(self) -> None:
        for hook in self._optimizer_hooks:
            hook.remove()
        self._optimizer_hooks, self._updates = [], None

    def _why_not_late(self, optimizer: torch.optim.Optimizer) -> str | None:
        assert self._model is not None, "attach a model first"
        group, channel = (getattr(c.backend, "group", None) for c in (self.communicator, self._sender.channels[0]))
        if group is not None and group is channel:
            return "torch gives a subgroup only one channel"
        return why_not(optimizer, self._model, [pair for pair in self._named if pair[1].requires_grad])

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        self.bind(optimizer)
        super().update(optimizer)

    def expect_backward(self) -> None:
        if self._pending and not self._asked and torch.is_grad_enabled() and not in_backward():
            self._settle_without_step()
        super().expect_backward()

    def expect_again(self) -> None:
        if self._pending and not self._asked:
            self._settle_without_step()  # a second backward adds to the gradients of the first
        super().expect_again()

    def forward_begins(self) -> None:
        if in_backward():
            return
        if self._pending and self._kinds() != self._taken:
            self.synchronize()
        if not self._pending:
            super().forward_begins()
        self._seen = False
        self._times.forward_begins()

    def forward_ended(self) -> None:
        if in_backward() or not self._expects:
            return
        if self._pending:
            if not self._seen:
                raise SynclineError("method ahead did not see the model being called.", rank=self.communicator.rank)
            self.synchronize()  # what belongs to modules that this forward did not call
        self._plan_now_and_then()
        early = self._barrier is None and self._steps < PLAN_AFTER[0]
        self._waits = bool(self._barrier) or self._updates is None or early or self._frozen_anew or not self._rebuilt
        self._times.backward_begins()

    def finish(self) -> None:
        """Gradients hold the mean. A caller that waits here loses what this method gains."""
        self.finish_for_update()
        self.synchronize()

    def backward_ended(self) -> None:
        self.finish_for_update()

    def finish_for_update(self) -> None:
        if not self._expects:
            return
        self._steps += 1
        if self._waits:
            before_ns = time.monotonic_ns()
            super().finish()
            self._times.stalled_ns += time.monotonic_ns() - before_ns
            return
        self._compare_with_last_backward()
        for number, parameter in enumerate(self._parameters):
            if number not in self._ready:
                self._settle_untouched(number, parameter)
        self._announce()
        self._note_pack()
        self._pending, self._asked, self._expects, self._flags_seen = True, False, False, False
        self._arrived = set()
        self._outstanding = set(range(len(self._parameters)))

    def finish_without_gradients(self) -> None:
        """Its own last update first; and where the others plan, so does a rank without a batch."""
        self.synchronize()
        if self._plans_now:
            self._plan(torch.zeros(1, 2 * len(self.layout.buckets) + 3, dtype=torch.float64))
        super().finish_without_gradients()

    def synchronize(self) -> None:
        if not self._pending:
            return
        if self._asked:
            self._update(sorted(self._outstanding))
            return
        self._wait_for(self._send_order)
        for number, parameter in enumerate(self._parameters):
            if parameter.grad is self._tripwires[number]:
                parameter.grad = self._views[number]
        self._settle_unused()
        self._end_pending()

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        super().register_comm_hook(state, hook)
        self._wait_always("a communication hook averages the buckets")

    def detach(self) -> None:
        self.synchronize()
        self._unbind()
        if self._model is not None:
            forget_calls(self._model)
        super().detach()

    def state(self) -> dict[str, Any]:
        self.synchronize()
        return {**super().state(), "chunk_mb": self.bucket_cap_mb}

    def load_state(self, state: dict[str, Any]) -> None:
        self.bucket_cap_mb = state.get("chunk_mb", self.bucket_cap_mb)
        super().load_state({key: value for key, value in state.items() if key == "order"})

    @property
    def buffer_bytes(self) -> int:
        """As `bucketed`: the tripwires are one element for each parameter."""
        return super().buffer_bytes + sum(wire.element_size() for wire in self._wires.values())

    @property
    def predicted(self) -> dict[str, Any] | None:
        if self.prediction is None or self.with_barrier is None:
            return None
        ahead_s, barrier_s = self.prediction.step_s, self.with_barrier.step_s
        times = {"ahead_s": ahead_s, "barrier_s": barrier_s, "bound_s": self.prediction.bound_s}
        return {"step_s": barrier_s if self._barrier else ahead_s, "waits": bool(self._barrier), **times}

    def describe(self) -> str:
        if self._why_barrier:
            about = f"waits for all gradients at the end of backward: {self._why_barrier}"
        elif self.prediction is None or self.with_barrier is None:
            about = "the order of transfers is not planned yet"
        else:
            about = (
                f"predicted {self.prediction.step_s * 1e3:.0f} ms a step, {self.with_barrier.step_s * 1e3:.0f} ms "
                f"with a barrier, at least {self.prediction.bound_s * 1e3:.0f} ms"
            )
        return f"{about}\n{super().describe()}"

    # Gradients on their way.

    def _wait_always(self, reason: str) -> None:
        if self._barrier is not True:
            self._barrier, self._why_barrier = True, reason
            if self._model is not None:
                forget_calls(self._model)
            if self.communicator.rank == 0 and self.communicator.world_size > 1:
                warnings.warn(f"method ahead waits at the end of each backward: {reason}.", stacklevel=2)

    def _lay_out(self, order: Any) -> None:
        super()._lay_out(order)
        slots, buckets = self.layout.slots, self.layout.buckets
        self._chunks_of = [
            [
                chunk
                for chunk, bucket in enumerate(buckets)
                if bucket.group == slot.group and bucket.start < slot.stop and bucket.stop > slot.start
            ]
            for slot in slots
        ]
        last_of_group = {bucket.group: chunk for chunk, bucket in enumerate(buckets)}
        self._flag_chunks = list(last_of_group.values())
        # Before it is known better: what is ready last is needed first.
        self._by_urgency: Sequence[int] = range(len(buckets))[:: 1 if self._order_by == "ready" else -1]
        self._wires: dict[int, Tensor] = {}
        self._tripwires: dict[int, Tensor] = {}
        for number in range(len(self._parameters)):
            self._lay_wire(number)
        self._times.records.clear()

    def _lay_wire(self, number: int) -> None:
        """One element stands for a whole gradient: adding to it raises an error, and reading it gives NaN. What
        changes it without one (`zero_`, or anything where a gradient has one element) raises its version from 0."""
        parameter = self._parameters[number]
        with torch.inference_mode(False):  # else it would have no version
            wire = torch.full((1,) * parameter.dim(), torch.nan, dtype=parameter.dtype, device=parameter.device)
            self._wires[number], self._tripwires[number] = wire, wire.expand(parameter.shape)

    def _take_parameters(self) -> None:
        """What was planned for other parameters does not hold for these."""
        self._steps, self._places, self._barrier = 0, {}, self._barrier if self._why_barrier else self._barrier_given
        super()._take_parameters()
        this = weakref.ref(self)
        guards = [p.register_hook(_guard(this, number)) for number, p in enumerate(self._parameters)]
        self._hooks += guards
        for guard in guards:
            when_garbage(self, guard.remove)

    def _refuse_to_add(self, number: int) -> None:
        """A gradient is about to be added to one that is on its way; what torch says of that names nothing."""
        if self._pending and self._parameters[number].grad is self._tripwires[number]:
            raise ContractError(
                f"a backward adds to the gradient of {self._names[number]}, which method ahead has on its way.",
                action="Call model.synchronize() before that backward, or optimizer.step() or zero_grad().",
                rank=self.communicator.rank,
            )

    def _announce(self) -> None:
        """Without a barrier: offer what is ready, in whatever order. The sender knows which is the most urgent."""
        if self._waits:
            super()._announce()
            return
        for chunk, missing in enumerate(self._missing):
            if missing == 0:
                if self._announced == 0:
                    self._sender.begin(self._by_urgency)
                self._missing[chunk] = -1
                self._announced += 1
                self._offer(chunk, max(self._ready[number] for number in self.layout.buckets[chunk].parameters))

    def _offer(self, chunk: int, ready_ns: int) -> None:
        self._sender.offer(chunk, self._range(self.layout.buckets[chunk]), ready_ns)

    def _put_in_place(self, number: int, parameter: Tensor) -> None:
        super()._put_in_place(number, parameter)
        if not self._waits:
            parameter.grad = self._tripwires[number]

    def _before_step(self, _optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._pending or self._asked:
            return
        if args[1:] or kwargs.get("closure") is not None:
            self.synchronize()
            return
        assert self._updates is not None
        for number, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                self._outstanding.discard(number)  # dropped by zero_grad, or never there
            elif parameter.grad is not self._tripwires[number] or self._wires[number]._version:
                raise ContractError(
                    f"the gradient of {self._names[number]} was changed before the transfers of method ahead ended.",
                    action="Call model.synchronize() between backward and what changes gradients.",
                    rank=self.communicator.rank,
                )
            parameter.grad = None
        self._asked = True
        if not self._outstanding:
            self._wait_for(self._send_order)
            self._end_pending()
            return
        self._updates.freeze()
        if self._strict or (self._strict is None and self._steps <= STRICT_STEPS):
            self._hide_weights()

    def _before_state(self, *_: object) -> None:
        self.synchronize()

    def _settle_without_step(self) -> None:
        """No step was asked for since backward: the gradients stay, unless zero_grad has dropped them."""
        for number, parameter in enumerate(self._parameters):
            if parameter.grad is self._tripwires[number] and self._wires[number]._version:
                self._lay_wire(number)
                parameter.grad = None
        self.synchronize()

    def _before(self, module: nn.Module) -> None:
        """A module of the model is about to be called."""
        self._seen = True
        if self._pending and self._asked:
            numbers = self._places.get(module)
            if numbers:
                self._update(numbers)
        if self._steps <= PLAN_AFTER[-1] and not in_backward():
            self._times.calls(module)

    def _update(self, numbers: Iterable[int]) -> None:
        """Wait for the gradients of these parameters, and update those that were not yet."""
        wanted = [number for number in numbers if number in self._outstanding]
        if not wanted or self._unused_somewhere():
            return
        self._wait_for([chunk for number in wanted for chunk in self._chunks_of[number]])
        self._apply(wanted)
        self._outstanding.difference_update(wanted)
        if not self._outstanding:
            self._wait_for(self._send_order)
            self._end_pending()

    def _apply(self, numbers: Sequence[int]) -> None:
        assert self._updates is not None
        for number in numbers:
            if number in self._hidden_weights:
                self._parameters[number].data = self._hidden_weights.pop(number)
        with self.log.span("update"):
            self._updates.apply([self._parameters[n] for n in numbers], [self._views[n] for n in numbers])

    def _unused_somewhere(self) -> bool:
        """Whether a flag is set: then all ranks settle the whole step at once. Flags lie in the chunks of the first
        layers, which are waited for first anyway."""
        if self._flags_seen:
            return False
        self._flags_seen = True
        self._wait_for(self._flag_chunks)
        flags = [buffer[self._num_gradients[group] :] for group, buffer in self._buffers.items()]
        if not any(bool(part.any()) for part in flags):
            return False
        self._wait_for(self._send_order)
        wanted = sorted(self._outstanding)
        for number in wanted:
            self._parameters[number].grad = self._views[number]
        self._settle_unused()
        used = [number for number in wanted if self._parameters[number].grad is not None]
        for number in wanted:
            self._parameters[number].grad = None
        if used:
            self._apply(used)
        self._show_weights()
        self._outstanding.clear()
        self._end_pending()
        self._wait_always("a parameter is unused")
        return True

    def _wait_for(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            if chunk in self._arrived:
                continue
            start_ns = time.monotonic_ns()
            self._sender.wait(chunk)
            self._arrived.add(chunk)
            end_ns = time.monotonic_ns()
            self._times.stalled_ns += end_ns - start_ns
            if end_ns - start_ns > SHORTEST_STALL_NS:
                self.log.add("phase", name="stall", label=f"bucket {chunk}", start=start_ns, end=end_ns)
            self._divide(chunk)

    def _end_pending(self) -> None:
        self._pending = self._asked = False
        self._begin_step()

    def _hide_weights(self) -> None:
        """Whatever reads a weight without waiting for it computes NaN, and is seen."""
        for number in self._outstanding:
            parameter = self._parameters[number]
            self._hidden_weights[number] = parameter.data
            parameter.data = self._tripwires[number]

    def _show_weights(self) -> None:
        for number, weights in self._hidden_weights.items():
            self._parameters[number].data = weights
        self._hidden_weights = {}

    # The plan.

    def _plan_now_and_then(self) -> None:
        """At the end of a forward, when everything of the step before has arrived."""
        if self._steps > PLAN_AFTER[-1] or self._barrier is True or self._updates is None:
            return
        if not self._places:
            numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
            assert self._model is not None
            self._places = waiting_places(self._model, self._times.called.keys(), numbers)
        elif self._last_ready and self._rebuilt:
            rate = self._sender.seconds_per_byte
            self._times.record(self._places, self._chunks_of, self._flag_chunks, self._last_ready, rate)
        if self._plans_now and self._times.records:
            self._plan(torch.tensor(self._times.records, dtype=torch.float64))
            self._times.records.clear()

    @property
    def _plans_now(self) -> bool:
        """The same on all ranks, also on one without a batch."""
        return self._steps in PLAN_AFTER and self._barrier is not True and self._updates is not None

    def _plan(self, records: Tensor) -> None:
        sizes = [(b.stop - b.start) * self._buffers[b.group].element_size() for b in self.layout.buckets]
        plan = plan_transfers(self.communicator, records, sizes, self.link, self._order_by)
        self.prediction, self.with_barrier, self._by_urgency = plan.ahead, plan.with_barrier, plan.by_urgency
        if self._barrier is None and self._steps > PLAN_AFTER[0]:
            gain = 1 - self.prediction.step_s / self.with_barrier.step_s
            self._barrier = gain < LEAST_GAIN
            if self._barrier:
                self._why_barrier = f"without, it would gain {gain:.0%}, less than {LEAST_GAIN:.0%}"
                assert self._model is not None
                forget_calls(self._model)
        self.log.add("prediction", **(self.predicted or {}))

    def _begin_step(self) -> None:
        self._last_ready = getattr(self, "_ready", {})
        super()._begin_step()


def _guard(this: weakref.ref[Ahead], number: int) -> Callable[[Tensor], None]:
    def before_accumulation(_: Tensor) -> None:
        sync = this()
        if sync is not None:
            sync._refuse_to_add(number)

    return before_accumulation


def _weakly(this: weakref.ref[Ahead], react: Any) -> Any:
    def hook(*args: Any) -> None:
        sync = this()
        if sync is not None:
            react(sync, *args)

    return hook
