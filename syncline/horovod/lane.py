"""The slow lane: collectives that ranks call by name, in whatever order.

Each rank sends its requests to rank 0, which matches them (matching.py) and answers all ranks in one order. One
thread of each rank carries the answers out in that order, on channels of its own: so ranks may submit in different
orders, and a call that some rank has not made yet holds up no other. Threads: on every rank one that receives, and
one that carries out; on rank 0 one for each rank's requests, and one that looks for stalls (stalls.py).

A rank that is lost closes its connection, which every rank learns at once. What was agreed before still ends: a
result that all have helped to make is not lost because one of them has gone since.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from syncline.comm.communicator import Communicator
from syncline.comm.sites import stack_of
from syncline.errors import CommunicationError
from syncline.horovod import carrying
from syncline.horovod.common.exceptions import HorovodInternalError
from syncline.horovod.matching import ALL_RANKS, Answer, Request, key_of
from syncline.horovod.timeline import Timeline

_SHUT_DOWN = "Horovod has been shut down."
CYCLE_S = 0.01
"""A name is taken this long at least, unless its handle was waited for: whether the second of two calls in a row is
refused must not depend on how fast the first was. Horovod looks for new requests once in a cycle, to the same end."""

GRACE_S = 10.0
"""After the end, what was agreed before it may take this long. A lost rank's closed connections end it sooner."""


@dataclass(eq=False)
class Task:
    """A request of this rank on its way."""

    request: Request
    inputs: list[Tensor]
    outputs: list[Tensor] | None = None
    """Where the values go; None where only the answer says how many there are."""
    after: Callable[[Any], Any] = lambda result: result
    """Makes of the result what `synchronize` returns."""
    event: torch.cuda.Event | None = None
    submitted_ns: int = field(default_factory=time.monotonic_ns)
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: BaseException | None = None

    @property
    def age_s(self) -> float:
        return (time.monotonic_ns() - self.submitted_ns) / 1e9

    def end(self, result: Any = None, error: BaseException | None = None) -> None:
        if not self.done.is_set():
            self.result, self.error = result, error
            self.done.set()


class Lane:
    """One rank's end of it, from init to shutdown."""

    def __init__(self, channel: Communicator, tell: Callable[[dict[str, Any]], bool]) -> None:
        self.channels: dict[int, Communicator] = {ALL_RANKS: channel}
        self.timeline = Timeline()
        self.step_of: Callable[[], dict[int, int]] = dict
        """How many steps each optimiser has begun: asked for when a rank joins."""
        self.waits_in: Callable[[], str] = str
        """The step that this rank waits in, for the others to read; empty if it waits in none."""
        self.someone_joined = False
        self._tell = tell
        self._handles: dict[int, Task] = {}
        self._pending: dict[tuple[int, str], Task] = {}
        self._unseen: dict[tuple[int, str], Task] = {}
        """Of each name that the user gave, the last request, until somebody asks for its result."""
        self._next_handle = itertools.count()
        self._unnamed: Counter[tuple[int, str]] = Counter()
        self._joins = 0
        """A rank that joins early makes fewer calls than others, so calls without a name count anew after it."""
        self._lock = threading.Lock()
        self._broken: str | None = None
        self._late: threading.Timer | None = None
        self._last = "hvd.init()"
        self._last_s = time.monotonic()
        self._main = threading.get_ident()
        self._joining: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._agreed: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._carry_out_all, name="syncline-horovod", daemon=True)
        self._thread.start()

    # What the user's threads call.

    def submit(self, task: Task, name: str | None = None) -> int:
        """A handle. A name that is on its way already is a ValueError."""
        request = task.request
        kind, ranks = request["kind"], request.setdefault("set", ALL_RANKS)
        with self._lock:
            if self._broken is not None:
                raise HorovodInternalError(self._broken)
            is_named = name is not None
            if name is None:
                name = f"noname.{self._joins}.{self._unnamed[ranks, kind]}"
                self._unnamed[ranks, kind] += 1
            request["name"] = name
            key = key_of(request)
            last = self._unseen.pop(key, None)
            if key in self._pending or (last is not None and last.age_s < CYCLE_S):
                if last is not None:
                    self._unseen[key] = last
                raise ValueError(
                    f"Requested to {kind} a tensor with the same name as another tensor that is currently being "
                    f"processed ({name!r}). If you want to request another tensor, use a different tensor name."
                )
            task.event = _mark_stream(task.inputs)
            handle = next(self._next_handle)
            self._handles[handle] = self._pending[key] = task
            if is_named:
                self._unseen[key] = task
        self._note(f"{kind} {name!r}")
        self._tell({"say": "request", "request": request})
        return handle

    def poll(self, handle: int) -> bool:
        if handle not in self._handles:
            raise ValueError(f"Handle {handle} was not created or has been cleared.")
        task = self._handles[handle]
        is_done = task.done.is_set()
        if is_done:
            self._unseen.pop(key_of(task.request), None)
        return is_done

    def wait(self, handle: int) -> Any:
        """What the task makes of its result. An unknown handle is None, as with Horovod."""
        task = self._handles.pop(handle, None)
        if task is None:
            return None
        task.done.wait()
        self._unseen.pop(key_of(task.request), None)
        if task.error is not None:
            raise task.error
        return task.after(task.result)

    def join(self, shadow: Callable[[int], None]) -> int:
        """Take part with zeros in what others still do, until all have joined: the last rank that did.
        `shadow(number)` takes part in a step of an optimiser."""
        self._note("hvd.join()")
        if self._broken is not None:
            raise HorovodInternalError(self._broken)
        steps = {str(number): count for number, count in self.step_of().items()}
        self._tell({"say": "request", "request": {"kind": "join", "name": "join", "steps": steps}})
        while (answer := self._joining.get())["say"] != "all joined":
            if answer["say"] == "over":
                raise HorovodInternalError(answer["why"])
            shadow(answer["optimizer"])
        with self._lock:
            self._joins += 1
            self._unnamed.clear()
        return int(answer["last"])

    def begin_step(self, optimizer: int, count: int) -> None:
        """An optimiser is about to average; ranks that have joined must take part."""
        if self.someone_joined:
            self._tell({"say": "step", "optimizer": optimizer, "count": count})

    def did(self, what: str) -> None:
        """For the others to read when they wait for this rank."""
        self._note(what)

    def close(self) -> None:
        self._tell({"say": "bye"})
        self.fail(_SHUT_DOWN)
        self._agreed.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)
        self._end_pending(_SHUT_DOWN)
        self.timeline.stop()
        for number, channel in self.channels.items():
            if number != ALL_RANKS:
                channel.close()

    # What the thread that receives calls.

    def on_message(self, message: Answer) -> None:
        say = message["say"]
        if say == "go":
            self._agreed.put(message)
        elif say == "all joined":
            self.someone_joined = False
            self._agreed.put(message)  # in order: what was agreed before must be carried out before join returns
        elif say == "joined":
            self.someone_joined = True
            for optimizer, count in self.step_of().items():
                self._tell({"say": "step", "optimizer": optimizer, "count": count})
        elif say == "owed":
            self._joining.put(message)
        elif say == "status":
            self._tell({"say": "status", **self.status()})
        elif say == "over":
            self.fail(message["why"])

    def fail(self, why: str) -> None:
        """Nothing more will be answered: whatever comes fails at once, and whatever waits after what was agreed."""
        with self._lock:
            self._broken = self._broken or why
            if self._late is None:
                self._late = threading.Timer(GRACE_S, self._end_pending, (why,))
                self._late.daemon = True
                self._late.start()
        self._agreed.put({"say": "over", "why": why})

    def _end_pending(self, why: str) -> None:
        with self._lock:
            pending, self._pending = list(self._pending.values()), {}
            if self._late is not None:
                self._late.cancel()
        for task in pending:
            task.end(error=HorovodInternalError(why))
        self._joining.put({"say": "over", "why": why})

    def status(self) -> dict[str, Any]:
        return {
            "last": self._last,
            "ago": time.monotonic() - self._last_s,
            "at": where_is(self._main),
            "waits": self.waits_in(),
        }

    def _note(self, what: str) -> None:
        self._last, self._last_s = what, time.monotonic()

    # What the thread that carries out calls.

    def _carry_out_all(self) -> None:
        while (answer := self._agreed.get()) is not None:
            if answer["say"] == "all joined":
                self._joining.put(answer)
                continue
            if answer["say"] == "over":
                self._end_pending(answer["why"])
                continue
            key = (answer["key"][0], answer["key"][1])
            with self._lock:
                task = self._pending.get(key)
            result, error = None, None
            try:
                result = self._carry_out(answer, task)
            except (CommunicationError, HorovodInternalError) as caught:
                error = HorovodInternalError(str(caught))
            except BaseException as caught:  # here alone: the others carry it out, so ranks are out of step now
                error = HorovodInternalError(f"{key[1]} failed: {type(caught).__name__}: {caught}")
                self._tell({"say": "failed", "why": str(error)})
            with self._lock:
                self._pending.pop(key, None)
            if task is not None:
                task.end(result, error)

    def _carry_out(self, answer: Answer, task: Task | None) -> Any:
        if answer["error"] is not None:
            raise HorovodInternalError(answer["error"])
        request: Request = answer["zeros"] if task is None else task.request
        inputs = carrying.zeros_for(request) if task is None else task.inputs
        if task is not None and task.event is not None:
            task.event.synchronize()
        start_ns = time.monotonic_ns()
        ranks = self.channels.get(request["set"])
        result = _DO[request["kind"]](self, request, answer, inputs, ranks)
        if task is not None:
            if task.outputs is not None:
                for output, values in zip(task.outputs, result, strict=True):
                    output.data.copy_(values.view(output.shape))
                result = task.outputs
            if task.event is not None:
                torch.cuda.current_stream().synchronize()
            self.timeline.note(request, task.submitted_ns, start_ns)
        return result

    def add_set(self, number: int, members: list[int]) -> int:
        part = self.channels[ALL_RANKS].part(f"process set {number}", [members])
        if part is not None:
            self.channels[number] = part
        return number

    def remove_set(self, number: int) -> None:
        channel = self.channels.pop(number, None)
        if channel is not None:
            channel.close()


_DO: dict[str, Callable[[Lane, Request, Answer, list[Tensor], Any], Any]] = {
    "allreduce": lambda lane, r, a, tensors, ranks: carrying.allreduce(tensors, r["op"], r["scale"], ranks),
    "allgather": lambda lane, r, a, tensors, ranks: [
        carrying.allgather(tensor, [shapes[number] for shapes in a["by_rank"]], ranks)
        for number, tensor in enumerate(tensors)
    ],
    "broadcast": lambda lane, r, a, tensors, ranks: [
        carrying.broadcast(tensor, ranks.ranks.index(r["root"]), ranks) for tensor in tensors
    ],
    "alltoall": lambda lane, r, a, tensors, ranks: carrying.alltoall(tensors[0], a["by_rank"], ranks),
    "reducescatter": lambda lane, r, a, tensors, ranks: carrying.reducescatter(tensors, r["op"], r["scale"], ranks),
    "barrier": lambda lane, r, a, tensors, ranks: None,
    "add set": lambda lane, r, a, tensors, ranks: lane.add_set(a["set"], r["members"]),
    "remove set": lambda lane, r, a, tensors, ranks: lane.remove_set(r["removed"]),
}


def where_is(thread: int) -> str:
    """The line of the user's own code that a thread is at."""
    lines = [line for line in stack_of(thread) if line.is_users]
    return f"{Path(lines[0].file).name}:{lines[0].number} in {lines[0].function}" if lines else ""


def _mark_stream(tensors: list[Tensor]) -> torch.cuda.Event | None:
    """On a GPU the tensor may still be computed when it is submitted."""
    if not any(tensor.is_cuda for tensor in tensors):
        return None
    event = torch.cuda.Event()
    event.record()
    return event
