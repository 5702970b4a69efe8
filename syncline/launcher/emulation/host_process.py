"""A program or function that runs on an emulated host, seen from the launcher. Much like subprocess.Popen."""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import IO, Any

from syncline.errors import HostError
from syncline.launcher.emulation.network import host_name
from syncline.launcher.wire import receive_frame, unpack


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
        self.pid = _pid_of(process)
        """As seen from outside the host; inside, processes have numbers of their own."""

    def fileno(self) -> int:
        """Readable when the program has ended: for select and poll."""
        return self._status.fileno()

    def poll(self) -> int | None:
        """The exit code, or None while it runs; negative for a signal."""
        with contextlib.suppress(subprocess.TimeoutExpired):
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
            raise HostError(f"{name} was killed by {signal.Signals(-code).name}.")
        if not self._answer:
            raise HostError(f"{name} ended with exit code {code} before it had a result.")
        returned, value = unpack(self._answer)
        if returned:
            return value
        raise value

    def send_signal(self, number: int) -> None:
        """To this program alone. Nothing happens if it has ended already."""
        with self._lock, contextlib.suppress(ProcessLookupError):
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

    def _file(self, name: str, given: Any, inherited: int | None = None) -> int:
        """A descriptor for the program: what was given, else our own (`inherited`), else nothing."""
        if given == subprocess.PIPE:
            reading, writing = os.pipe()
            theirs, ours, mode = (reading, writing, "wb") if name == "stdin" else (writing, reading, "rb")
            self.ours[name] = os.fdopen(ours, mode)
        elif given is None and inherited is not None:
            return inherited
        elif given is None or given == subprocess.DEVNULL:
            theirs = os.open(os.devnull, os.O_RDWR)
        else:
            return given if isinstance(given, int) else int(given.fileno())
        self._to_close.append(theirs)
        return theirs


def _readable(connection: socket.socket, seconds: float | None) -> bool:
    poll = select.poll()  # select itself knows no descriptor above 1023
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(None if seconds is None else seconds * 1000))


def _pid_of(process: int) -> int:
    line = re.search(r"^Pid:\s*(-?\d+)", Path(f"/proc/self/fdinfo/{process}").read_text(), re.MULTILINE)
    return int(line[1]) if line else -1
