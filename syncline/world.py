"""The world that this thread is a rank of: the one of its last DataParallel, or of its process.

The loader asks for its place in it, metrics and checkpoints talk over it. Kept for each thread, because ranks may be
threads of one process.
"""

from __future__ import annotations

import threading
import weakref
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from syncline.comm import Communicator, instrumented
from syncline.comm.torch_backend import TorchCommunicator
from syncline.launcher.adopt import placement_from_environment
from syncline.spans import EventLog


class Place(NamedTuple):
    rank: int
    world_size: int


class _OfThread(threading.local):
    backend: Communicator | None = None
    """Below all wrappers: it has no threads of its own, so keeping it keeps nothing of a model alive."""
    channel: Communicator | None = None
    """The same, with every call compared across ranks; made when somebody first talks."""
    model: weakref.ref[nn.Module] | None = None


_here = _OfThread()


def enter(communicator: Communicator, model: nn.Module | None = None) -> None:
    """From now on this thread is a rank of these, and trains this model."""
    _here.model = weakref.ref(model) if model is not None else None
    if communicator.backend is not _here.backend:
        _here.backend, _here.channel = communicator.backend, None


def leave(communicator: Communicator) -> None:
    if communicator.backend is _here.backend:
        _here.backend = _here.channel = None


def is_training() -> bool:
    """False if the model that this thread wrapped last is in evaluation mode."""
    model = _here.model() if _here.model is not None else None
    return model is None or model.training


def place() -> Place:
    """Talks to nobody."""
    backend = _backend()
    if backend is not None:
        return Place(backend.rank, backend.world_size)
    if dist.is_initialized():
        return Place(dist.get_rank(), dist.get_world_size())
    placement = placement_from_environment()
    return Place(placement.rank, placement.world_size) if placement else Place(0, 1)


def channel(deadline_s: float = Communicator.deadline_s) -> Communicator:
    """To talk to all ranks. Joins the world of the process if this thread is in none. Collective."""
    backend = _backend()
    if backend is None:
        from syncline.data_parallel import _connect  # late: that file enters worlds here

        backend = _connect(None, deadline_s)
        enter(backend)
    if _here.channel is None:
        _here.channel = instrumented(backend, EventLog(keep=False), deadline_s=backend.deadline_s)
    return _here.channel


def _backend() -> Communicator | None:
    """None if there is none, or if its group was destroyed since."""
    backend = _here.backend
    if isinstance(backend, TorchCommunicator) and not _exists(backend.group):
        _here.backend = _here.channel = backend = None
    return backend


def _exists(group: dist.ProcessGroup) -> bool:
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map
