"""Threads that carry transfers are let onto a core soon, also where compute keeps all cores busy.

They need little of a core's time, but a link stands idle while they wait for it. Since version 6.12, Linux lets a
thread ask for short turns: its share of the core stays the same, but it gets it sooner. That needs no privilege.
Older kernels ignore the wish, and other systems are not asked.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TASKS = Path("/proc/self/task")
SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}.get(platform.machine())
"""The system call sched_setattr, which the C library has under no name."""
TURN_NS = 100_000
"""The shortest that the kernel takes."""


def take_short_turns(thread: int) -> None:
    """`thread` is its native id. One that has ended, or is scheduled by other rules, stays as it is."""
    if SET_ATTRIBUTES is None or platform.system() != "Linux":
        return
    try:
        if os.sched_getscheduler(thread) != os.SCHED_OTHER:
            return
        nice = os.getpriority(os.PRIO_PROCESS, thread)
    except OSError:
        return
    # struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period.
    attributes = struct.pack("=IIQiIQQQ", 48, os.SCHED_OTHER, 0, nice, 0, TURN_NS, 0, 0)
    ctypes.CDLL(None).syscall(SET_ATTRIBUTES, thread, attributes, 0)


@contextmanager
def new_threads_take_short_turns() -> Iterator[None]:
    """For those that Gloo starts in this block."""
    before = _threads()
    yield
    for thread, name in _threads() - before:
        if "gloo" in name:
            take_short_turns(thread)


def _threads() -> set[tuple[int, str]]:
    found = set()
    for task in TASKS.iterdir() if TASKS.is_dir() else ():
        try:
            found.add((int(task.name), (task / "comm").read_text()))
        except OSError:  # it has ended
            continue
    return found
