"""One rank: its place in the world, how it joins it and leaves it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch

from syncline.comm import Communicator, instrumented
from syncline.comm.clock import note_clock
from syncline.comm.mpi_backend import connect_mpi
from syncline.comm.threads import ThreadCommunicator, ThreadWorld
from syncline.comm.torch_backend import connect
from syncline.errors import PlanError
from syncline.launcher import watch
from syncline.launcher.adopt import Placement, placement_from_environment
from syncline.launcher.route import find_meeting
from syncline.machine import keep_freed_memory
from syncline.plan import Plan
from syncline.spans import EventLog, log_name


@dataclass(frozen=True)
class Rank:
    """A rank that has joined its world."""

    plan: Plan
    communicator: Communicator
    device: torch.device
    log: EventLog
    at_end: ExitStack = field(default_factory=ExitStack)
    """What to close when the rank's work is done."""
    restarted: bool = False
    """The launcher has started all ranks before: there may be a checkpoint to resume from."""

    @property
    def number(self) -> int:
        return self.communicator.rank


@contextmanager
def joined(plan: Plan, events: Path | None, backend: Communicator | None = None) -> Iterator[Rank]:
    """This rank in its world. On an error nothing is torn down: a broken group may take minutes to close, and the
    process is about to end."""
    place = place_of(plan)
    torch.set_num_threads(plan.threads_of(place.rank))
    keep_freed_memory()
    device = _device(plan, place)
    backend = backend or backend_of(plan, place)
    log = EventLog(
        events and events / log_name(place.rank), rank=place.rank, world_size=place.world_size,
        host=place.host_index, threads=plan.threads_of(place.rank),
    )  # fmt: skip
    watch.on_stop(lambda: log.flush(force=True))
    communicator = instrumented(backend, log, deadline_s=plan.deadline_s, name_of=place.name_of)
    rank = Rank(plan, communicator, device, log, restarted=place.restart > 0)
    try:
        note_clock(communicator, log)
        yield rank
        note_clock(communicator, log)
    except BaseException:
        log.flush(force=True)
        raise
    rank.at_end.close()
    log.close()
    communicator.close()


def place_of(plan: Plan) -> Placement:
    place = placement_from_environment()
    if place is None:
        raise PlanError("no launcher gave this process a rank.", action="Start it with `syncline train` or torchrun.")
    if place.world_size != plan.num_ranks:
        raise PlanError(
            f"the plan needs {plan.num_ranks} ranks, but {place.launcher} started {place.world_size}.",
            action="Make them equal.",
        )
    return place


def _device(plan: Plan, place: Placement) -> torch.device:
    if plan.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise PlanError("the plan asks for device cuda, but torch sees no GPU.", action="Use device cpu.")
    torch.cuda.set_device(place.local_rank)
    return torch.device("cuda", place.local_rank)


def backend_of(plan: Plan, place: Placement) -> Communicator:
    if plan.num_ranks == 1 and plan.method_row.alone:
        return ThreadCommunicator(ThreadWorld(1, deadline_s=plan.deadline_s), 0)
    deadline = timedelta(seconds=plan.deadline_s)
    if plan.method_row.world == "mpiexec":
        return connect_mpi(deadline)
    meeting = None if place.master_addr else find_meeting(place)
    if not place.master_addr and meeting is None:
        raise PlanError(
            f"{place.launcher} does not tell ranks on several hosts where to meet, which method {plan.method} needs.",
            action="Use method mpi, start with torchrun, or set MASTER_ADDR and MASTER_PORT.",
        )
    return connect(place, backend=plan.backend or "gloo", deadline=deadline, meeting=meeting)
