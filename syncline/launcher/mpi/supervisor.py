"""Between mpiexec and a rank: a small process that starts the rank, notes how it ended, and ends it when asked.

mpiexec ends every rank as soon as one ends badly, some kinds at once and by force, and then nobody can tell who was
first. So mpiexec gets to see this process instead, which stays until the launcher has looked. It also ends its rank
when the launcher is gone, whatever the rank is doing: while MPI starts, no other thread of the rank runs, so the rank
cannot watch the launcher itself. And it removes what MPI keeps in /dev/shm for a rank that could not do so.

For the same reason no rank can keep a deadline for MPI's start: it notes when it begins and when it has come through,
and the launcher looks at the clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from syncline.errors import RankFailed, UsageError
from syncline.files import write_atomic
from syncline.launcher import watch
from syncline.launcher.adopt import LAUNCHER_VARIABLE, placement_from_environment
from syncline.launcher.outcome import Ending
from syncline.launcher.rank_life import Task, Terminal, is_open, live
from syncline.launcher.wire import receive_frame, send_frame
from syncline.machine import end_with

TASK, TERMINAL = "task", "terminal"
"""In the launcher's folder: what ranks are to do, and the socket at which rank 0 asks for the terminal."""
START_VARIABLE = "SYNCLINE_MPI_START"
"""Names the file in which a rank notes how far it has come into MPI."""
STORE_VARIABLE = "SYNCLINE_MPI_STORE"
"""The port of the launcher's store."""
STOP_SECONDS = 5.0
_LOOK_SECONDS = 0.05
_MAPS_SECONDS = 0.1
_OTHERS_SECONDS = 0.5
"""How long the first supervisor to leave a dead launcher waits: mpiexec may then end the others at once."""
_SEGMENTS = re.compile(r"/dev/shm/(?:mpich_shm|sm_segment|vader_segment|ucx_shm|open_mpi)[^\s/]*$", re.MULTILINE)


class Supervisor:
    def __init__(self, task: Task, rank: int, live: Callable[[], object]) -> None:
        """`live` is the rank's life, in a process of its own."""
        self._task = task
        self._rank = rank
        self._log_dir = Path(task.log_dir)
        self._live = live
        self._stop_requested = False
        self._parent = os.getppid()
        self._asked_at: float | None = None
        self._forced = False
        self._segments: list[str] = []
        self._look_at_maps = 0.0

    def run(self) -> None:
        """Returns when the rank has ended and the launcher has seen it."""
        write_json(supervisor_path(self._log_dir, self._rank), asdict(watch.identify(os.getpid())))
        pid = self._start()
        launcher_alive = watch.alive_check(self._task.launcher)
        code = self._see_to_its_end(pid, launcher_alive)
        _remove(self._segments)
        ending = Ending(code, time.time(), self._asked_at is not None, self._forced)
        write_json(ending_path(self._log_dir, self._rank), asdict(ending))
        # Even if all is well: to MPICH's mpiexec the first process that ends means the end of all.
        while not self._must_stop(launcher_alive):
            time.sleep(_LOOK_SECONDS)
        if not launcher_alive():
            time.sleep(_OTHERS_SECONDS)
            for folder in self._task.leftovers:
                shutil.rmtree(folder, ignore_errors=True)

    def _start(self) -> int:
        # Nothing may arrive between the fork and the moment at which each side knows what to do with it.
        signal.pthread_sigmask(signal.SIG_BLOCK, watch.STOP_SIGNALS)
        supervisor = os.getpid()
        pid = os.fork()
        if pid == 0:
            # Some kinds of mpiexec send signals to whole groups; this one is the supervisor's to end.
            os.setsid()
            end_with(supervisor)
            self._live()
            os._exit(1)
        for number in watch.STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watch.STOP_SIGNALS)
        return pid

    def _note(self, *_: object) -> None:
        self._stop_requested = True

    def _see_to_its_end(self, pid: int, launcher_alive: Callable[[], bool]) -> int:
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            must_stop = self._must_stop(launcher_alive)
            self._find_segments(pid, must_stop=must_stop)
            if must_stop:
                self._end(pid)
            time.sleep(_LOOK_SECONDS)

    def _must_stop(self, launcher_alive: Callable[[], bool]) -> bool:
        """Asked to, or alone: without the launcher, or without mpiexec's own process."""
        return self._stop_requested or not launcher_alive() or os.getppid() != self._parent

    def _end(self, pid: int) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            os.kill(pid, signal.SIGTERM)
            _remove(self._segments)  # mpiexec may leave no time for it later
        # One that was stopped, or hangs in MPI's start, can neither answer nor save anything.
        patience = 0.0 if watch.is_stopped(pid) or self._is_starting() else STOP_SECONDS
        if now - self._asked_at >= patience and not self._forced:
            self._forced = True
            os.kill(pid, signal.SIGKILL)

    def _is_starting(self) -> bool:
        start = read_json(start_path(self._log_dir, self._rank))
        return start is not None and not start["done"]

    def _find_segments(self, pid: int, *, must_stop: bool) -> None:
        """MPI makes its shared memory when it starts: once it was seen, there is no need to look again."""
        if self._segments or (time.monotonic() < self._look_at_maps and not must_stop):
            return
        self._look_at_maps = time.monotonic() + _MAPS_SECONDS
        with contextlib.suppress(OSError):
            self._segments = sorted(set(_SEGMENTS.findall(Path(f"/proc/{pid}/maps").read_text())))
        if self._segments:
            write_json(_segments_path(self._log_dir, self._rank), self._segments)


def supervisor_path(log_dir: Path, rank: int) -> Path:
    return log_dir / "outcomes" / f"rank-{rank}.supervisor.json"


def _segments_path(log_dir: Path, rank: int) -> Path:
    return log_dir / "outcomes" / f"rank-{rank}.segments.json"


def start_path(log_dir: Path, rank: int) -> Path:
    return log_dir / "outcomes" / f"rank-{rank}.start.json"


def note_start(deadline_s: float, *, done: bool) -> bool:
    """For a rank: it goes into MPI, or has come through. False if nobody looks: it is another launcher's."""
    path = os.environ.get(START_VARIABLE)
    if path:
        write_json(Path(path), {"deadline_s": deadline_s, "done": done})
    return bool(path)


def ending_path(log_dir: Path, rank: int) -> Path:
    return log_dir / "outcomes" / f"rank-{rank}.ending.json"


def remove_segments(log_dir: Path, rank: int) -> None:
    """Named shared memory that MPI would have removed at its own end. Also for the launcher: mpiexec may kill a
    supervisor by force."""
    with contextlib.suppress(OSError, ValueError):
        _remove(json.loads(_segments_path(log_dir, rank).read_text()))


def _remove(segments: list[str]) -> None:
    for segment in segments:
        with contextlib.suppress(OSError):
            Path(segment).unlink(missing_ok=True)


def write_json(path: Path, values: object) -> None:
    """Whole or not at all; not at all if the folder is gone, because the launcher is."""
    with contextlib.suppress(OSError):
        write_atomic(path, json.dumps(values), durable=False)


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        values: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return values


def fetch_terminal(meeting: Path) -> Terminal:
    """For rank 0: the launcher's own stdout and stderr. mpiexec would only copy what comes out of a pipe."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(STOP_SECONDS)
        connection.connect(str(meeting))
        frame = receive_frame(connection, most_descriptors=2)
    if frame is None:
        raise RankFailed("the launcher ended before this rank could start.")
    return Terminal(dict(zip(frame.message["numbers"], frame.descriptors, strict=True)))


def give_terminal(connection: socket.socket) -> None:
    """The launcher's side of `fetch_terminal`."""
    numbers = [number for number in (1, 2) if is_open(number)]
    send_frame(connection, {"numbers": numbers}, descriptors=numbers)


def main(folder: str) -> None:
    """What mpiexec starts: supervise one rank."""
    order_dir = Path(folder)
    keep_within_machine()
    task, sys_path = pickle.loads((order_dir / TASK).read_bytes())
    place = placement_from_environment()
    if place is None:
        raise UsageError("mpiexec gave this process no rank.")
    rank = place.rank
    Supervisor(task, rank, lambda: _live(task, sys_path, rank, order_dir / TERMINAL)).run()


def keep_within_machine() -> None:
    """MPICH's mpiexec listens on every address for hosts that are not there, and this process inherits the socket:
    from now on only this machine reaches it. And no rank need hold it open."""
    for entry in list(Path("/proc/self/fd").iterdir()) if sys.platform == "linux" else []:
        number = int(entry.name)
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as inherited:
            if not inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            if inherited.family in (socket.AF_INET, socket.AF_INET6) and number > 2:
                inherited.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
                os.close(number)


def _live(task: Task, sys_path: list[str], rank: int, terminal: Path) -> None:
    sys.path[:] = sys_path
    environment = {
        **os.environ,
        STORE_VARIABLE: task.environment[STORE_VARIABLE],
        LAUNCHER_VARIABLE: "syncline",
        START_VARIABLE: str(start_path(Path(task.log_dir), rank)),
        "OMP_NUM_THREADS": str(task.threads),
    }
    live(replace(task, environment=environment, terminal=fetch_terminal(terminal) if rank == 0 else None))
