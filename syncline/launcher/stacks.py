"""A rank's Python stacks on demand, in a file: the system writes them even while C code holds the interpreter.

The signal is a real-time one, because scripts use SIGUSR1 and SIGUSR2 for themselves."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from pathlib import Path
from typing import TextIO

SIGNAL = signal.SIGRTMAX - 1 if hasattr(signal, "SIGRTMAX") else None
"""One below that of launcher/watch.py."""

_file: list[TextIO] = []


def write_on_signal(log_dir: Path, rank: int) -> None:
    """From now on this process writes all its stacks to `log_dir/rank-N.stack.log` when it gets the signal."""
    if SIGNAL is None:
        return
    with contextlib.suppress(OSError):  # a full disk: there is no file then, and nobody sends the signal
        log_dir.mkdir(parents=True, exist_ok=True)
        file = (log_dir / f"rank-{rank}.stack.log").open("w")
        faulthandler.register(SIGNAL, file, all_threads=True)
        _file[:] = [file]


def file_here() -> Path | None:
    """Where this process writes its stacks; None if it does not."""
    return Path(_file[0].name) if _file else None


def write_now() -> None:
    """From a thread of this process, without a signal."""
    if _file:
        faulthandler.dump_traceback(_file[0], all_threads=True)


def forget_empty() -> None:
    """At the end of a rank that nobody asked."""
    with contextlib.suppress(OSError):
        if _file and not os.path.getsize(_file[0].name):
            os.unlink(_file[0].name)
