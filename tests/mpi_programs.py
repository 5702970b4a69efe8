"""What the ranks of the MPI tests run, and what its tests start as separate launchers.

As a script: `python mpi_programs.py FUNCTION WORKERS` launches that function through mpiexec and prints one line on
how it ended, as the command line would. Such a launcher needs no torch, so it is imported late.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher_programs import say_ready

from syncline.errors import SynclineError
from syncline.launcher.adopt import placement_from_environment

if TYPE_CHECKING:
    from torch import Tensor

    from syncline.comm.mpi_backend import MpiCommunicator
    from syncline.plan import Plan


def joined(deadline_s: float = 30.0) -> MpiCommunicator:
    from syncline.comm.mpi_backend import connect_mpi

    return connect_mpi(timedelta(seconds=deadline_s))


def ones(count: int = 1) -> Tensor:
    import torch

    return torch.ones(count)


def every_verb() -> dict[str, Any]:
    """All verbs on the communicator itself, on its child and as the product wraps it; then what must be refused."""
    import torch
    from helpers import caught
    from test_comm import VERBS

    from syncline.comm import instrumented
    from syncline.spans import EventLog

    backend = joined()
    child = backend.split("child")
    checked = instrumented(backend, EventLog(rank=backend.rank, world_size=backend.world_size), deadline_s=30)
    for name, check in VERBS.items():
        check(backend)
        check(child)
        if name != "ring_that_sends_first":
            check(checked)
    half = [torch.full((3,), float(backend.rank), dtype=torch.bfloat16) for _ in range(2)]
    child.broadcast(half[0], root=backend.world_size - 1)
    assert half[0].tolist() == [backend.world_size - 1] * 3
    mapped = Path("/proc/self/maps").read_text()
    found = {
        "open to others": ports_that_others_reach(),
        "place": (backend.rank, backend.world_size, backend.host_index),
        "half": str(caught(lambda: child.all_reduce(half[1]))),
        "segments": [name for name in os.listdir("/dev/shm") if name.startswith("mpich") and name in mapped],
    }
    dtype = torch.float32 if backend.rank == 0 else torch.float64
    found["contract"] = str(caught(lambda: checked.all_reduce(torch.ones(3, dtype=dtype))))
    checked.close()
    return found


def ports_that_others_reach() -> list[int]:
    """Of mpiexec and of this rank, at an address that is not loopback."""
    from conftest import listening_ports

    from syncline.comm.mpi_backend import _own_address
    from syncline.launcher.watch import ancestors

    ports = {*listening_ports(os.getpid()), *(p for pid, _ in ancestors(os.getpid()) for p in listening_ports(pid))}
    reached = []
    for port in ports:
        with contextlib.suppress(OSError), socket.create_connection((_own_address(), port), timeout=1):
            reached.append(port)
    return reached


def stopped_at_start() -> None:
    """Rank 1 is stopped on its way into MPI, where the others wait for it."""
    place = placement_from_environment()
    assert place is not None
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    joined(2.0)


def stopped_later() -> None:
    """Rank 0 is stopped when all have joined."""
    from syncline.comm import instrumented
    from syncline.spans import EventLog

    comm = instrumented(joined(2.0), EventLog(keep=False), deadline_s=2.0)
    comm.all_reduce(ones())
    if comm.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    comm.all_reduce(ones())


def late() -> str:
    """Rank 1 does not come."""
    from helpers import caught

    comm = joined(0.7)
    if comm.rank == 1:
        time.sleep(1.5)
        return ""
    start = time.process_time()
    error = caught(lambda: comm.all_reduce(ones()))
    assert time.process_time() - start < 0.5, "the wait burns a core"
    return repr(error)


def raise_on(culprit: int) -> None:
    comm = joined()
    comm.all_reduce(ones())
    if comm.rank == culprit:
        raise KeyError(f"the fault of rank {comm.rank}")
    comm.all_reduce(ones())


def all_reduce_for_ever() -> None:
    comm = joined()
    comm.all_reduce(ones())
    say_ready(comm.rank)
    while True:
        comm.all_reduce(ones(1000))


def block_in_a_collective() -> None:
    """Rank 0 never comes; the others wait for it."""
    comm = joined()
    comm.all_reduce(ones())
    say_ready(comm.rank)
    if comm.rank == 0:
        time.sleep(600)
    comm.all_reduce(ones())


def never_get_into_mpi() -> None:
    """Rank 0 stays away while the others wait for it where Python handles no signal: in the start of MPI."""
    place = placement_from_environment()
    assert place is not None
    say_ready(place.rank)
    if place.rank == 0:
        time.sleep(600)
    joined()


def digests(plans: list[Plan], folder: str, stop_at: int) -> dict[str, list[str]]:
    """Each plan once through, and once stopped after a step and resumed: the weights of both, by method."""
    from syncline import worker
    from syncline.rank import joined as joined_by
    from syncline.store import RunFolder
    from syncline.voice import Voice

    class Stopped(Exception):
        pass

    class Stopping(worker.Display):
        def step(self, step: int, total: int, loss: float, images_per_s: float) -> None:
            if step == stop_at:
                raise Stopped

    show = worker.Display
    worker.load_images = functools.cache(worker.load_images)  # type: ignore[assignment]
    world = joined(60)

    def train(plan: Plan, name: str, *, resume: bool) -> str:
        run = RunFolder(Path(folder) / f"{plan.method}-{name}")
        with joined_by(plan, None, world.split(f"{plan.method} {name} {resume}")) as rank:
            summary = worker._train(rank, run, resume=resume, voice=Voice())
        return summary["weights_sha256"] if summary else ""

    found = {}
    for plan in plans:
        whole = train(plan, "whole", resume=False)
        worker.Display = Stopping  # type: ignore[misc]
        with contextlib.suppress(Stopped):
            train(plan, "broken", resume=False)
        worker.Display = show  # type: ignore[misc]
        found[plan.method] = [whole, train(plan, "broken", resume=True)]
    world.close()
    return found


def make_mpi_sync_over_gloo() -> str:
    from syncline.comm.torch_backend import connect
    from syncline.sync import make_sync

    place = placement_from_environment()
    assert place is not None
    deadline = timedelta(seconds=30)
    comm = connect(place, backend="gloo", deadline=deadline)
    try:
        make_sync("mpi", comm)
    except SynclineError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        comm.close()
    return ""


def main() -> int:
    from syncline.launcher.mpi import run_ranks_mpi

    # A runner in the background may have been started with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    name, workers = sys.argv[1:3]
    try:
        run_ranks_mpi(globals()[name], workers=int(workers), log_dir=None)
    except SynclineError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
