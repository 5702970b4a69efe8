"""A Python function on an emulated host, in a process that is forked from the host's first one.

The order (function and arguments) and the answer (what it returned or raised) travel in one anonymous file: whatever
ends the process, the launcher never waits for the rest of a message.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from syncline.errors import HostError, RankFailed, SynclineError
from syncline.launcher.emulation.links import host_name
from syncline.launcher.emulation.namespaces import drop_privileges
from syncline.launcher.wire import pack, unpack

_ORDER = 3


def write_order(function: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """A descriptor for `cluster.call` to send."""
    descriptor = os.memfd_create("syncline-order")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(pack((function, args)))
    return descriptor


def read_answer(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def result_of(answer: bytes, exit_code: int, host: int) -> Any:
    """What the function returned; raises what it raised."""
    if exit_code < 0:
        raise HostError(f"{host_name(host)} was killed by {signal.Signals(-exit_code).name}.")
    if not answer:
        raise HostError(f"{host_name(host)} ended with exit code {exit_code} before it had a result.")
    returned, value = unpack(answer)
    if returned:
        return value
    raise value


def run_order(host: int, request: dict[str, Any], streams: Sequence[int], order: int) -> NoReturn:
    """Turn this copy of the host's first process into one of its own, and run the order."""
    exit_code = 1
    try:
        _settle(request, streams, order)
        with open(_ORDER, "r+b") as file:
            file.seek(0)
            data = file.read()
            file.seek(0)
            file.truncate()
            answer, exit_code = _answer(data, host)
            file.write(answer)
        _wind_down()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(exit_code)


def _settle(request: dict[str, Any], streams: Sequence[int], order: int) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    drop_privileges()
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    os.dup2(order, _ORDER, inheritable=False)
    os.closerange(_ORDER + 1, os.sysconf("SC_OPEN_MAX"))
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:] = request["path"]
    tempfile.tempdir = None  # the environment may name another folder
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]


def _answer(data: bytes, host: int) -> tuple[bytes, int]:
    """What the launcher will read, and the exit code."""
    try:
        function, args = unpack(data)
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


def _wind_down() -> None:
    """What the interpreter does at the end of a script: wait for threads, then run exit functions."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
