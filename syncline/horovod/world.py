"""The ranks that `hvd.init()` joins, and this rank's place among them. One world in a process, as Horovod has it.

Whoever started the process decides: `syncline launch`, torchrun, horovodrun, mpirun, srun, or nobody, which is a
world of one. A torch.distributed group that exists already is adopted.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from syncline import world as process_world
from syncline.comm import Communicator, devices, instrumented
from syncline.comm.shared_memory import ranks_that_share
from syncline.comm.threads import ThreadCommunicator, ThreadWorld
from syncline.comm.torch_backend import TorchCommunicator, adopt, join, open_store
from syncline.errors import DeadlineError, UsageError
from syncline.horovod.common.exceptions import HorovodInternalError
from syncline.horovod.coordinator import Coordinator, Link, find, own_addresses
from syncline.horovod.lane import Lane
from syncline.horovod.matching import Matching
from syncline.launcher.adopt import Placement, placement_from_environment
from syncline.launcher.route import Meeting, find_meeting, local_address
from syncline.spans import EventLog

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

START_TIMEOUT_S = 120.0
FOREVER_S = 30 * 24 * 3600.0
"""Minutes of evaluation on one rank are normal, so nothing ends a wait but a lost rank, or the user's own limit."""


class Averaging(Protocol):
    """What averages an optimiser's gradients."""

    number: int
    """The same on every rank."""
    waits: bool
    """It is inside one."""

    def shadow(self) -> None:
        """Take part in a step of the others, with zeros."""

    def leave(self) -> None:
        """The world ends; another one may come."""


@dataclass
class World:
    """Between init and shutdown."""

    communicator: Communicator
    hosts: list[list[int]]
    """The ranks of each host."""
    generation: int
    """How often this process has joined a world."""
    lane: Lane
    link: Link | None = None
    optimizers: weakref.WeakValueDictionary[int, Averaging] = field(default_factory=weakref.WeakValueDictionary)
    steps: Counter[int] = field(default_factory=Counter)
    """How many each optimiser has begun here, also of those that are garbage by now."""
    _numbers: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.lane.step_of = lambda: dict(self.steps)
        self.lane.waits_in = self._waits_in

    def next_number(self, what: str) -> int:
        self._numbers[what] += 1
        return self._numbers[what]

    def again(self) -> Communicator:
        """The same ranks with keys of their own in the store: what was compared for one optimiser says nothing about
        another."""
        backend = self.communicator.backend
        assert isinstance(backend, TorchCommunicator)
        store = dist.PrefixStore(f"again {self.next_number('again')}", backend.store)
        index, deadline = backend.host_index, timedelta(seconds=backend.deadline_s)
        return TorchCommunicator(backend.group, store, owned=False, deadline=deadline, host_index=index)

    def shadow(self, number: int) -> None:
        """This rank has joined, and others are in a step of that optimiser."""
        if number not in self.optimizers:
            raise HorovodInternalError(f"other ranks are in a step of DistributedOptimizer {number}, unknown here.")
        self.optimizers[number].shadow()

    def _waits_in(self) -> str:
        inside = [made for made in list(self.optimizers.values()) if made.waits]
        return self.step_in_words(inside[0].number) if inside else ""

    def step_in_words(self, number: int) -> str:
        return f"step {self.steps[number]} of DistributedOptimizer {number}"

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def size(self) -> int:
        return self.communicator.world_size

    @property
    def own_host(self) -> list[int]:
        return next(ranks for ranks in self.hosts if self.rank in ranks)

    @property
    def local_rank(self) -> int:
        return self.own_host.index(self.rank)

    @property
    def across(self) -> list[int]:
        """The ranks with this local rank, one a host, in the order of hosts."""
        return [ranks[self.local_rank] for ranks in self.hosts if len(ranks) > self.local_rank]

    def close(self) -> None:
        for made in list(self.optimizers.values()):
            made.leave()
        self.lane.close()
        if self.link is not None:
            self.link.close()
        process_world.leave(self.communicator)
        self.communicator.close()


_current: World | None = None
_generation = 0
_store: Store | None = None
"""Kept over a shutdown: rank 0 may serve it, and ranks meet there again."""
_met: tuple[tuple[str, int, int], int] = ("", 0, 0), 0
"""Where the ranks met last, and how often they have met there. An elastic run's launcher sends them elsewhere,
together with ranks that are new."""


def current() -> World:
    if _current is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _current


def is_initialized() -> bool:
    return _current is not None


def init(comm: Any = None) -> World:
    """Join the world of this process. Nothing happens if that was done already. Collective."""
    global _current, _generation
    if _current is not None:
        return _current
    _generation += 1
    log = EventLog(keep=False)
    backend = _meet()
    _check_comm(comm, backend.world_size)
    communicator = instrumented(backend, log, deadline_s=backend.deadline_s)
    process_world.enter(communicator)
    hosts = ranks_that_share(communicator)
    lane, link = _open_lane(communicator, hosts)
    _current = World(communicator, hosts, _generation, lane, link)
    return _current


def _open_lane(communicator: Communicator, hosts: list[list[int]]) -> tuple[Lane, Link | None]:
    """Channels of its own for what ranks call by name. Collective."""
    rank, size = communicator.rank, communicator.world_size
    if size == 1:
        matching = Matching(1)
        alone = Lane(communicator.backend, lambda message: _answer_alone(matching, alone, message))
        return alone, None
    channel = communicator.backend.split("horovod")
    limit_s = _start_timeout_s()
    if rank == 0:
        place = placement_from_environment()
        Coordinator(size).serve(communicator.store, own_addresses(place.master_addr if place else ""), limit_s)
    connection = find(communicator.store, rank, same_host=rank in hosts[0], deadline_s=limit_s)
    lane = Lane(channel, connection.send)
    return lane, Link(connection, lane.on_message, lane.fail)


def _answer_alone(matching: Matching, lane: Lane, message: dict[str, Any]) -> bool:
    if message["say"] == "request":
        for answer in matching.submit(0, message["request"], time.monotonic()):
            lane.on_message(answer)
    return True


def shutdown() -> None:
    """Leave the world. Not collective; does nothing where there is none."""
    global _current
    if _current is not None:
        world, _current = _current, None
        world.close()


atexit.register(shutdown)


def stall_limit_s() -> float:
    """After how long a wait for other ranks ends the run; 0 is never."""
    return float(os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS") or 0)


def _meet() -> Communicator:
    deadline = timedelta(seconds=stall_limit_s() or FOREVER_S)
    if dist.is_initialized():
        return adopt(None, deadline=deadline, host_index=process_world.host_index())
    place = placement_from_environment()
    if place is None or place.world_size == 1:
        return ThreadCommunicator(ThreadWorld(1), 0)
    store = dist.PrefixStore(f"horovod {place.restart}.{_count_meeting(place)}", _open_store(place))
    _wait_for_all(store, place)
    gpus, nccl = torch.cuda.device_count(), dist.is_nccl_available()
    choice = devices.choose((), gpus=gpus, nccl=nccl, local_rank=place.local_rank)
    return join(store, place, backend=choice.backend, deadline=deadline)


def _count_meeting(place: Placement) -> int:
    global _met, _store
    where = (place.master_addr, place.master_port, place.restart)
    if where != _met[0]:
        _met, _store = (where, 0), None
    _met = (where, _met[1] + 1)
    return _met[1]


def _open_store(place: Placement) -> Store:
    global _store
    if _store is None:
        limit = timedelta(seconds=_start_timeout_s())
        meeting = None if place.master_addr and place.launcher != "mpi" else _find_meeting(place)
        _store = open_store(place, limit, meeting)
    return _store


def _start_timeout_s() -> float:
    return float(os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS") or START_TIMEOUT_S)


def _find_meeting(place: Placement) -> Meeting:
    if place.master_addr:
        return Meeting(place.master_addr, place.master_port)
    meeting = find_meeting(place)
    if meeting is not None:
        return meeting
    try:
        from mpi4py import MPI
    except ImportError:
        raise UsageError(
            "mpirun does not say where ranks on several hosts meet, and mpi4py is not installed.",
            action="Install mpi4py, or give mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=PORT.",
        ) from None
    with_port = (local_address("192.0.2.1", 9), _free_port()) if place.rank == 0 else None
    address, port = MPI.COMM_WORLD.bcast(with_port, root=0)
    return Meeting(address, port)


def _free_port() -> int:
    from syncline.launcher.starting import listening

    with listening("", 0) as free:
        return int(free.getsockname()[1])


def _wait_for_all(store: Store, place: Placement) -> None:
    """A rank that never starts is told apart from one that is slow later: only the first has a limit by default."""
    limit_s = _start_timeout_s()
    end, pause_s = time.monotonic() + limit_s, 0.001
    store.set(f"here/{place.rank}", "")
    while missing := [rank for rank in range(place.world_size) if not store.check([f"here/{rank}"])]:
        if time.monotonic() > end:
            raise DeadlineError(
                f"hvd.init() waited {limit_s:g} s for ranks {', '.join(map(str, missing))}.",
                action="Look at what those ranks did, or raise HOROVOD_GLOO_TIMEOUT_SECONDS.",
                rank=place.rank,
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)


def _check_comm(comm: Any, size: int) -> None:
    """Horovod takes a list of ranks or an MPI communicator. Both may name all ranks; subsets are process sets."""
    if comm is None:
        return
    ranks: Sequence[int] = range(comm.Get_size()) if hasattr(comm, "Get_size") else sorted(comm)
    if ranks and list(ranks) != list(range(size)):
        raise ValueError(
            f"hvd.init(comm=...) names {len(ranks)} of {size} ranks; use process sets for some of the ranks."
        )
