"""The first process of an emulated host: starts programs there and tells how they ended.

It is process 1 of the host's own pid namespace. When it ends, for whatever reason, the kernel ends everything else on
the host; and it ends with the launcher and with the switch. So nothing on a host can outlive its cluster.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from syncline.launcher.emulation import messages
from syncline.launcher.emulation.calling import run_order
from syncline.launcher.emulation.links import host_address, host_name
from syncline.launcher.emulation.namespaces import keep_mounts_private, mount_file, mount_fresh, quieten_ipv6

_SHARED_MEMORY = "/dev/shm"


def furnish(host: int, num_hosts: int) -> None:
    """A name, processes, names of the other hosts and shared memory of its own."""
    socket.sethostname(host_name(host))
    keep_mounts_private()
    mount_fresh("proc", "/proc")
    mount_fresh("tmpfs", _SHARED_MEMORY)
    _name_the_hosts(num_hosts)
    quieten_ipv6()


def _name_the_hosts(num_hosts: int) -> None:
    """An /etc/hosts of its own: `host0` is found by name, and nobody asks a name server that cannot be reached."""
    lines = ["127.0.0.1 localhost"]
    for host in range(num_hosts):
        # The second is how torch asks for the name that belongs to an address.
        lines += [f"{prefix}{host_address(host)} {host_name(host)}" for prefix in ("", "::ffff:")]
    names = Path(_SHARED_MEMORY, "hosts")
    names.write_text("\n".join(lines) + "\n")
    with contextlib.suppress(OSError):  # a machine without the file has no use for it
        mount_file(str(names), "/etc/hosts")
    mount_fresh("tmpfs", _SHARED_MEMORY)


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
        request, descriptors = messages.receive(self._control)
        if request is None:
            return False
        if request["do"] == "start":
            self._start(request, descriptors)
        elif request["do"] == "kill":
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # everything on this host except this process
            messages.send(self._control, {})
        return True

    def _start(self, request: dict[str, Any], descriptors: list[int]) -> None:
        streams, status = descriptors[:3], socket.socket(fileno=descriptors[3])
        try:
            pid = _execute(request, streams) if "command" in request else self._fork(request, streams, descriptors[4])
        except OSError as error:
            told = {"errno": error.errno, "message": error.strerror, "file": str(error.filename)}
            with status, contextlib.suppress(OSError):
                messages.send(status, told)
        else:
            self._children[pid] = status
            process = os.pidfd_open(pid)
            with contextlib.suppress(OSError):
                messages.send(status, {"pid": pid}, [process])
            os.close(process)
        finally:
            for descriptor in (*streams, *descriptors[4:]):
                os.close(descriptor)

    def _fork(self, request: dict[str, Any], streams: list[int], order: int) -> int:
        """A copy of this process, with all that it has loaded, in place of a fresh interpreter."""
        pid = os.fork()
        if pid == 0:
            run_order(self._host, request, streams, order)
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
                with self._children.pop(pid) as connection, contextlib.suppress(OSError):
                    messages.send(connection, {"exit_code": os.waitstatus_to_exitcode(status)})


def _execute(request: dict[str, Any], streams: list[int]) -> int:
    stdin, stdout, stderr = streams
    child = subprocess.Popen(
        request["command"], env=request["environment"], cwd=request["folder"],
        stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True,
    )  # fmt: skip
    child.returncode = 0  # the keeper reaps it itself, with all others
    return child.pid
