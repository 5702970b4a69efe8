"""The first process of an emulated host: starts programs and Python functions there and tells how they ended.

It is process 1 of the host's own pid namespace. When it ends, for whatever reason, the kernel ends everything else on
the host; and it ends with the launcher and with the switch. So nothing on a host can outlive its cluster.

Functions run in copies of it, made by fork: they share the memory of what the switch loaded before it made the hosts,
where a fresh interpreter would load all of it again.
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from syncline.errors import RankFailed, SynclineError
from syncline.launcher.emulation.namespaces import (
    drop_privileges,
    keep_mounts_private,
    mount_file,
    mount_fresh,
    quieten_ipv6,
)
from syncline.launcher.emulation.network import host_address, host_name
from syncline.launcher.rank_life import wind_down
from syncline.launcher.wire import Frame, pack, receive_frame, send_frame, unpack
from syncline.machine import cores

MOST_DESCRIPTORS = 5
"""With a request to start something: input, output, errors, the status connection, and a file for the answer."""
_ANSWER = 3
SHARED_MEMORY = "/dev/shm"
_FORKED = ("from multiprocessing.forkserver import main", "from multiprocessing.resource_tracker import main")
_run_in_fresh_interpreter = multiprocessing.util.spawnv_passfds


def furnish(host: int, num_hosts: int) -> None:
    """A name, processes, names of the other hosts and shared memory of its own."""
    _take_own_cores(host, num_hosts)
    socket.sethostname(host_name(host))
    keep_mounts_private()
    mount_fresh("proc", "/proc")
    mount_fresh("tmpfs", SHARED_MEMORY)
    _name_the_hosts(num_hosts)
    quieten_ipv6()


def _take_own_cores(host: int, num_hosts: int) -> None:
    """As real hosts do: where there is a core for each, what one of them computes or sends slows down no other."""
    each = cores() // num_hosts
    if each:
        own = sorted(os.sched_getaffinity(0))[host * each : (host + 1) * each]
        os.sched_setaffinity(0, own)


def _name_the_hosts(num_hosts: int) -> None:
    """An /etc/hosts of its own: `host0` is found by name, and nobody asks a name server that cannot be reached."""
    names_by_address = {"127.0.0.1": "localhost"} | {host_address(host): host_name(host) for host in range(num_hosts)}
    # With the prefix is how torch asks for the name that belongs to an address.
    lines = [f"{prefix}{address} {name}" for address, name in names_by_address.items() for prefix in ("", "::ffff:")]
    names = Path(SHARED_MEMORY, "hosts")
    names.write_text("\n".join(lines) + "\n")
    with contextlib.suppress(OSError):  # a machine without the file has no use for it
        mount_file(str(names), "/etc/hosts")
    mount_fresh("tmpfs", SHARED_MEMORY)


class Keeper:
    """Serves the launcher's requests on `control` until that, or one of the `watched` processes, ends."""

    def __init__(self, host: int, control: socket.socket, watched: Sequence[int]) -> None:
        self._host = host
        self._control = control
        self._watched = watched
        self._children: dict[int, socket.socket] = {}

    def run(self) -> None:
        woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        for descriptor in (woken, self._control.fileno(), *self._watched):
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if ready & set(self._watched):
                return
            if woken in ready:
                os.read(woken, 4096)
                self._reap()
            if self._control.fileno() in ready and not self._serve():
                return

    def _serve(self) -> bool:
        request = receive_frame(self._control, MOST_DESCRIPTORS)
        if request is None:
            return False
        if request.message["do"] == "start":
            self._start(request)
        elif request.message["do"] == "kill":
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # everything on this host except this process
            send_frame(self._control, {})
        return True

    def _start(self, request: Frame) -> None:
        status = socket.socket(fileno=request.descriptors.pop(3))
        try:
            pid = _execute(request) if "command" in request.message else self._fork(request)
        except OSError as error:
            refusal = {"errno": error.errno, "message": error.strerror, "file": str(error.filename)}
            with status, contextlib.suppress(OSError):
                send_frame(status, refusal)
        else:
            self._children[pid] = status
            process = os.pidfd_open(pid)
            with contextlib.suppress(OSError):
                send_frame(status, {"pid": pid}, descriptors=[process])
            os.close(process)
        finally:
            for descriptor in request.descriptors:
                os.close(descriptor)

    def _fork(self, request: Frame) -> int:
        pid = os.fork()
        if pid == 0:
            _run_function(self._host, request)
        return pid

    def _reap(self) -> None:
        """Our own children, and the orphans of others that the kernel hands to process 1."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._children:
                ended = {"exit_code": os.waitstatus_to_exitcode(status), "time": time.monotonic()}
                with self._children.pop(pid) as connection, contextlib.suppress(OSError):
                    send_frame(connection, ended)


def _execute(request: Frame) -> int:
    stdin, stdout, stderr = request.descriptors
    message = request.message
    child = subprocess.Popen(
        message["command"], env=message["environment"], cwd=message["folder"],
        stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True,
    )  # fmt: skip
    child.returncode = 0  # the keeper reaps it, with all others
    return child.pid


def _run_function(host: int, request: Frame) -> NoReturn:
    """Turn this copy of the host's first process into one of its own, and run the function that came along.

    The answer goes into a file without a name, which the launcher reads when this process has ended: whatever ends
    it, nobody waits for the rest of a message.
    """
    exit_code = 1
    try:
        _settle(request)
        answer, exit_code = _call(host, request.payload)
        with open(_ANSWER, "wb") as file:
            file.write(answer)
        wind_down()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(exit_code)


def _settle(request: Frame) -> None:
    """What an exec would do, and what is new for the process."""
    signal.set_wakeup_fd(-1)
    os.setsid()
    drop_privileges()
    for number, descriptor in enumerate(request.descriptors):
        os.dup2(descriptor, number, inheritable=number != _ANSWER)
    _leave_behind([_ANSWER])
    os.chdir(request.message["folder"])
    os.environ.clear()
    os.environ.update(request.message["environment"])
    sys.path[:] = request.message["path"]
    tempfile.tempdir = None  # the environment may name another folder
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    multiprocessing.util.spawnv_passfds = _fork_helper  # type: ignore[assignment]


def _leave_behind(keep: Sequence[int]) -> None:
    """Close all other files but the standard ones, and let signals do again what they do by default."""
    begin = 3
    for descriptor in sorted(keep):
        if descriptor > begin:
            os.closerange(begin, descriptor)
        begin = max(begin, descriptor + 1)
    os.closerange(begin, os.sysconf("SC_OPEN_MAX"))
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _call(host: int, payload: bytes) -> tuple[bytes, int]:
    """What the launcher will read, and the exit code."""
    try:
        function, args = unpack(payload)
        return pack((True, function(*args))), 0
    except SystemExit as leaving:
        if not leaving.code:
            return pack((True, None)), 0
        if isinstance(leaving.code, int):
            return b"", leaving.code
        print(leaving.code, file=sys.stderr)
        return b"", 1
    except KeyboardInterrupt:
        return b"", 128 + signal.SIGINT
    except SynclineError as error:
        error.host = error.host or host_name(host)
        return pack((False, error)), error.exit_code
    except BaseException as error:
        words = "".join(traceback.format_exception_only(error)).strip()
        failed = RankFailed(f"failed on {host_name(host)}: {words}", traceback_text=traceback.format_exc())
        return pack((False, failed)), 1


def _fork_helper(path: Any, args: Any, keep: Any) -> int:
    """multiprocessing's fork server and tracker as copies of this process too, where it has no other threads.

    So the ranks of a host share memory with those of all hosts. A fork copies one thread only, and locks as they are:
    with several, a fresh interpreter is the safe way.
    """
    if not args[-1].startswith(_FORKED) or len(os.listdir("/proc/self/task")) > 1:
        return int(_run_in_fresh_interpreter(path, args, keep))
    pid = os.fork()
    if pid == 0:
        exit_code = 1
        try:
            _leave_behind(keep)
            exec(args[-1], {})
            exit_code = 0
        except SystemExit:
            exit_code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(exit_code)
    return pid
