"""One rank's process: be watched, take over the launcher's surroundings, run the function, say how it went."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
import threading
from dataclasses import dataclass
from multiprocessing import reduction
from pathlib import Path
from typing import Any, NoReturn

from syncline.errors import UsageError
from syncline.files import write_atomic
from syncline.launcher import stacks, watch
from syncline.launcher.adopt import placement_from_environment
from syncline.launcher.outcome import OutcomeFile, output_files
from syncline.launcher.wire import pack, unpack
from syncline.machine import keep_freed_memory


class Terminal:
    """The launcher's stdout and stderr as they are now; also its stdin, if `numbers` says so.

    The fork server holds the ones from when it was started; a notebook or a test may have changed them since.
    Descriptors travel with the pickle, so this can only be sent to a process that is being started.
    """

    def __init__(self, received: dict[int, int] | None = None, *, numbers: tuple[int, ...] = (1, 2)) -> None:
        self._numbers = numbers
        self.received = received or {}
        """Where those descriptors lead, as descriptors of this process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_received, ({number: reduction.DupFd(number) for number in self._numbers if is_open(number)},))


@dataclass(frozen=True)
class Task:
    """What the launcher sends to each rank. `environment` is all that the rank is to find."""

    payload: bytes
    environment: dict[str, str]
    threads: int
    log_dir: str
    launcher: watch.Watched
    leftovers: tuple[str, ...]
    terminal: Terminal | None = None
    is_script: bool = False
    """A whole program: its exit code says how it went. A function's rank must also leave a result."""
    number: int | None = None
    """Names the files of this process, where that is not its rank: an elastic run numbers ranks anew."""


def live(task: Task) -> NoReturn:
    """The rank's entry point: ends the process itself, so that nothing that lingers can keep it alive."""
    watch.hold_signals()
    _adopt_environment(task.environment)
    place = placement_from_environment()
    if place is None:
        raise UsageError("This process was not started as a rank.")
    number = place.rank if task.number is None else task.number
    outcome = OutcomeFile(Path(task.log_dir), number)
    watch.start(task.launcher, outcome, task.leftovers)
    try:
        redirect_output(Path(task.log_dir), number, task.terminal)
        stacks.write_on_signal(Path(task.log_dir), number)
        # Or a rank's own children would come from a fork server too: they start late and need picklable arguments.
        multiprocessing.set_start_method(None, force=True)
        _run(task, number)
        outcome.finished()
        wind_down()
        stacks.forget_empty()
    except BaseException as error:
        outcome.raised(error)
        watch.leave(1)
    watch.leave(0)


def redirect_output(log_dir: Path, rank: int, terminal: Terminal | None) -> None:
    """By descriptor, so that what C code and child processes say goes there too."""
    targets = dict(terminal.received) if terminal else {}
    for number, file in enumerate(output_files(log_dir, rank), 1):
        if number in targets:
            os.close(targets[number])
        targets[number] = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for number, descriptor in targets.items():
        os.dup2(descriptor, number)
        os.close(descriptor)
    # Python chose how to buffer when it started, in front of other descriptors.
    if os.isatty(1):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def result_path(log_dir: Path, rank: int) -> Path:
    return log_dir / "outcomes" / f"rank-{rank}.result"


def take_result(log_dir: Path, rank: int, *, may_be_missing: bool = False) -> Any:
    path = result_path(log_dir, rank)
    if may_be_missing and not path.exists():
        return None
    result = unpack(path.read_bytes())
    path.unlink()
    return result


def _run(task: Task, number: int) -> None:
    import torch

    torch.set_num_threads(task.threads)
    keep_freed_memory()
    result = None
    try:
        function, args = unpack(task.payload)
        result = function(*args)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise
    # A file, and not a pipe: a rank that is killed halfway must not leave the launcher waiting for the rest.
    write_atomic(result_path(Path(task.log_dir), number), pack(result), durable=False)


def wind_down() -> None:
    """What the interpreter does at the end of a script: wait for threads, then run exit functions."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()


def _adopt_environment(environment: dict[str, str]) -> None:
    """The fork server's environment is from when it started; the rank's is the launcher's of now."""
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


def _received(descriptors: dict[int, Any]) -> Terminal:
    return Terminal({number: descriptor.detach() for number, descriptor in descriptors.items()})


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
