"""Ends a rank on time: when a signal asks for it, and when its launcher is gone.

A rank spends much of its life blocked inside a collective, where Python handles no signal. So the signals are
blocked in every thread, and one thread waits for them and checks now and then that the launcher is alive. The rank's
parent is the fork server, so the parent's pid says nothing about the launcher: a pidfd does.
"""

from __future__ import annotations

import _posixsubprocess
import contextlib
import multiprocessing
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LOOK_EVERY_SECONDS = 0.5
_TIDY_SECONDS = 2.0
_SHOW_CURSOR = b"\x1b[?25h"

_RELAY = signal.SIGRTMAX if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
"""Brings a stop signal that the watcher has taken to the main thread, where Python runs handlers."""

_fork_exec = _posixsubprocess.fork_exec
_relayed: list[int] = []
_callbacks: list[Callable[[], object]] = []
_watchers: list[_Watcher] = []


@dataclass(frozen=True)
class Watched:
    """A process by pid and start time, so that a later process with the same pid is not mistaken for it."""

    pid: int
    started: str


class Report(Protocol):
    """Records why the rank ends, before it does."""

    def stopped(self, reason: str) -> None: ...

    def killed(self, signal_name: str, sender: int) -> None: ...


class Silent:
    """A report for ranks that keep no outcome, such as those of another launcher."""

    def stopped(self, reason: str) -> None: ...

    def killed(self, signal_name: str, sender: int) -> None: ...


def on_stop(callback: Callable[[], object]) -> None:
    """Run `callback` in the watcher's thread if the rank is stopped from outside, before the process exits.

    All callbacks together have two seconds, the last one first; the main thread may be blocked and may hold locks.
    """
    _callbacks.append(callback)


def hold_signals() -> None:
    """Block the stop signals in this thread and in all that it starts later; the watcher handles them instead."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def identify(pid: int) -> Watched:
    try:
        # The command name may hold spaces and brackets; the fields that follow the last bracket do not.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return Watched(pid, fields[19])
    except (OSError, IndexError):
        return Watched(pid, "")


def is_stopped(pid: int) -> bool:
    """Whether the process was stopped (SIGSTOP, Ctrl-Z, a debugger): it can answer nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def ancestors(pid: int) -> Iterator[tuple[int, str]]:
    """Pid and name of the process's parent, its parent's parent, and so on, as far as they can be seen."""
    for _ in range(100):
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            name = Path(f"/proc/{pid}/comm").read_text().strip()
        except (OSError, ValueError, IndexError):
            return
        yield pid, name


def start(launcher: Watched, report: Report, leftovers: Iterable[str] = ()) -> None:
    """Start watching. `leftovers` are folders that a launcher which was killed can no longer remove itself."""
    hold_signals()
    # Children that user code forks (data loader workers) must be open to signals again, and so must its programs.
    os.register_at_fork(after_in_child=_release_signals)
    subprocess._fork_exec = _posixsubprocess.fork_exec = _open_to_signals  # type: ignore[attr-defined]
    signal.signal(_RELAY, _call_handlers)
    watcher = _Watcher(launcher, report, tuple(leftovers))
    _watchers.append(watcher)
    threading.Thread(target=watcher.run, name="syncline-watch", daemon=True).start()


def watch_parent() -> None:
    """For a rank that torchrun or another launcher started as its direct child: end with that parent."""
    parent = os.getppid()
    start(identify(parent), Silent())
    if os.getppid() != parent:
        leave(1)


def leave(code: int, *, callbacks: bool = False) -> NoReturn:
    """End this process now, whatever its other threads are doing; tidying up is given two seconds."""
    tidy = threading.Thread(target=_tidy, args=(callbacks,), daemon=True)
    with contextlib.suppress(RuntimeError):  # no new threads while the interpreter shuts down
        tidy.start()
        tidy.join(_TIDY_SECONDS)
    os._exit(code)


class _Watcher:
    def __init__(self, launcher: Watched, report: Report, leftovers: tuple[str, ...]) -> None:
        self._launcher = launcher
        self._launcher_alive = alive_check(launcher)
        self._report = report
        self._leftovers = leftovers
        # Pid 0 is the kernel: the terminal's Ctrl-C. The parent is the fork server, whose death sends a SIGINT.
        self._trusted = {0, launcher.pid, os.getppid()}
        self._signals = {s for s in STOP_SIGNALS if signal.getsignal(s) is not signal.SIG_IGN}

    def run(self) -> None:
        while True:
            caught = _next_signal(self._signals)
            if not self._launcher_alive():
                self._report.stopped("the launcher ended")
                self.tidy_for_launcher()
                leave(1, callbacks=True)
            if caught is not None:
                self._obey(*caught)

    def tidy_for_launcher(self) -> None:
        """Remove what a launcher that was killed can no longer remove itself."""
        # Asked anew: this may be another thread than the one that watches.
        if not alive_check(self._launcher)():
            for folder in self._leftovers:
                shutil.rmtree(folder, ignore_errors=True)

    def _obey(self, number: int, sender: int) -> None:
        """A handler that user code has set decides for itself; but the launcher waits for seconds only."""
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.default_int_handler, None):
            _relayed.append(number)
            signal.pthread_kill(threading.main_thread().ident or 0, _RELAY)
            return
        name = signal.Signals(number).name
        if sender in self._trusted:
            self._report.stopped(name)
        else:
            self._report.killed(name, sender)
        leave(128 + number, callbacks=True)


def _next_signal(signals: set[signal.Signals]) -> tuple[int, int] | None:
    """The next stop signal and its sender's pid, or None after a while without one."""
    if hasattr(signal, "sigtimedwait"):
        info = signal.sigtimedwait(signals, _LOOK_EVERY_SECONDS)
        # Python returns uninitialised memory where SIGCONT interrupts the wait after its time is up.
        return (info.si_signo, info.si_pid) if info is not None and info.si_signo in signals else None
    time.sleep(_LOOK_EVERY_SECONDS)
    pending = signals & signal.sigpending()
    return (signal.sigwait(pending), 0) if pending else None


def alive_check(process: Watched) -> Callable[[], bool]:
    """A function that says whether the process still lives, quick enough to be called often."""
    if hasattr(os, "pidfd_open"):
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return lambda: False
        except OSError:  # a kernel or sandbox without pidfd
            return lambda: _answers(process)
        if identify(process.pid) != process:
            return lambda: False
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return lambda: not poll.poll(0)
    return lambda: _answers(process)


def _answers(process: Watched) -> bool:
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return identify(process.pid) == process


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _call_handlers(_number: int, frame: FrameType | None) -> None:
    while _relayed:
        number = _relayed.pop(0)
        handler = signal.getsignal(number)
        if callable(handler):
            handler(number, frame)


def _open_to_signals(*args: Any) -> Any:
    """Start a program, which inherits what is blocked here at this moment."""
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        return _fork_exec(*args)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _tidy(callbacks: bool) -> None:
    # A rank may hear of its launcher's end from ranks on other hosts first.
    for watcher in _watchers:
        watcher.tidy_for_launcher()
    for callback in reversed(_callbacks) if callbacks else ():
        with contextlib.suppress(Exception):
            callback()
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError, ValueError):
            child.kill()
    with contextlib.suppress(OSError, ValueError):
        if callbacks and os.isatty(2):
            os.write(2, _SHOW_CURSOR)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
