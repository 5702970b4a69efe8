"""bucketed: buckets of gradients are averaged while backward still runs.

One thread per rank sends, on channels of its own: buckets start in bucket order on all ranks, several are in flight,
and a collective of many rounds holds up nothing but the next bucket. After the first step the buckets are laid out
anew in the order in which gradients really became ready, as rank 0 saw it.

Two threads touch a bucket, and never at the same time. Backward fills it and hands it over through a queue; from then
on it belongs to the sender, until `collect` and `wait` have given it back to the thread that calls `finish`. Backward
does not send by itself, because it would stand still in every round of a ring.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from syncline.collectives.execute import Executor
from syncline.collectives.patterns import make_schedule
from syncline.comm.communicator import Communicator, Operation, Work
from syncline.comm.short_turns import take_short_turns
from syncline.errors import PlanError
from syncline.methods import Collective, TransferDtype, Unused
from syncline.sync.base import when_garbage
from syncline.sync.flat import FlatSync
from syncline.sync.hooks import CommHook, HookBucket, apply_hook
from syncline.sync.layout import Bucket, Group, Layout

WIRE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Bucketed(FlatSync):
    def __init__(
        self,
        communicator: Communicator,
        *,
        bucket_cap_mb: float = 25.0,
        collective: Collective | None = None,
        transfer_dtype: TransferDtype | None = None,
        groups: int = 1,
        overlap: bool = True,
        unused: Unused = "error",
    ) -> None:
        super().__init__(communicator, bucket_cap_mb=bucket_cap_mb, unused=unused)
        collective = collective or ("native" if transfer_dtype is None else "direct")
        if transfer_dtype is not None and collective == "native":
            raise PlanError(
                "a native all-reduce cannot send 16-bit values and sum them in 32 bits.",
                action='Use collective "direct", or leave transfer_dtype out.',
            )
        self._overlap = overlap
        self._hook: tuple[object, CommHook] | None = None
        self._rebuilt = False
        wire = WIRE_DTYPES[transfer_dtype] if transfer_dtype else None
        self._sender = self.make_sender(self.open_channels(groups), collective, wire)
        when_garbage(self, self._sender.stop)

    def open_channels(self, groups: int) -> list[Communicator]:
        """What buckets travel on, in turn. Collective."""
        return [self.own_channel(f"buckets {number}") for number in range(groups)]

    def make_sender(
        self, channels: list[Communicator], collective: Collective, wire_dtype: torch.dtype | None
    ) -> Sender:
        return Sender(channels, collective, wire_dtype)

    @property
    def changes_gradients(self) -> bool:
        return self._hook is not None  # which may do more than average

    @property
    def scale_early(self) -> float | None:
        return super().scale_early if self._hook is None else None

    def allocate(self, layout: Layout) -> dict[Group, Tensor]:
        return {
            (dtype, device): torch.zeros(length, dtype=dtype, device=device)
            for (dtype, device), length in layout.lengths.items()
        }

    def bucket_ready(self, number: int) -> None:
        if self._overlap:
            self._send(number)

    def complete(self) -> None:
        if not self._overlap:
            for number in self._send_order:
                self._send(number)
        for number, work in zip(self._send_order, self._sender.collect(len(self._send_order)), strict=True):
            work.wait()
            self._divide(number)
        if not self._rebuilt and self._parameters:
            self._rebuild(list(self._ready))

    def _divide(self, number: int) -> None:
        """A sum that has arrived becomes a mean, unless its parts were divided on the way in."""
        if self.scale_early is None and self._hook is None:
            start_ns = time.monotonic_ns()
            self._range(self.layout.buckets[number]).div_(self.communicator.world_size)
            self.log.pack("all gradients", start_ns)

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        if self._hook is not None:
            raise PlanError(
                "a communication hook is already registered: "
                "register_comm_hook or register_builtin_comm_hook can only be called once."
            )
        self._hook = (state, hook)

    @property
    def has_rebuilt(self) -> bool:  # type: ignore[override]
        return self._rebuilt

    @property
    def buffer_bytes(self) -> int:
        return super().buffer_bytes + self._sender.scratch_bytes

    def detach(self) -> None:
        self._sender.stop()
        super().detach()

    def state(self) -> dict[str, Any]:
        return {"order": self._order} if self._rebuilt else {}

    def load_state(self, state: dict[str, Any]) -> None:
        if "order" in state and self.communicator.world_size > 1:
            self._lay_out_anew(state["order"])

    def _take_parameters(self) -> None:
        self._rebuilt = False
        super()._take_parameters()

    def _send(self, number: int) -> None:
        bucket = self.layout.buckets[number]
        ready_ns = max(self._ready[parameter] for parameter in bucket.parameters)
        values = self._range(bucket)
        if self._hook is None:
            self._sender.send(number, values, ready_ns)
            return
        # The hook sees gradients only; the flags behind them are summed as ever.
        state, hook = self._hook
        num_gradients = min(bucket.stop, self._num_gradients[bucket.group]) - bucket.start
        seen = HookBucket(
            number, values[:num_gradients], number == len(self.layout.buckets) - 1, self._pieces(bucket)
        )
        self._sender.send(number, values[num_gradients:], ready_ns, lambda: apply_hook(state, hook, seen))

    def _pieces(self, bucket: Bucket) -> list[tuple[Tensor, Tensor]]:
        pieces: list[tuple[Tensor, Tensor]] = []
        for number in bucket.parameters:
            slot = self.layout.slots[number]
            start, stop = max(slot.start, bucket.start), min(slot.stop, bucket.stop)
            if (start, stop) == (slot.start, slot.stop):
                pieces.append((self._parameters[number], self._views[number]))
            elif start < stop:
                pieces.append((self._parameters[number], self._buffers[bucket.group][start:stop]))
        return pieces

    def _range(self, bucket: Bucket) -> Tensor:
        return self._buffers[bucket.group][bucket.start : bucket.stop]

    def _rebuild(self, seen: list[int]) -> None:
        """Rank 0's order on every rank. Ranks saw the same parameters, or an error is on its way.

        Each rank's own order would not do: a bucket must hold the same gradients everywhere.
        """
        order = torch.tensor(seen, device=self.communicator.device)
        with self.communicator.scope("bucket order"):
            self.communicator.broadcast(order, label="bucket order")
        self._lay_out_anew(order.tolist())

    def _lay_out_anew(self, order: list[int]) -> None:
        # These keep the old buffers alive while new ones take their place: `finish` has not looked at flags and means
        # yet. Where there is no gradient the view counts: it may hold the mean of what other ranks have.
        means = [
            view if parameter.grad is None else parameter.grad
            for parameter, view in zip(self._parameters, self._views, strict=True)
        ]
        flags = {group: buffer[self._num_gradients[group] :] for group, buffer in self._buffers.items()}
        ready = self._ready
        self._lay_out(order)
        self._order, self._rebuilt, self._ready = order, True, ready
        for group, part in flags.items():
            self._buffers[group][self._num_gradients[group] :] = part
        for parameter, view, gradient in zip(self._parameters, self._views, means, strict=True):
            view.copy_(gradient)
            if parameter.grad is not None:
                parameter.grad = view


@dataclass(frozen=True)
class Task:
    """A bucket on its way from backward to the sender."""

    number: int
    values: Tensor
    ready_ns: int
    before: Callable[[], None] | None
    event: torch.cuda.Event | None
    label: str = "bucket"


class Sender:
    """The communication thread. It starts operations and waits for none but our own schedules, so that native ones
    overlap each other too. For each task it puts exactly one answer into `_started`, in order; an error is an answer,
    which `collect` raises where the user's own code runs."""

    def __init__(self, channels: list[Communicator], collective: Collective, wire_dtype: torch.dtype | None) -> None:
        self.channels = channels
        self._executors = None
        if collective != "native":
            schedule = make_schedule(collective, channels[0].world_size)
            self._executors = [Executor(channel, schedule, wire_dtype) for channel in channels]
        self._tasks: queue.SimpleQueue[Task | Callable[[], None] | None] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[Work | BaseException] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(
        self,
        number: int,
        values: Tensor,
        ready_ns: int,
        before: Callable[[], None] | None = None,
        label: str = "bucket",
    ) -> None:
        """Sum `values` over ranks; `before` runs first, in the sending thread."""
        self._put(Task(number, values, ready_ns, before, mark_stream(values), label))

    def _put(self, task: Task | Callable[[], None]) -> None:
        if self._thread is None:
            # A daemon: a rank that fails while a bucket hangs must be able to end.
            self._thread = threading.Thread(target=self._run, name="syncline-buckets", daemon=True)
            self._thread.start()
        self._tasks.put(task)

    @property
    def scratch_bytes(self) -> int:
        return sum(executor.scratch_bytes for executor in self._executors or ())

    def collect(self, count: int) -> list[Work]:
        """The works of the last `count` sends, in order."""
        works = []
        for _ in range(count):
            started = self._started.get()
            if isinstance(started, BaseException):
                raise started
            works.append(started)
        return works

    def stop(self) -> None:
        if self._thread is not None:
            self._tasks.put(None)
            if self._thread is not threading.current_thread():  # garbage may be found in any thread
                self._thread.join()
            self._thread = None

    def _run(self) -> None:
        take_short_turns(threading.get_native_id())
        while (task := self._tasks.get()) is not None:
            try:
                if isinstance(task, Task):
                    self._started.put(self._start(task))
                else:
                    task()
            except BaseException as error:
                self._started.put(error)
            del task  # or the method, which a task may hold, would not be garbage before the next task

    def _start(self, task: Task) -> Work:
        if task.event is not None:
            task.event.wait()
        if task.before is not None:
            task.before()
        # By number and not by who is free: ranks must put a bucket on the same channel.
        which = task.number % len(self.channels)
        label = f"{task.label} {task.number}"
        with self.channels[which].scope(label):
            if self._executors is None:
                operation = Operation(
                    "all_reduce", task.values, label=label, ready_ns=task.ready_ns, waited_later=True
                )
                return self.channels[which].start(operation)
            self._executors[which].sum(task.values, label=label, ready_ns=task.ready_ns)
            return Done()


class Done:
    """A schedule has run to its end in the sender; nothing is left to wait for."""

    def wait(self) -> None:
        pass


def mark_stream(values: Tensor) -> torch.cuda.Event | None:
    """On a GPU the gradients are still being computed when the hook runs: the sender's stream must wait for them."""
    if values.device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event
