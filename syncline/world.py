"""The world that this thread is a rank of: the one of its last DataParallel, or of its process.

The loader asks for its place in it, metrics and checkpoints talk over it. Kept for each thread, because ranks may be
threads of one process.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from syncline.comm import Communicator, devices, instrumented
from syncline.comm.mpi_backend import connect_mpi
from syncline.comm.threads import ThreadCommunicator, ThreadWorld
from syncline.comm.torch_backend import TorchCommunicator, adopt, connect
from syncline.errors import PlanError, UsageError
from syncline.launcher.adopt import Placement, placement_from_environment
from syncline.launcher.route import find_meeting
from syncline.spans import EventLog


class Place(NamedTuple):
    rank: int
    world_size: int


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.backend: Communicator | None = None
        """Below all wrappers: it has no threads of its own, so keeping it keeps nothing of a model alive."""
        self.channel: Communicator | None = None
        """The same, with every call compared across ranks; made when somebody first talks."""
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.listeners: list[Callable[[int, int], None]] = []


_here = _OfThread()


def enter(communicator: Communicator, model: nn.Module | None = None) -> None:
    """From now on this thread is a rank of these, and trains this model."""
    if model is not None:
        _here.models.add(model)
    if communicator.backend is not _here.backend:
        _here.backend, _here.channel = communicator.backend, None


def leave(communicator: Communicator) -> None:
    if communicator.backend is _here.backend:
        _here.backend = _here.channel = None


def is_training() -> bool:
    """False if all models that this thread has wrapped are in evaluation mode."""
    return not _here.models or any(model.training for model in _here.models)


def place() -> Place:
    """Talks to nobody."""
    backend = _backend()
    if backend is not None:
        return Place(backend.rank, backend.world_size)
    if dist.is_initialized():
        return Place(dist.get_rank(), dist.get_world_size())
    placement = placement_from_environment()
    return Place(placement.rank, placement.world_size) if placement else Place(0, 1)


@contextmanager
def talking() -> Iterator[Communicator]:
    """The channel, for figures and checkpoints; whoever records this thread learns how long it took."""
    start_ns = time.monotonic_ns()
    yield channel()
    tell(start_ns)


def tell(start_ns: int) -> None:
    """This thread has talked to other ranks from that moment until now."""
    for listener in _here.listeners:
        listener(start_ns, time.monotonic_ns())


def listen(listener: Callable[[int, int], None]) -> Callable[[], None]:
    """Call `listener(start_ns, end_ns)` after each talk of this thread, until what is returned is called."""
    listeners = _here.listeners
    listeners.append(listener)
    return lambda: listeners.remove(listener)


def channel(deadline_s: float = Communicator.deadline_s) -> Communicator:
    """To talk to all ranks. Joins the world of the process if this thread is in none. Collective."""
    backend = _backend()
    if backend is None:
        backend = meet(None, deadline_s)
        enter(backend)
    if _here.channel is None:
        log = EventLog(keep=False)
        _here.channel = instrumented(
            backend, log, deadline_s=backend.deadline_s, name_of=name_of_rank(), name="figures"
        )
    return _here.channel


def _backend() -> Communicator | None:
    """None if there is none, or if its group was destroyed since."""
    backend = _here.backend
    if isinstance(backend, TorchCommunicator) and not _exists(backend.group):
        _here.backend = _here.channel = backend = None
    return backend


def _exists(group: dist.ProcessGroup) -> bool:
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map


def meet(process_group: dist.ProcessGroup | None, deadline_s: float, module: nn.Module | None = None) -> Communicator:
    """The ranks of a group that exists, or of the launcher that started this process; nobody else if there is none.
    The backend suits the devices of the module. Collective."""
    deadline = timedelta(seconds=deadline_s)
    on = {parameter.device for parameter in module.parameters()} if module is not None else set()
    if dist.is_initialized():
        devices.check(dist.get_backend_config(process_group), on)
        return adopt(process_group, deadline=deadline, host_index=host_index())
    place = placement_from_environment()
    if process_group is not None:
        raise PlanError("you gave process_group, but torch.distributed is not initialised.")
    if place is None:
        return ThreadCommunicator(ThreadWorld(1), 0)
    meeting = None if place.master_addr else find_meeting(place)
    if not place.master_addr and (meeting is None or place.launcher == "mpi"):
        return connect_mpi(deadline)  # mpiexec names no place to meet: MPI itself is one
    gpus, nccl = torch.cuda.device_count(), dist.is_nccl_available()
    choice = devices.choose(on, gpus=gpus, nccl=nccl, local_rank=place.local_rank)
    if choice.gpu is not None:
        torch.cuda.set_device(choice.gpu)
    return connect(place, backend=choice.backend, deadline=deadline, meeting=meeting)


def host_index() -> int:
    place = _placement()
    return place.host_index if place else 0


def name_of_rank() -> Callable[[int], str]:
    """What errors call a rank: with its host, where the launcher has said which."""
    place = _placement()
    return place.name_of if place else "rank {}".format


def _placement() -> Placement | None:
    """As the launcher says; scripts that make the group themselves often set only some of its variables."""
    try:
        return placement_from_environment()
    except UsageError:
        return None
