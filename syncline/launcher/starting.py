"""What every way to start ranks needs: checks, the function as a pickle, a folder, a socket, and signals noted."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.errors import Interrupted, UsageError
from syncline.launcher.outcome import forget_outcomes
from syncline.launcher.wire import pack

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"

_LAUNCHER_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
_STORE_TIMEOUT = timedelta(minutes=5)
_LONGEST_BASE = 70
"""Bytes of a folder in which sockets can have names: a socket's path may have about 100, on macOS 103."""


def check_numbers(workers: int, threads: int | None) -> None:
    if workers < 1:
        raise UsageError(f"{workers} workers cannot run.", action="Ask for at least one worker.")
    if threads is not None and threads < 1:
        raise UsageError(f"{threads} threads per worker cannot run.", action="Ask for at least one thread.")
    if "forkserver" not in multiprocessing.get_all_start_methods():
        raise UsageError(
            f"Workers cannot be started on {sys.platform}: it has no fork server.",
            action="Use Linux or macOS; on Windows, the Windows Subsystem for Linux.",
        )


def packed(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pack((function, args))
    except Exception as error:
        raise UsageError(
            f"The function cannot be sent to other processes: {error}",
            action="Create what cannot be pickled (locks, open files, sockets) inside the function.",
        ) from error


@contextlib.contextmanager
def log_folder(log_dir: Path | None, ranks: Iterable[int]) -> Iterator[Path]:
    """Where these ranks' outcomes and logs go, with nothing of an earlier run that could be taken for theirs."""
    folder = Path(tempfile.mkdtemp(prefix="syncline-")) if log_dir is None else log_dir.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        forget_outcomes(folder, ranks)
        yield folder
    finally:
        if log_dir is None:
            shutil.rmtree(folder, ignore_errors=True)


def base_for_sockets() -> str:
    """The folder for temporary files, or one with a shorter path where sockets could have no names in it."""
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) <= _LONGEST_BASE:
        return usual
    usable = (folder for folder in ("/tmp", "/var/tmp", "/dev/shm") if os.access(folder, os.W_OK | os.X_OK))
    return next(usable, usual)


def listening(address: str, port: int) -> socket.socket:
    """A socket that listens on one address: torch's own store would listen on every interface."""
    try:
        return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    except OverflowError:
        raise UsageError(
            f"Port {port} does not exist.", action="Ports go from 1 to 65535; 0 takes a free one."
        ) from None
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        why = "is in use" if error.errno == errno.EADDRINUSE else "may not be opened by this user"
        raise UsageError(f"Port {port} {why}.", action="Choose another one, or 0 for any free one.") from error


def make_store(listener: socket.socket) -> TCPStore:
    """A store on a socket that was bound by us."""
    # Late: the fork server loads torch meanwhile.
    from torch.distributed import TCPStore

    address, port = listener.getsockname()[:2]
    return TCPStore(
        address,
        int(port),
        is_master=True,
        timeout=_STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


@contextlib.contextmanager
def signals_noted() -> Iterator[list[int]]:
    """Note stop signals instead of dying of them, and put the previous handlers back afterwards."""
    noted: list[int] = []
    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (getattr(signal, name) for name in _LAUNCHER_SIGNALS):
            # A signal that was ignored (nohup) stays ignored; a handler set by C code cannot be put back.
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                previous[number] = signal.signal(number, lambda caught, _frame: noted.append(caught))
    try:
        yield noted
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def raise_if_interrupted(noted: list[int]) -> None:
    if noted:
        raise Interrupted(f"Stopped by {signal_words(noted[0])}; every rank has ended.")


def signal_words(number: int) -> str:
    name = signal.Signals(number).name
    return "Ctrl-C" if name == "SIGINT" else name
