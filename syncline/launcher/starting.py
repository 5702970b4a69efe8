"""What every way to start ranks needs: checks, the function as a pickle, a folder, a socket, stop signals, and the
process that ranks are forked from. That one has loaded torch already, so a rank starts in milliseconds."""

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
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.errors import Interrupted, UsageError
from syncline.launcher import watch
from syncline.launcher.outcome import forget_outcomes
from syncline.launcher.wire import pack

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"
DEFAULT_PRELOAD = (
    "torch", "torch.distributed", "numpy", "cloudpickle", "syncline.launcher.rank_life", "syncline.launcher.quick_end"
)  # fmt: skip
_LAUNCHER_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
_STORE_TIMEOUT = timedelta(minutes=5)
_LONGEST_BASE = 70
"""Bytes of a folder in which sockets can have names: a socket's path may have about 100, on macOS 103."""

_main_module_lock = threading.Lock()


def check_numbers(workers: int, threads: int | None) -> None:
    if workers < 1:
        raise UsageError(f"Cannot run {workers} workers.", action="Use at least one worker.")
    if threads is not None and threads < 1:
        raise UsageError(f"Cannot run workers with {threads} threads.", action="Use at least one thread.")
    if "forkserver" not in multiprocessing.get_all_start_methods():
        raise UsageError(
            f"Cannot start workers on {sys.platform}, which has no fork server.",
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
            f"Port {port} is out of range.", action="Choose one from 1 to 65535, or 0 for any free port."
        ) from None
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        why = "is in use" if error.errno == errno.EADDRINUSE else "is reserved for privileged users"
        raise UsageError(f"Port {port} {why}.", action="Choose another, or 0 for any free port.") from error


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
    signals: list[int] = []
    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (getattr(signal, name) for name in _LAUNCHER_SIGNALS):
            # A signal that was ignored (nohup) stays ignored; a handler set by C code cannot be put back.
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                previous[number] = signal.signal(number, lambda caught, _frame: signals.append(caught))
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def raise_if_interrupted(signals: list[int]) -> None:
    if signals:
        raise Interrupted(f"Stopped by {signal_words(signals[0])}; every rank has ended.")


def signal_words(number: int) -> str:
    name = signal.Signals(number).name
    return "Ctrl-C" if name == "SIGINT" else name


def start_fork_server(preload: Sequence[str] = ()) -> None:
    """Start the process that ranks are forked from, if it does not run yet; it ends with this process.

    Worth calling early, before importing torch: it imports torch meanwhile. It is started with the stop signals
    blocked, so that a Ctrl-C ends it and young ranks without a traceback.
    """
    _choose_socket_folder()
    multiprocessing.set_forkserver_preload([*DEFAULT_PRELOAD, *preload])
    # The tracker unblocks signals when it starts, so it has to run before they are blocked.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watch.STOP_SIGNALS)
    safe_path = os.environ.get("PYTHONSAFEPATH")
    # Without this the server would take modules from the current folder before the real ones.
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        forkserver.ensure_running()
    except OSError as error:
        if "AF_UNIX path too long" not in str(error):
            raise
        raise UsageError(
            f"the path {get_temp_dir()} is too long for the ranks' sockets.",
            action="Set TMPDIR to a shorter path.",
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.environ.pop("PYTHONSAFEPATH")
        if safe_path is not None:
            os.environ["PYTHONSAFEPATH"] = safe_path


def wait_for_fork_server() -> None:
    """Returns when it has loaded what it preloads, and can fork a rank at once."""
    first = multiprocessing.get_context("forkserver").Process(target=os.getpid, daemon=True)
    with main_module_hidden():
        first.start()
    first.join()


def _choose_socket_folder() -> None:
    """Python makes one private folder for a process's sockets when it is first asked for it, and removes it at the
    end; ranks use the same one."""
    usual, tempfile.tempdir = tempfile.gettempdir(), base_for_sockets()
    try:
        get_temp_dir()
    finally:
        tempfile.tempdir = usual


@contextlib.contextmanager
def main_module_hidden() -> Iterator[None]:
    """Keep ranks from running the user's script again: what they need of it comes by value with the task.

    So a script needs no `if __name__ == "__main__"` guard, and a rank does not repeat its slow imports.
    """
    with _main_module_lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main
