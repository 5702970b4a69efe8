"""How much of the machine went to others while ranks worked: core time that none of the ranks used,
or that a hypervisor took away."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from pathlib import Path

import torch

from syncline.comm.communicator import Communicator
from syncline.machine import TICKS, boot_id, busy_seconds, cores


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


def own_seconds() -> float:
    """Core time of this process and of all below it, such as loaders or Spark, that still run or were waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + _living_below("self") / TICKS


def _living_below(process: str) -> int:
    """Clock ticks of its living children, of theirs, and of what those waited for."""
    total = 0
    for listing in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            children = listing.read_text().split()
        except OSError:
            continue  # it has ended meanwhile
        for child in children:
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                total += sum(map(int, fields[11:15])) + _living_below(child)
    return total
