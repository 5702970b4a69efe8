"""Sets of ranks that call collectives among themselves."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from syncline.horovod import world
from syncline.horovod.lane import Task
from syncline.horovod.matching import ALL_RANKS, Request


class ProcessSet:
    """Some ranks. Made by the user, known to all ranks once it was given to `hvd.init` or `add_process_set`."""

    process_set_id: int | None = None

    def __init__(self, ranks_or_comm: Any) -> None:
        if hasattr(ranks_or_comm, "Get_size"):
            raise ValueError("a ProcessSet takes a list of ranks; MPI communicators are not supported.")
        self.ranks: list[int] | None = sorted(ranks_or_comm)
        self.mpi_comm = None

    def size(self) -> int | None:
        """None if it is not known to the ranks (any more)."""
        return len(self.ranks or ()) if self.process_set_id is not None else None

    def rank(self) -> int | None:
        """This rank's number in it."""
        return (self.ranks or []).index(world.current().rank) if self.included() else None

    def included(self) -> bool | None:
        if self.process_set_id is None:
            return None
        return world.current().rank in (self.ranks or ())

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm=None)"

    __repr__ = __str__


class _GlobalSet(ProcessSet):
    """All ranks."""

    process_set_id = ALL_RANKS

    def __init__(self) -> None:
        self.mpi_comm = None

    @property
    def ranks(self) -> list[int]:  # type: ignore[override]
        return list(range(world.current().size))

    def __str__(self) -> str:
        ranks = self.ranks if world.is_initialized() else None
        return f"ProcessSet(process_set_id=0, ranks={ranks}, mpi_comm=None)"

    __repr__ = __str__


global_process_set: ProcessSet = _GlobalSet()
_known: list[ProcessSet] = []
_is_dynamic = False


def set_up(process_sets: Sequence[ProcessSet] | str | None) -> None:
    """At init: the sets that are known from the start. Collective."""
    global _is_dynamic
    forget()
    _is_dynamic = process_sets == "dynamic" or os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0") not in ("0", "")
    if process_sets and not isinstance(process_sets, str):
        for process_set in process_sets:
            _add(process_set)


def forget() -> None:
    """At shutdown."""
    for process_set in _known:
        process_set.process_set_id = None
    _known.clear()


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Make a set known to all ranks. Collective over all of them."""
    _require_dynamic("add_process_set")
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    _add(made)
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a set. Collective over all ranks. False if it is not known, or is the one with all ranks."""
    _require_dynamic("remove_process_set")
    if process_set not in _known:
        return False
    lane = world.current().lane
    request: Request = {"kind": "remove set", "shapes": [], "dtypes": [], "removed": process_set.process_set_id}
    lane.wait(lane.submit(Task(request, [])))
    _known.remove(process_set)
    process_set.process_set_id = None
    return True


def process_set_ids() -> list[int]:
    return [ALL_RANKS, *(made.process_set_id for made in _known if made.process_set_id is not None)]


def get_process_set_by_id(number: int) -> ProcessSet:
    found = [made for made in (global_process_set, *_known) if made.process_set_id == number]
    if not found:
        raise ValueError(f"there is no process set {number}.")
    return found[0]


def _add(process_set: ProcessSet) -> None:
    here = world.current()
    ranks = process_set.ranks or []
    if any(not 0 <= rank < here.size for rank in ranks) or not ranks or len(set(ranks)) < len(ranks):
        raise ValueError(f"a process set needs different ranks from 0 to {here.size - 1}, not {ranks}.")
    if process_set.process_set_id is not None:
        raise ValueError(f"{process_set} has already been added.")
    if any(made.ranks == ranks for made in (global_process_set, *_known)):
        raise ValueError(f"A process set with ranks {ranks} has already been added.")
    request = {"kind": "add set", "shapes": [], "dtypes": [], "members": ranks}
    process_set.process_set_id = here.lane.wait(here.lane.submit(Task(request, [])))
    _known.append(process_set)


def _require_dynamic(what: str) -> None:
    world.current()
    if not _is_dynamic:
        raise ValueError(
            f"{what} after hvd.init() needs HOROVOD_DYNAMIC_PROCESS_SETS=1 in the environment, or "
            'hvd.init(process_sets="dynamic"); or give the sets to hvd.init(process_sets=[...]).'
        )
