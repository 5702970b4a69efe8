"""How much of the machine went to others while ranks worked: core time that none of the ranks used,
or that a hypervisor took away."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

import torch

from syncline.comm.communicator import Communicator
from syncline.machine import boot_id, cores

TICKS = os.sysconf("SC_CLK_TCK")
_BUSY = (0, 1, 2, 5, 6, 7)
"""Of the columns in /proc/stat: user, nice, system, interrupts, and what a hypervisor gave to other virtual
machines; not idle or waiting for disks."""


class LoadMeter:
    """Counts from when it is made."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._own = own_seconds()
        self._busy = busy_seconds()

    def others(self, communicator: Communicator) -> float | None:
        """The share of the cores' time that went to others, on the machine where it is largest. Collective.

        None where the system does not tell.
        """
        wall = time.monotonic() - self._start
        busy = busy_seconds()
        spent = -1.0 if busy is None or self._busy is None else busy - self._busy
        own = [machine_number(), own_seconds() - self._own, spent, wall * cores()]
        with communicator.scope("load"):
            mine = torch.tensor(own, dtype=torch.float64, device=communicator.device)
            return other_share([part.tolist() for part in communicator.all_gather(mine, label="load")])


def other_share(ranks: list[list[float]]) -> float | None:
    """From each rank's machine, own seconds, its machine's busy seconds and that one's capacity in core seconds."""
    if not ranks or any(busy < 0 for _, _, busy, _ in ranks):
        return None
    shares = []
    for machine in {rank[0] for rank in ranks}:
        here = [rank for rank in ranks if rank[0] == machine]
        busy, capacity = max(rank[2] for rank in here), max(rank[3] for rank in here)
        shares.append(max(0.0, busy - sum(rank[1] for rank in here)) / capacity if capacity else 0.0)
    return max(shares)


def machine_number() -> float:
    """The same for all that share a kernel: emulated hosts of one machine, whose core time is counted together."""
    boot = boot_id().replace("-", "")
    return float(int(boot[:12], 16) if boot else uuid.getnode())  # so many bits that a float holds them all


def busy_seconds() -> float | None:
    """Core time that the whole machine has used or lost since it was started."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    return sum(int(fields[column]) for column in _BUSY) / TICKS


def own_seconds() -> float:
    """Core time of this process and of its children, such as loaders, that still run or were waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + _living_children()


def _living_children() -> float:
    total = 0
    for listing in Path("/proc/self/task").glob("*/children"):
        for child in listing.read_text().split():
            try:
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended meanwhile
            total += int(fields[11]) + int(fields[12])
    return total / TICKS
