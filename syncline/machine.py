"""This machine: its cores, memory, processor, C library and processes, asked in one place."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from syncline.errors import UsageError
from syncline.units import format_bytes

_M_TRIM_THRESHOLD = -1  # as in malloc.h
_M_MMAP_THRESHOLD = -3
_PR_SET_PDEATHSIG = 1  # as in sys/prctl.h
TICKS = os.sysconf("SC_CLK_TCK")
_BUSY = (0, 1, 2, 5, 6, 7)
"""Of the columns in /proc/stat: user, nice, system, interrupts, and what a hypervisor gave to other virtual
machines; not idle or waiting for disks."""
STRONG_MEMORY_ORDER = ("x86_64", "AMD64")
"""Processors on which other cores see writes in the order in which they were made."""
BF16_RATES = {"amx_bf16": 16, "avx512_bf16": 2}
"""Instructions that multiply bf16 numbers: how many times as many products in one cycle of a core as AVX-512 forms of
32-bit numbers. AMX: 512 against 2 x 16; vdpbf16ps: 32 to a register against 16."""
_SHARED_BYTES = 580 * 2**20
"""The launcher, the switch, and what all emulated hosts share: torch, loaded once. This and the next two are fits to
the sum of PSS of all processes with 2 and 8 hosts, a tiny model and synthetic images: 869 and 1,726 MiB."""
_HOST_BYTES = 35 * 2**20
"""An emulated host without its ranks: its first process, its launcher, its fork server."""
RANK_BYTES = 260 * 2**20
"""A rank before it has a model: 107 MiB with synthetic images, and the rest of CIFAR-10's bytes."""
_COPIES_OF_WEIGHTS = 5
"""Weights, gradients, momentum, their flat buffer, and what is on its way."""
_COPIES_IN_REPLAY = 4
"""Gradients, their flat buffer, one piece of memory as large as the largest parameter, and what is on its way;
measured with ddp and VGG-16, whose largest parameter is three quarters of it."""


def end_with(parent: int) -> None:
    """For a forked child: its parent takes it along, even if killed by force, where the kernel can see to that."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def signal_name(number: int) -> str:
    """Also of a real-time signal, which has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next step instead of giving it back to the system.

    A step frees and allocates the same tens of megabytes each time, and by default every one of those pages is
    unmapped, mapped and zeroed anew. Has no effect where the C library is not glibc.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 2**30)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def available_bytes(table: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> float:
    """Memory that could be taken without pushing anything out: of the machine, or of the group that limits us."""
    available = float(table.read_text().partition("MemAvailable:")[2].split()[0]) * 1024
    limit = group / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, max(0.0, float(text) - float((group / "memory.current").read_text())))
    return available


def installed_bytes() -> int:
    """Memory of the machine, whoever uses it."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def estimated_bytes(*, hosts: int, ranks: int, weights_bytes: float, replayed: bool = False) -> float:
    """Memory that all ranks, and the hosts if emulated, will take together; activations aside."""
    copies = _COPIES_IN_REPLAY if replayed else _COPIES_OF_WEIGHTS
    return _SHARED_BYTES + hosts * _HOST_BYTES + ranks * (RANK_BYTES + copies * weights_bytes)


def check_memory(*, hosts: int, ranks: int, weights_bytes: float, replayed: bool = False) -> str:
    """A sentence on the memory needed. A UsageError, before anything starts, if the machine has less available."""
    needed = estimated_bytes(hosts=hosts, ranks=ranks, weights_bytes=weights_bytes, replayed=replayed)
    there = available_bytes()
    if needed > there:
        raise UsageError(
            f"{hosts} hosts with {ranks} ranks need about {format_bytes(needed)} of memory; "
            f"{format_bytes(there)} are available.",
            action="Use fewer hosts or workers.",
        )
    return (
        f"{hosts} emulated hosts, {ranks} ranks: about {format_bytes(needed)} of {format_bytes(there)} memory, "
        "activations aside"
    )


def processor() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def bf16_instructions(table: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Which of BF16_RATES this processor has; none where that cannot be known."""
    flags = _cpuinfo("flags", table).split()
    return [name for name in BF16_RATES if name in flags]


def _cpuinfo(key: str, table: Path = Path("/proc/cpuinfo")) -> str:
    """What the kernel says about the first core; empty where it does not."""
    with contextlib.suppress(OSError):
        for line in table.read_text().splitlines():
            if line.partition(":")[0].strip() == key:
                return line.partition(":")[2].strip()
    return ""


def boot_id() -> str:
    """One boot of one kernel, which containers and emulated hosts of a machine share; empty where there is none."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


@functools.cache
def cores() -> int:
    """Cores that this process may use. Asked once: an emulated host keeps to a few of the machine's later on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def busy_seconds() -> float | None:
    """Core time that the whole machine has used or lost since it was started; None where the system does not tell."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    return sum(int(fields[column]) for column in _BUSY) / TICKS


@dataclass(frozen=True)
class MachineLoad:
    share: float
    """Of all cores' time, over a moment."""
    waiting: float
    """Programs that want a core: now, or on average over the last minute, whichever is more."""

    def __str__(self) -> str:
        return f"load {self.waiting:.0f} on {os.cpu_count()} cores, {min(self.share, 1.0):.0%} in use"


def sample_load(seconds: float = 0.5) -> MachineLoad | None:
    """How busy the machine is while this process rests; None where the system does not tell."""
    before, start = busy_seconds(), time.monotonic()
    time.sleep(seconds)
    after, wall = busy_seconds(), time.monotonic() - start
    if before is None or after is None:
        return None
    running = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) - 1  # without this process
    share = (after - before) / (wall * (os.cpu_count() or 1))
    return MachineLoad(share, max(float(running), os.getloadavg()[0]))


def default_threads(workers: int) -> int:
    """Threads per worker that fill the cores without sharing any."""
    return max(1, cores() // workers)


def oversubscription(workers: int, threads: int) -> str | None:
    """A sentence for the user if the workers' threads outnumber the cores, else None."""
    if workers * threads <= cores():
        return None
    return (
        f"Warning: {workers} worker{'s' if workers > 1 else ''} x {threads} thread{'s' if threads > 1 else ''} "
        f"share {cores()} core{'s' if cores() > 1 else ''}: times will be longer than on a machine with enough."
    )
