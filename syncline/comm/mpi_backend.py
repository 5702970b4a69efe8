"""Communicator over MPI, by mpi4py: non-blocking calls on the tensors' own memory.

MPI makes progress only inside its calls, so a wait is a loop of tests: quick ones while a transfer of that size may
take that long, then with sleeps between them, so that a rank that waits for a slower one leaves it the core.
mpi4py is imported when ranks connect: who does not use MPI need not have it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from syncline.comm.communicator import Communicator, Operation, Work
from syncline.comm.torch_backend import flat
from syncline.errors import CommunicationError, DeadlineError, PeerLostError, PlanError
from syncline.launcher.adopt import placement_from_environment
from syncline.launcher.mpi.supervisor import STORE_VARIABLE, note_start

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch._C._distributed_c10d import Store

Array = np.ndarray[Any, Any]
Result = TypeVar("Result")

LOOPBACK = "127.0.0.1"
SUMMED = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.uint8: "UINT8_T",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
}
"""MPI's names of the types that it can add up."""
QUICK_S = 0.0005
QUICK_BYTES_PER_S = 5e8
"""How long a wait tests without sleeping: this, and the time that a transfer takes at this rate."""
SHORTEST_SLEEP_S, LONGEST_SLEEP_S = 20e-6, 0.001

_abandoned: list[object] = []
"""Memory of operations whose wait ended in an error: MPI may still write to it."""


class MpiCommunicator(Communicator):
    """Over an MPI communicator of one's own. Closing the one that `connect_mpi` made also leaves MPI."""

    def __init__(
        self, handle: MPI.Intracomm, store: Store, *, deadline: timedelta, host_index: int, leaves_mpi: bool = False
    ) -> None:
        self.handle = handle
        self.store = store
        self.deadline = deadline
        self.deadline_s = deadline.total_seconds()
        self.host_index = host_index
        self.rank = handle.Get_rank()
        self.world_size = handle.Get_size()
        self._leaves_mpi = leaves_mpi
        self._closed = False

    def start(self, operation: Operation) -> Work:
        begin = getattr(self, f"_start_{operation.name}")
        with _translated():
            work: Work = begin(operation)
        return work

    def split(self, name: str) -> MpiCommunicator:
        with _translated():
            handle = self.handle.Dup()
        store = dist.PrefixStore(name, self.store)
        return MpiCommunicator(handle, store, deadline=self.deadline, host_index=self.host_index)

    def close(self) -> None:
        """Leave MPI once every rank is here, or after the deadline without it: rank 0 holds the store, and MPI's own
        end would wait for ever."""
        if not self._leaves_mpi or self._closed:
            return
        self._closed = True
        from mpi4py import MPI

        with contextlib.suppress(CommunicationError), _translated():
            self._work(self.handle.Ibarrier(), 0).wait()
            MPI.Finalize()

    def _start_all_reduce(self, operation: Operation) -> Work:
        from mpi4py import MPI

        dtype = operation.tensor.dtype
        if dtype not in SUMMED:
            raise CommunicationError(
                f"MPI cannot add up {str(dtype).removeprefix('torch.')}.",
                action='Use a collective that adds up by itself, such as options.collective = "ring".',
            )
        values = flat(operation.tensor).numpy()
        request = self.handle.Iallreduce(MPI.IN_PLACE, [values, getattr(MPI, SUMMED[dtype])], MPI.SUM)
        return self._work(request, values.nbytes, keep=values)

    def _start_broadcast(self, operation: Operation) -> Work:
        data = _bytes(operation.tensor)
        return self._work(self.handle.Ibcast(data, root=_peer(operation)), data.nbytes, keep=data)

    def _start_all_gather(self, operation: Operation) -> Work:
        data, landing = _bytes(operation.tensor), self._landing(operation)
        request = self.handle.Iallgather(data, landing)
        return self._work(request, landing.nbytes, keep=data, after=lambda: _unpack(landing, operation.parts or []))

    def _start_gather(self, operation: Operation) -> Work:
        data = _bytes(operation.tensor)
        if self.rank != _peer(operation):
            return self._work(self.handle.Igather(data, None, root=_peer(operation)), data.nbytes, keep=data)
        landing = self._landing(operation)
        request = self.handle.Igather(data, landing, root=self.rank)
        return self._work(request, landing.nbytes, keep=data, after=lambda: _unpack(landing, operation.parts or []))

    def _start_scatter(self, operation: Operation) -> Work:
        data = _bytes(operation.tensor)
        if self.rank != _peer(operation):
            return self._work(self.handle.Iscatter(None, data, root=_peer(operation)), data.nbytes, keep=data)
        outgoing = np.concatenate([_bytes(part) for part in operation.parts or []])
        request = self.handle.Iscatter(outgoing, data, root=self.rank)
        return self._work(request, outgoing.nbytes, keep=(data, outgoing))

    def _start_send(self, operation: Operation) -> Work:
        data = _bytes(operation.tensor)
        return self._work(self.handle.Isend(data, _peer(operation)), data.nbytes, keep=data)

    def _start_receive(self, operation: Operation) -> Work:
        data = _bytes(operation.tensor)
        return self._work(self.handle.Irecv(data, _peer(operation)), data.nbytes, keep=data)

    def _landing(self, operation: Operation) -> Array:
        return np.empty(self.world_size * operation.num_bytes, dtype=np.uint8)

    def _work(
        self, request: MPI.Request, num_bytes: int, *, keep: object = None, after: Callable[[], None] | None = None
    ) -> _MpiWork:
        return _MpiWork(request, num_bytes, self.deadline_s, keep, after)


class _MpiWork:
    """`keep` is memory that MPI uses until the wait has ended; `after` runs then."""

    def __init__(
        self, request: MPI.Request, num_bytes: int, deadline_s: float, keep: object, after: Callable[[], None] | None
    ) -> None:
        self._request = request
        self._num_bytes = num_bytes
        self._deadline_s = deadline_s
        self._keep = keep
        self._after = after

    def wait(self) -> None:
        try:
            with _translated():
                self._poll()
        except CommunicationError:
            _abandoned.append((self._keep, self._after))
            raise
        if self._after is not None:
            self._after()
        self._after = self._keep = None

    def _poll(self) -> None:
        start = time.monotonic()
        quick_s = QUICK_S + self._num_bytes / QUICK_BYTES_PER_S
        sleep_s = SHORTEST_SLEEP_S
        while not self._request.Test():
            waited_s = time.monotonic() - start
            if waited_s > self._deadline_s:
                raise DeadlineError("the deadline passed.")
            if waited_s < quick_s:
                time.sleep(0)  # whoever else can run on this core goes first
                continue
            time.sleep(sleep_s)
            sleep_s = min(1.5 * sleep_s, LONGEST_SLEEP_S)


def connect_mpi(deadline: timedelta) -> MpiCommunicator:
    """Join the world that mpiexec has started. Collective."""
    with _bounded(deadline.total_seconds()):
        return _connect(deadline)


@contextlib.contextmanager
def _bounded(deadline_s: float) -> Iterator[None]:
    """A deadline for MPI's start, in which no thread of Python runs. Our launcher keeps it; under another one this
    process ends with a traceback that shows where it waited."""
    if note_start(deadline_s, done=False):
        yield
        note_start(deadline_s, done=True)
        return
    faulthandler.dump_traceback_later(deadline_s, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _connect(deadline: timedelta) -> MpiCommunicator:
    mpi, owned = _initialised()
    world = mpi.COMM_WORLD
    _check_world(world.Get_size(), mpi.Get_library_version().split(",")[0].split("\n")[0])
    with _translated():
        handle = world.Dup()
        node = world.Split_type(mpi.COMM_TYPE_SHARED)
        lowest = handle.allgather(node.allreduce(handle.Get_rank(), op=mpi.MIN))
        if node.Get_rank() == 0:
            _forget_segments()
        node.Free()
        host_index = sorted(set(lowest)).index(lowest[handle.Get_rank()])
        store = _shared_store(handle, LOOPBACK if len(set(lowest)) == 1 else None, deadline)
    prefixed = dist.PrefixStore("syncline", store)
    return MpiCommunicator(handle, prefixed, deadline=deadline, host_index=host_index, leaves_mpi=owned)


@contextlib.contextmanager
def aborting() -> Iterator[None]:
    """For ranks that another launcher started: an error on one ends all, once it has been printed.

    Otherwise those that wait for the failed one would wait until their deadline.
    """
    code = 1
    try:
        yield
        return
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if code == 0 or not _is_running():
            raise
    except BaseException:
        if not _is_running():
            raise
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(code)


def _is_running() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()


def _initialised() -> tuple[Any, bool]:
    """mpi4py's MPI, started with threads allowed; and whether it was started here, and so is to be ended here."""
    try:
        import mpi4py
    except ImportError:
        raise PlanError(
            "method mpi needs mpi4py: pip install 'syncline[mpi]', and an MPI library with mpiexec, such as "
            "pip install mpich."
        ) from None
    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise PlanError(
            f"mpi4py finds no MPI library: {str(error).strip().splitlines()[0]}.",
            action="Install one, for example: pip install mpich",
        ) from error
    owned = not MPI.Is_initialized()
    given = MPI.Init_thread(MPI.THREAD_MULTIPLE) if owned else MPI.Query_thread()
    if given < MPI.THREAD_MULTIPLE:
        raise PlanError(
            "method mpi sends from several threads, which this MPI library does not allow "
            f"({MPI.Get_library_version().splitlines()[0]}).",
            action="Use a library built with MPI_THREAD_MULTIPLE, or initialise mpi4py with it.",
        )
    return MPI, owned


def _check_world(size: int, library: str) -> None:
    """An mpiexec of another MPI starts ranks that know nothing of each other: worlds of one, each."""
    place = placement_from_environment()
    if place is not None and place.world_size != size:
        raise PlanError(
            f"mpiexec started {place.world_size} ranks, but the library of mpi4py ({library}) sees {size}.",
            action="Use the mpiexec of that library: the one on the PATH may belong to another MPI.",
        )


def _shared_store(handle: MPI.Intracomm, address: str | None, deadline: timedelta) -> Store:
    """The launcher's, if it is ours. Else rank 0 hosts it: on `address`, or on its own address in the network."""
    if launchers := os.environ.get(STORE_VARIABLE):
        return dist.TCPStore(LOOPBACK, int(launchers), is_master=False, timeout=deadline, wait_for_workers=False)
    store: Store | None = None
    place: tuple[str, int] | None = None
    if handle.Get_rank() == 0:
        host = address or _own_address()
        # Bound here, because torch's store would listen on every interface.
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        place = (host, listener.getsockname()[1])
        store = dist.TCPStore(
            *place, is_master=True, timeout=deadline, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    host, port = handle.bcast(place, root=0)
    return store or dist.TCPStore(host, port, is_master=False, timeout=deadline, wait_for_workers=False)


def _own_address() -> str:
    """An address under which other hosts find this one; its name may stand for loopback here."""
    with contextlib.suppress(OSError):
        for _, _, _, _, place in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            if not str(place[0]).startswith(("127.", "::1", "fe80")):
                return str(place[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; picks the interface of the default route
        return str(probe.getsockname()[0])


def _forget_segments() -> None:
    """Remove the name of MPICH's shared memory. All ranks of the host have it open, and one that is killed would
    leave the name behind for ever."""
    with contextlib.suppress(OSError):
        for name in set(re.findall(r"/dev/shm/mpich_shm_\w+", Path("/proc/self/maps").read_text())):
            os.unlink(name)


def _bytes(tensor: Tensor) -> Array:
    data: Array = flat(tensor).view(torch.uint8).numpy()
    return data


def _unpack(landing: Array, parts: list[Tensor]) -> None:
    for part, data in zip(parts, np.split(landing, len(parts)), strict=True):
        _bytes(part)[:] = data


def _peer(operation: Operation) -> int:
    assert operation.peer is not None
    return operation.peer


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """MPI's errors as ours. They are RuntimeErrors."""
    try:
        yield
    except CommunicationError:
        raise  # ours already: a deadline that passed
    except RuntimeError as error:
        raise PeerLostError(f"MPI failed: {str(error).strip().splitlines()[0]}") from error
