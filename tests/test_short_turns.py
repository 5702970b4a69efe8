"""Threads of transfers ask for short turns; whatever else runs is left alone."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading

import pytest
import torch.distributed as dist

from syncline.comm.short_turns import TURN_NS, new_threads_take_short_turns, take_short_turns

pytestmark = pytest.mark.skipif(
    tuple(int(part) for part in platform.release().split(".")[:2]) < (6, 12) or platform.machine() != "x86_64",
    reason="only Linux 6.12 and newer tells how long a thread's turns are, asked here as x86 does it",
)


def turn_ns(thread: int) -> int:
    attributes = ctypes.create_string_buffer(48)
    assert ctypes.CDLL(None).syscall(315, thread, attributes, 48, 0) == 0  # sched_getattr
    return int(struct.unpack("=IIQiIQQQ", attributes.raw)[5])


def test_a_thread_keeps_its_niceness_and_gets_short_turns() -> None:
    seen: list[tuple[int, int]] = []

    def live() -> None:
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, 3)
        take_short_turns(own)
        seen.append((turn_ns(own), os.getpriority(os.PRIO_PROCESS, own)))

    thread = threading.Thread(target=live)
    thread.start()
    thread.join()
    assert seen == [(TURN_NS, 3)]
    assert turn_ns(threading.get_native_id()) != TURN_NS


def test_a_thread_that_has_ended_is_passed_over() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert thread.native_id is not None
    take_short_turns(thread.native_id)


def test_threads_of_a_new_gloo_group_get_them_and_others_do_not() -> None:
    def threads() -> set[int]:
        return {int(name) for name in os.listdir("/proc/self/task")}

    store = dist.HashStore()
    before, over = threads(), threading.Event()
    other = threading.Thread(target=over.wait)
    with new_threads_take_short_turns():
        group = dist.ProcessGroupGloo(store, 0, 1)
        other.start()
    assert other.native_id is not None
    new = threads() - before - {other.native_id}
    assert new
    assert {turn_ns(thread) for thread in new} == {TURN_NS}
    assert turn_ns(other.native_id) != TURN_NS
    over.set()
    other.join()
    del group
