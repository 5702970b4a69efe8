"""What really went over the wire: the kernel's own counters, read before and after a step.

Two places. The process's TCP sockets (TCP_INFO): one rank's own bytes, also where all ranks share loopback. And the
network interfaces other than loopback: all that left and reached the host, headers and others' traffic included,
which is what counts where hosts have one each. Linux only; elsewhere nothing is counted.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syncline.spans import EventLog

IPPROTO_TCP, TCP_INFO = 6, 11
SOL_SOCKET, SO_COOKIE = 1, 57
NOT_SENT, RECEIVED, SENT, RETRANSMITTED = 144, 128, 200, 208
INFO_BYTES = 216
"""Offsets in struct tcp_info of Linux 4.19 and later, up to and with bytes_retrans."""
LOOK_AROUND_EVERY = 50
"""Readings between two searches for new sockets; a search costs ten times a reading."""


@dataclass(frozen=True)
class Traffic:
    """Bytes since the process, or the interface, began."""

    sent: int = 0
    received: int = 0
    retransmitted: int = 0
    interface_sent: int = 0
    interface_received: int = 0

    def __sub__(self, other: Traffic) -> dict[str, int]:
        return {name: getattr(self, name) - getattr(other, name) for name in self.__dataclass_fields__}


class TrafficCounter:
    """Reads all TCP sockets of this process, and the interfaces of its network namespace."""

    def __init__(self) -> None:
        self.works = sys.platform == "linux" and Path("/proc/self/fd").is_dir()
        self._get: Any = ctypes.CDLL(None, use_errno=True).getsockopt if self.works else None
        self._info = ctypes.create_string_buffer(256)
        self._length = ctypes.c_uint32()
        self._sockets: dict[int, int] = {}
        """Descriptor and cookie, which tells a socket from another one that got its number later."""
        self._last: dict[int, tuple[int, int, int]] = {}
        self._sums = (0, 0, 0)
        self._readings = 0

    def read(self) -> Traffic:
        """A socket counts from when it is first seen: sockets are opened between steps, not in them."""
        if not self.works:
            return Traffic()
        if self._readings % LOOK_AROUND_EVERY == 0:
            self._look_around()
        self._readings += 1
        for descriptor, cookie in list(self._sockets.items()):
            now = self._read_socket(descriptor) if self._cookie(descriptor) == cookie else None
            if now is None:
                del self._sockets[descriptor], self._last[descriptor]
                continue
            before, sums = self._last[descriptor], self._sums
            self._sums = (sums[0] + now[0] - before[0], sums[1] + now[1] - before[1], sums[2] + now[2] - before[2])
            self._last[descriptor] = now
        return Traffic(*self._sums, *read_interfaces())

    def _look_around(self) -> None:
        for name in os.listdir("/proc/self/fd"):
            descriptor = int(name)
            counted = self._read_socket(descriptor)
            if counted is not None and self._sockets.get(descriptor) != (cookie := self._cookie(descriptor)):
                self._sockets[descriptor], self._last[descriptor] = cookie, counted

    def _read_socket(self, descriptor: int) -> tuple[int, int, int] | None:
        """Sent without repetitions (handed to the kernel), received, repeated; None if this is no TCP socket."""
        self._length.value = len(self._info)
        failed = self._get(descriptor, IPPROTO_TCP, TCP_INFO, self._info, ctypes.byref(self._length))
        if failed or self._length.value < INFO_BYTES:
            return None
        sent, repeated = struct.unpack_from("QQ", self._info, SENT)
        (waiting,) = struct.unpack_from("I", self._info, NOT_SENT)
        (received,) = struct.unpack_from("Q", self._info, RECEIVED)
        return sent - repeated + waiting, received, repeated

    def _cookie(self, descriptor: int) -> int:
        self._length.value = 8
        failed = self._get(descriptor, SOL_SOCKET, SO_COOKIE, self._info, ctypes.byref(self._length))
        return -1 if failed else int(struct.unpack_from("Q", self._info)[0])


def read_interfaces(path: str = "/proc/self/net/dev") -> tuple[int, int]:
    """(sent, received) of all interfaces of this network namespace but loopback."""
    sent = received = 0
    try:
        with open(path, "rb") as file:
            lines = file.read().splitlines()[2:]
    except OSError:
        return 0, 0
    for line in lines:
        name, _, figures = line.partition(b":")
        if name.strip() != b"lo":
            columns = figures.split()
            received += int(columns[0])
            sent += int(columns[8])
    return sent, received


class StepTraffic:
    """Writes a `counter` record for what happened between `begin` and `end`."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._counter = TrafficCounter()
        self._before = Traffic()

    def begin(self) -> None:
        if self._counter.works and not self._log.off:
            self._before = self._counter.read()

    def end(self) -> None:
        if self._counter.works and not self._log.off:
            self._log.add("counter", **(self._counter.read() - self._before))
