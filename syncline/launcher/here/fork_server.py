"""The process that ranks are forked from: it has loaded torch already, and a rank starts in milliseconds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import types
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.util import get_temp_dir

from syncline.errors import UsageError
from syncline.launcher import watch
from syncline.launcher.starting import base_for_sockets

DEFAULT_PRELOAD = ("torch", "torch.distributed", "numpy", "cloudpickle", "syncline.launcher.rank_life")

_main_module_lock = threading.Lock()


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
            f"ranks cannot be reached through {get_temp_dir()}: the path is too long for a socket.",
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
