"""EmulatedCluster: hosts on this machine, joined by shaped links, for as long as the `with` block lasts.

    with EmulatedCluster(2, [1e9, 1e8]) as cluster:
        process = cluster.popen(1, ["python", "script.py"])
        process.wait()

Each host has a network, a name, processes and shared memory of its own. They are namespaces without names, held only
by their processes, and those end with this one even if it is killed: nothing can be left behind, and two clusters
never meet. Root is not needed where the kernel allows user namespaces.

This is the launcher's side. `switch.py` is the process that makes and joins the hosts, `host.py` the first process of
a host, `network.py` the links, `namespaces.py` the system calls.
"""

from __future__ import annotations

import math
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Self

from syncline.errors import HostError, SynclineError, UsageError
from syncline.launcher.emulation.network import (
    INTERFACE,
    check_hosts,
    check_rate,
    host_address,
    host_name,
    parse_links,
)
from syncline.launcher.starting import packed
from syncline.launcher.wire import receive_frame, send_frame, unpack
from syncline.machine import signal_name

__all__ = ["EmulatedCluster", "HostProcess", "parse_links"]

_PACKAGES = str(Path(__file__).parents[3])
_SWITCH = f"""
import sys
sys.path.append({_PACKAGES!r})
from syncline.launcher.emulation.switch import main
main(sys.argv[1:])
"""
_END_SECONDS = 10.0


class EmulatedCluster:
    """`links` are rates in bits per second, one for each host (see `parse_links`). `preload` names modules that are
    loaded once, before the hosts are made; functions that run on them (see `call`) then need not load them."""

    def __init__(self, hosts: int, links: Sequence[float], *, preload: Sequence[str] = ()) -> None:
        check_hosts(hosts)
        if len(links) != hosts:
            raise UsageError(f"{len(links)} links for {hosts} hosts.", action="Give one rate for each host.")
        for rate in links:
            check_rate(rate)
        if not sys.platform.startswith("linux"):
            raise UsageError(f"cannot emulate hosts on {sys.platform}.", action="Use Linux.")
        self.num_hosts = hosts
        self.links = list(links)
        self._preload = tuple(preload)
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self._switch: subprocess.Popen[bytes] | None = None
        self._processes: list[HostProcess] = []

    def __enter__(self) -> Self:
        pairs = [socket.socketpair() for _ in range(1 + self.num_hosts)]
        self._connections = [ours for ours, _ in pairs]
        theirs = [connection.fileno() for _, connection in pairs]
        words = [self.num_hosts, *theirs, *self.links, *self._preload]
        command = [sys.executable, "-P", "-c", _SWITCH, *map(str, words)]  # -P: nothing of the current folder
        try:
            # A session of its own: Ctrl-C is for the launcher, which then ends the hosts in good order.
            self._switch = subprocess.Popen(
                command, pass_fds=theirs, stdin=subprocess.DEVNULL, start_new_session=True
            )
            for _, connection in pairs:
                connection.close()
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process on every host, at once, and wait until they are gone."""
        for connection in self._connections:
            connection.close()
        self._connections = []
        if self._switch is not None:
            try:
                self._switch.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._switch.kill()
                self._switch.wait()
            self._switch = None
        for process in self._processes:
            process.wait()
        self._processes = []

    @property
    def interface(self) -> str:
        """The name of a host's link, the same on each."""
        return INTERFACE

    def address(self, host: int) -> str:
        return host_address(host)

    def name(self, host: int) -> str:
        """Also resolves to the host's address, on each of them."""
        return host_name(host)

    def popen(
        self, host: int, command: Sequence[str | os.PathLike[str]], *, env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None, stdin: Any = None, stdout: Any = None, stderr: Any = None,
    ) -> HostProcess:  # fmt: skip
        """Start a program on a host. Output goes where ours goes unless said otherwise; input is empty.

        `stdin`, `stdout`, `stderr` are files, descriptors, or subprocess's PIPE, DEVNULL and STDOUT. Gloo uses
        the host's link, whatever the environment says about interfaces outside.
        """
        words = [os.fspath(word) for word in command]
        return self._start(host, words, {"command": words}, Streams(stdin, stdout, stderr), env, cwd)

    def call(
        self, host: int, function: Callable[..., Any], *args: Any, env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None, stdin: Any = None, stdout: Any = None, stderr: Any = None,
    ) -> HostProcess:  # fmt: skip
        """Start a Python function on a host; `result()` of what this returns waits for its value or error.

        It runs in a process of its own, forked from one that has loaded what `preload` names. Function, arguments and
        result are pickled by cloudpickle. The exit code is 0, that of the SynclineError it raised, or 1.
        `env` is the whole environment, as with `popen`.
        """
        name = getattr(function, "__qualname__", repr(function))
        payload = packed(function, args)
        answer = os.memfd_create("syncline-answer")
        try:
            streams = Streams(stdin, stdout, stderr)
            return self._start(host, [name], {"path": sys.path}, streams, env, cwd, payload, answer)
        except BaseException:
            os.close(answer)
            raise

    def _start(
        self, host: int, words: list[str], order: dict[str, Any], streams: Streams, env: Mapping[str, str] | None,
        cwd: str | os.PathLike[str] | None, payload: bytes = b"", answer: int | None = None,
    ) -> HostProcess:  # fmt: skip
        request = {
            "do": "start",
            **order,
            "environment": {**(os.environ if env is None else env), "GLOO_SOCKET_IFNAME": INTERFACE},
            "folder": os.fspath(cwd) if cwd is not None else os.getcwd(),
        }
        ours, theirs = socket.socketpair()
        try:
            files = [streams.stdin, streams.stdout, streams.stderr, theirs.fileno()]
            with self._lock, _explained(host):
                send_frame(self._host(host), request, payload, files if answer is None else [*files, answer])
        except BaseException:
            ours.close()
            raise
        finally:
            streams.close_theirs()
            theirs.close()
        with _explained(host):
            process = started(host, words, ours, answer)
        for name, file in streams.ours.items():
            setattr(process, name, file)
        self._processes = [running for running in self._processes if running.returncode is None] + [process]
        return process

    def kill(self, host: int) -> None:
        """End all programs on a host at once, as a crash would. The host itself stays, and can start new ones."""
        with self._lock, _explained(host):
            send_frame(self._host(host), {"do": "kill"})
            receive_frame(self._host(host))

    def cut(self, host: int) -> None:
        """Pull the cable: the host loses its carrier, and nothing passes in either direction."""
        self._ask_switch({"do": "connect", "host": host, "connected": False})

    def restore(self, host: int) -> None:
        self._ask_switch({"do": "connect", "host": host, "connected": True})

    def set_rate(self, host: int, bits_per_s: float) -> None:
        """Change the rate of a host's link in both directions, also while it is in use."""
        check_rate(bits_per_s)
        self._ask_switch({"do": "rate", "host": host, "bits_per_s": bits_per_s})

    def counters(self, host: int) -> dict[str, int]:
        """`sent_bytes`, `received_bytes` and `dropped_packets` of the host's link since it was made."""
        return self._ask_switch({"do": "counters", "host": host})

    def _ask_switch(self, request: dict[str, Any]) -> dict[str, Any]:
        self._host(request["host"])
        with self._lock:
            with suppress(ConnectionError):
                send_frame(self._connections[0], request)
            answer = receive_frame(self._connections[0])
        if answer is None:
            raise SynclineError("the switch of the emulated cluster has ended, and with it all links.")
        return answer.message

    def _host(self, host: int) -> socket.socket:
        """The connection to a host's first process."""
        if not 0 <= host < self.num_hosts:
            raise IndexError(f"there is no host {host}")
        if not self._connections:
            raise SynclineError("the emulated cluster has ended.")
        return self._connections[1 + host]

    def _wait_until_ready(self) -> None:
        answer = receive_frame(self._connections[0])
        if answer is None:
            raise SynclineError("the emulated cluster ended before it was ready.")
        if "refused" in answer.message:
            raise UsageError(answer.message["refused"], action=answer.message["action"])


@contextmanager
def _explained(host: int) -> Iterator[None]:
    """A broken connection to a host's first process means that the host has ended."""
    try:
        yield
    except ConnectionError as error:
        raise SynclineError(f"{host_name(host)} has ended.") from error


class HostProcess:
    """`stdout` and `stderr` are binary files where a pipe was asked for, else None. Any thread may call its methods;
    none of them depends on the thread that started the program."""

    def __init__(
        self, host: int, command: list[str], status: socket.socket, process: int, answer: int | None
    ) -> None:
        self.host = host
        self.args = command
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None
        self.returncode: int | None = None
        self.ended = math.inf
        """When it ended, on the monotonic clock of all hosts, once `poll` or `wait` have seen it."""
        self._status = status
        self._process = process
        self._answer_file = answer
        self._answer = b""
        self._lock = threading.Lock()
        line = re.search(r"^Pid:\s*(-?\d+)", Path(f"/proc/self/fdinfo/{process}").read_text(), re.MULTILINE)
        self.pid = int(line[1]) if line else -1
        """As seen from outside the host; inside, processes have numbers of their own."""

    def fileno(self) -> int:
        """Readable when the program has ended: for select and poll."""
        return self._status.fileno()

    def poll(self) -> int | None:
        """The exit code, or None while it runs; negative for a signal."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not _readable(self._status, left):
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            with self._lock:
                if self.returncode is None:
                    self._take_exit_code()
        return self.returncode

    def result(self, timeout: float | None = None) -> Any:
        """What the function that `call` started has returned, once it ends; raises what it raised."""
        code, name = self.wait(timeout), host_name(self.host)
        if code < 0:
            raise HostError(f"{name} was killed by {signal_name(-code)}.")
        if not self._answer:
            raise HostError(f"{name} ended with exit code {code} before it returned a result.")
        returned, value = unpack(self._answer)
        if returned:
            return value
        raise value

    def send_signal(self, number: int) -> None:
        """To this program alone. Nothing happens if it has ended already."""
        with self._lock, suppress(ProcessLookupError):
            if self.returncode is None:
                signal.pidfd_send_signal(self._process, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Let go of it; the program itself is not touched."""
        for file in (self.stdin, self.stdout, self.stderr):
            if file is not None:
                file.close()

    def _take_exit_code(self) -> None:
        frame = receive_frame(self._status)
        if self._answer_file is not None:
            self._answer = os.pread(self._answer_file, os.fstat(self._answer_file).st_size, 0)
            os.close(self._answer_file)
        # The host's first process tells of every end; where it could not, it has been killed with all the rest.
        end = frame.message if frame is not None else {"exit_code": -signal.SIGKILL, "time": time.monotonic()}
        self.ended = float(end["time"])
        self.returncode = int(end["exit_code"])
        self._status.close()
        os.close(self._process)


def started(host: int, command: list[str], status: socket.socket, answer: int | None) -> HostProcess:
    """What the host says to a request to start something."""
    frame = receive_frame(status, 1)
    if frame is None:
        status.close()
        raise BrokenPipeError(f"{host_name(host)} has ended")
    if "errno" in frame.message:
        status.close()
        raise OSError(frame.message["errno"], frame.message["message"], frame.message["file"])
    return HostProcess(host, command, status, frame.descriptors[0], answer)


class Streams:
    """The three standard files of a program that is about to start: descriptors for it, pipe ends for us."""

    def __init__(self, stdin: Any, stdout: Any, stderr: Any) -> None:
        self._to_close: list[int] = []
        self.ours: dict[str, IO[bytes]] = {}
        self.stdin = self._file("stdin", stdin)
        self.stdout = self._file("stdout", stdout, 1)
        self.stderr = self.stdout if stderr == subprocess.STDOUT else self._file("stderr", stderr, 2)

    def close_theirs(self) -> None:
        for descriptor in self._to_close:
            os.close(descriptor)

    def _file(self, name: str, stream: Any, inherited: int | None = None) -> int:
        """A descriptor for the program: the stream that the caller gave, else our own (`inherited`), else nothing."""
        if stream == subprocess.PIPE:
            reading, writing = os.pipe()
            theirs, ours, mode = (reading, writing, "wb") if name == "stdin" else (writing, reading, "rb")
            self.ours[name] = os.fdopen(ours, mode)
        elif stream is None and inherited is not None:
            return inherited
        elif stream is None or stream == subprocess.DEVNULL:
            theirs = os.open(os.devnull, os.O_RDWR)
        else:
            return stream if isinstance(stream, int) else int(stream.fileno())
        self._to_close.append(theirs)
        return theirs


def _readable(connection: socket.socket, seconds: float | None) -> bool:
    poll = select.poll()  # select itself knows no descriptor above 1023
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(None if seconds is None else seconds * 1000))
