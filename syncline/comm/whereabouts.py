"""What each rank is doing when nothing moves, published on the store for the others to read.

A thread looks twice a second. A rank that has waited for a second in a call, or has made none for that long, says so;
ranks that move say nothing, and pay two assignments a call. A rank whose deadline has passed asks the others: their
threads answer with what Python is doing there. One that does not answer soon and is on the same host gets a signal,
upon which the system itself writes its stacks (launcher/stacks.py): it may be inside C code that holds the
interpreter. All of this has one time limit, however many ranks are silent.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from syncline.comm.communicator import PAIRWISE, Communicator, Operation
from syncline.comm.sites import Line, parse_dump, site_of, stack_of, users_part
from syncline.launcher import stacks
from syncline.machine import boot_id
from syncline.spans import EventLog

STALLED_AFTER_S = 1.0
LOOK_EVERY_S = 0.5
ANSWERS_WITHIN_S = 1.2
"""How long a rank waits for the others' answers, and for the stacks of those that are silent: two looks and a
little. Those that are silent after half of it get the signal."""
LEAVES_WITHIN_S = 1.0
"""How long after a broken connection the other side may take to say that it has finished."""
GONE = ("", "Z", "X")
"""What Linux says of a process that is no more."""
STOPPED = ("T", "t")
MOST_LEVELS = 8
"""Of a stack that is shown in an error; the file has all."""


class Place(NamedTuple):
    """A call of a rank: the same on every rank that takes part in it."""

    group: str
    """Which of the rank's groups of channels."""
    scope: str
    channel: str
    """'all', or '0>1' for what rank 0 sends to rank 1."""
    position: int
    """Count of calls in this scope and channel, from 0; -1 for a wait that is no call."""
    visit: int
    """How many times this scope came to this call, from 0."""

    def __str__(self) -> str:
        scope = f" of {self.scope!r}" if self.scope else ""
        if self.position < 0:
            return ""
        return f"call {self.position}{scope}"


class Signature(NamedTuple):
    """What ranks must agree on. Values and not text: one is made for every message."""

    name: str
    peer: int | None
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

    @classmethod
    def of(cls, operation: Operation) -> Signature:
        tensor = operation.tensor
        return cls(operation.name, operation.peer, tensor.dtype, tensor.shape, tensor.stride())

    def __str__(self) -> str:
        name = "transfer" if self.name in PAIRWISE else self.name
        root = f" root {self.peer}" if self.peer is not None and name != "transfer" else ""
        # An empty tensor without memory: only its shape and strides count.
        like = torch.empty(0, device="meta").as_strided(self.shape, self.strides)
        strides = "" if like.is_contiguous() else f" strides {list(self.strides)}"
        return f"{name}{root} {str(self.dtype).removeprefix('torch.')} {list(self.shape)}{strides}"


class Call(NamedTuple):
    """An operation and where it is. `site` is the user's line when this signature first came here."""

    place: Place
    signature: Signature | str
    label: str
    site: str

    def __str__(self) -> str:
        return f"{self.signature}{f' of {self.label}' if self.label else ''}"

    def where(self, *more: str) -> str:
        """Its place, and what more is given, to stand behind other words."""
        return joined_words(str(self.place), *more, self.site and f"at {self.site}")


class Stall(NamedTuple):
    """What a rank was last seen waiting for."""

    place: Place
    signature: str
    site: str


class Whereabouts:
    """One rank's, for all its channels."""

    def __init__(self, backend: Communicator, log: EventLog) -> None:
        self.rank = backend.ranks[backend.rank]
        self._ranks = backend.ranks
        self._log = log
        self._store = backend.store
        self._own_store = backend.store.clone()  # type: ignore[attr-defined]  # the main thread may be blocked in a wait on the other one
        self._owner = threading.get_ident()
        self._waiting: dict[str, tuple[float, Call]] = {}
        """By group; a thread of the method waits beside the one that trains."""
        self._last: tuple[float, Call] | None = None
        """The operation that ended last, and when."""
        self._published: object = None
        self._asked = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.users = 0
        """How many communicators of the whole world are in use."""
        _all.add(self)

    @property
    def owner(self) -> int:
        """The thread that trains."""
        return self._owner

    def enter(self, call: Call) -> None:
        """A wait begins. Plain calls and not a context manager: this is on the path of every message."""
        if self._thread is None and len(self._ranks) > 1:
            self._thread = threading.Thread(target=self._look, name="syncline-whereabouts", daemon=True)
            self._thread.start()
        self._waiting[call.place.group] = (time.monotonic(), call)

    def leave(self, call: Call) -> None:
        """The wait is over. Not called after an error: a rank that gave up here is not one that never came."""
        self._waiting.pop(call.place.group, None)
        self._last = (time.monotonic(), call)

    def stall_of(self, rank: int, group: str) -> Stall | None:
        """What a rank was last seen waiting for in this group of channels, if it still is."""
        waits = (self._read(f"doing/{rank}") or {}).get("waits", {})
        if group not in waits:
            return None
        wait = waits[group]
        return Stall(Place(*wait["place"]), wait["signature"], wait["site"])

    def late(self, missing: Sequence[int]) -> Sequence[int]:
        """Of the missing ranks those that the others wait for: stopped ones; else those that do not wait themselves,
        such as in the next call. Where all of them wait, it is for somebody else, whom this rank needs nothing of: a
        root waits for rank 2, and rank 1 for the root. Where nobody else is stopped or in code of its own, all."""
        reports = {rank: self._read(f"doing/{rank}") or {} for rank in self._ranks}
        others = [rank for rank in self._ranks if rank not in (*missing, self.rank)]
        moving = [rank for rank in missing if "waits" not in reports[rank]]
        elsewhere = [rank for rank in others if "last" in reports[rank]]
        return self._stopped(missing) or moving or self._stopped(others) or elsewhere or missing

    def _stopped(self, ranks: Sequence[int]) -> list[int]:
        here = {rank: process for rank in ranks if (process := self._process_here(rank))}
        return [rank for rank, process in here.items() if _state_of(process["pid"]) in STOPPED]

    def has_left(self, ranks: Sequence[int]) -> dict[int, str]:
        """Those of the ranks that have ended, and how. A connection breaks a moment before the other side says so."""
        end = time.monotonic() + LEAVES_WITHIN_S
        while not (gone := {rank: how for rank in ranks if (how := self._read(f"left/{rank}"))}):
            if time.monotonic() > end or not any(self._may_still_speak(rank) for rank in ranks):
                break
            time.sleep(LOOK_EVERY_S / 10)
        return gone

    def _may_still_speak(self, rank: int) -> bool:
        process = self._read(f"process/{rank}")
        if process is None or process["pid"] == os.getpid():
            return False
        return process["host"] != _host() or _state_of(process["pid"]) not in GONE

    def _process_here(self, rank: int) -> dict[str, Any] | None:
        """The rank's process, if it is another one and this one can see it."""
        process: dict[str, Any] | None = self._read(f"process/{rank}")
        is_seen = process is not None and process["host"] == _host() and process["pid"] != os.getpid()
        return process if is_seen else None

    def _may_answer(self, rank: int) -> bool:
        """Not if it is known to have ended, or to be stopped."""
        process = self._process_here(rank)
        return process is None or _state_of(process["pid"]) not in (*GONE, *STOPPED)

    def _signalled(self, rank: int) -> dict[str, Any] | None:
        """The rank's process, if it could be told to write its stacks."""
        process = self._process_here(rank)
        # Only one that has said that it is ready for the signal, which would end any other.
        if process is None or not process["file"] or stacks.SIGNAL is None:
            return None
        try:
            os.kill(process["pid"], stacks.SIGNAL)
        except OSError:
            return None
        return process

    def ask(self, name_of: Callable[[int], str]) -> str:
        """What each rank is doing, in words."""
        others = [rank for rank in self._ranks if rank != self.rank]
        before = {rank: self._read(f"answer/{rank}") for rank in others}
        for rank in others:
            self._store.set(f"asked/{rank}", "")
        start = time.monotonic()
        answers: dict[int, Any] = {self.rank: self._report()}
        signalled: dict[int, dict[str, Any]] = {}
        written: dict[int, list[Line]] = {}
        silent = [rank for rank in others if self._may_answer(rank)]
        while silent and (waited := time.monotonic() - start) < ANSWERS_WITHIN_S:
            if waited > ANSWERS_WITHIN_S / 2 and not signalled:
                signalled = {rank: process for rank in silent if (process := self._signalled(rank))}
            time.sleep(LOOK_EVERY_S / 10)
            for rank in silent:
                answer = self._read(f"answer/{rank}")
                if answer is not None and answer != before[rank]:
                    answers[rank] = answer
            written |= {rank: stack for rank, process in signalled.items() if (stack := _written_stack(process))}
            # A rank that has written its stacks may still answer, in better words.
            silent = [rank for rank in silent if rank not in answers]
        words = {rank: self._described(rank, answers.get(rank), written.get(rank, ())) for rank in self._ranks}
        return "\n".join(["What each rank was doing:", *(f"  {name_of(rank)} {words[rank]}" for rank in words)])

    def release(self) -> None:
        """One of those who asked for it in `whereabouts_of` is done."""
        self.users -= 1
        if self.users <= 0:
            self.stop()

    def stop(self, timeout_s: float | None = None) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def say_left(self) -> None:
        """To whoever waits for this rank later. Only by a process that ends of itself."""
        if self._thread is None:
            return
        failure = getattr(sys, "last_value", None)
        how = "has finished" if failure is None else f"has failed: {traceback.format_exception_only(failure)[-1]}"
        with contextlib.suppress(RuntimeError):  # the store is gone, and so is anyone who would read it
            self._own_store.set(f"left/{self.rank}", json.dumps(how.strip()))

    def _read(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _look(self) -> None:
        try:
            self._publish("process", {"pid": os.getpid(), "host": _host(), "owner": self._owner, "file": _file()})
            while not self._stop.wait(LOOK_EVERY_S):
                report = self._report()
                if report["state"] != self._published:
                    self._published = report["state"]
                    self._publish("doing", report)
                if report["state"] is not None:
                    self._answer(report)
        except RuntimeError:
            return  # the store is gone, and so is anyone who would read it

    def _publish(self, key: str, value: Any) -> None:
        self._own_store.set(f"{key}/{self.rank}", json.dumps(value))

    def _answer(self, report: dict[str, Any]) -> None:
        if not self._asked and not self._own_store.check([f"asked/{self.rank}"]):
            return
        if not self._asked:
            stacks.write_now()
        self._asked = True
        self._publish("answer", report)

    def _report(self) -> dict[str, Any]:
        """What this rank does now. `state` changes when that is something else; None while it moves."""
        now = time.monotonic()
        report: dict[str, Any] = {"step": self._log.step, "at": time.time()}
        stalled = {group: wait for group, wait in list(self._waiting.items()) if now - wait[0] > STALLED_AFTER_S}
        if stalled:
            stack = stack_of(self._owner)
            waits = {
                group: {
                    "place": call.place, "signature": str(call.signature),
                    "call": f"{call}{call._replace(site=site_of(stack) or call.site).where()}",
                    "site": site_of(stack) or call.site, "since": time.time() - (now - start),
                }
                for group, (start, call) in stalled.items()
            }  # fmt: skip
            return {**report, "state": [wait["place"] for wait in waits.values()], "waits": waits}
        if self._waiting or self._last is None or now - self._last[0] <= STALLED_AFTER_S:
            return {**report, "state": None}
        ended, call = self._last
        stack = stack_of(self._owner)
        lines = users_part(stack)[:MOST_LEVELS]
        last = {"call": f"{call}{call.where()}", "since": time.time() - (now - ended)}
        return {**report, "state": ["elsewhere", call.place], "last": last, "stack": lines, "site": site_of(stack)}

    def _described(self, rank: int, answer: Any, stack: Sequence[Line]) -> str:
        """From what it answered; else from its last word, and from what the system knows of it: its state, and the
        stack that it was made to write."""
        if how := self._read(f"left/{rank}"):
            return f"{how}."
        if answer is not None:
            return _with_stack(_words(answer), [Line(*line) for line in answer.get("stack", ())], self._file_of(rank))
        process, report = self._read(f"process/{rank}"), self._read(f"doing/{rank}")
        if process is None:
            return "has made no call here yet: it has not come so far, or it has not started."
        last_word = f"; its last word, {_ago(report['at'], time.time())} ago: {_words(report)}" if report else ""
        if self._process_here(rank) is None:
            return f"does not answer: it is stopped, has ended, or cannot be reached{last_word}."
        state = _state_of(process["pid"])
        if state in GONE:
            return f"has ended{last_word}."
        if state in STOPPED:
            return f"is stopped (SIGSTOP){last_word}."
        if not stack:
            return f"does not answer{last_word}."
        return _with_stack(f"is busy{joined_words(f'at {site_of(stack)}')}", stack, process["file"])

    def _file_of(self, rank: int) -> str:
        return str((self._read(f"process/{rank}") or {}).get("file", ""))


def _words(report: dict[str, Any]) -> str:
    """What a report says, to stand behind a rank's name."""
    step = f" in step {report['step']}" if report["step"] >= 0 else ""
    if "waits" in report:
        waits = report["waits"].values()
        return ", ".join(f"waits{step} for {_ago(wait['since'], report['at'])} in {wait['call']}" for wait in waits)
    if "last" not in report:
        return f"moves on{step}"
    last, where = report["last"], joined_words(report["site"] and f"at {report['site']}")
    ago = _ago(last["since"], report["at"])
    return f"is in its own code{step} for {ago}{where}; its last operation was {last['call']}"


def _with_stack(words: str, stack: Sequence[Line], file: str) -> str:
    if not stack:
        return f"{words}."
    lines = users_part(stack)[:MOST_LEVELS]
    title = f"    its stack{f' ({file} has all of it)' if file else ''}:"
    return "\n".join([f"{words}.", title, *(f"      {line}" for line in lines)])


def joined_words(*words: str) -> str:
    """Those that are not empty, each behind a comma."""
    return "".join(f", {word}" for word in words if word)


def _ago(since: float, now: float) -> str:
    """By the wall clock: the other rank may be on another host."""
    return f"{max(0.0, now - since):.1f} s"


def _host() -> str:
    """Processes that say the same can send each other signals."""
    namespace = Path("/proc/self/ns/pid")
    return f"{boot_id()} {namespace.stat().st_ino if namespace.exists() else 0}"


def _file() -> str:
    file = stacks.file_here()
    return str(file) if file else ""


def _state_of(pid: int) -> str:
    """The letter that Linux gives a process; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _written_stack(process: dict[str, Any]) -> list[Line]:
    """Of the thread that trains in a process that got the signal; empty until it has written."""
    with contextlib.suppress(OSError):
        return parse_dump(Path(process["file"]).read_text(), process["owner"])
    return []


_all: weakref.WeakSet[Whereabouts] = weakref.WeakSet()
_of_backend: weakref.WeakKeyDictionary[Communicator, Whereabouts] = weakref.WeakKeyDictionary()


def whereabouts_of(backend: Communicator, log: EventLog) -> Whereabouts:
    """Those of this rank of the backend: the same for all who wrap it."""
    known = _of_backend.get(backend)
    if known is None or not known.users:
        known = _of_backend[backend] = Whereabouts(backend, log)
    known.users += 1
    return known


@atexit.register
def _end_all() -> None:
    """A script may end without a word to us. A thread that is inside the store, which is C++, when the interpreter
    goes away would end the whole process with an abort instead of the script's own exit code."""
    known = list(_all)
    for one in known:
        one.stop(timeout_s=5.0)
        one.say_left()
    if known:
        time.sleep(0.1)  # Gloo's threads, which let go of the last tensors, need the interpreter for that too
