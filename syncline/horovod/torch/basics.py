"""Horovod's basics: meet, leave, who is here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from syncline.horovod import world
from syncline.horovod.common import process_sets as sets
from syncline.horovod.common.process_sets import ProcessSet


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the other ranks. A second call does nothing; after `shutdown`, ranks may join again. Collective.
    `process_sets`: those that are known from the start, or "dynamic"."""
    if world.is_initialized():
        return
    world.init(comm)
    sets.set_up(process_sets)
    if os.environ.get("HOROVOD_TIMELINE", "") not in ("", "DYNAMIC"):  # DYNAMIC: the script calls start_timeline
        mark_cycles = os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES", "0") not in ("", "0")
        start_timeline(os.environ["HOROVOD_TIMELINE"], mark_cycles)


def shutdown() -> None:
    """Leave the other ranks."""
    sets.forget()
    world.shutdown()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """From now on, note what becomes of each tensor, for chrome://tracing or Perfetto. Rank 0 writes the file."""
    here = world.current()
    if here.rank == 0:
        here.lane.timeline.start(file_path, mark_cycles)


def stop_timeline() -> None:
    """Write the file."""
    world.current().lane.timeline.stop()


def is_initialized() -> bool:
    return world.is_initialized()


def rank() -> int:
    return world.current().rank


def size() -> int:
    return world.current().size


def local_rank() -> int:
    """This rank's number among those of its host."""
    return world.current().local_rank


def local_size() -> int:
    return len(world.current().own_host)


def cross_rank() -> int:
    """This rank's host, counted among the hosts that have its local rank."""
    here = world.current()
    return here.across.index(here.rank)


def cross_size() -> int:
    return len(world.current().across)


def is_homogeneous() -> bool:
    """Every host has as many ranks."""
    return len({len(ranks) for ranks in world.current().hosts}) == 1
