"""Ranks on this machine: `launch` for scripts and notebooks, `run_ranks` for the rest of the product.

Torch is imported late and only inside functions: the fork server is started first, so that both import torch at
the same time, and the ranks, forked from it, need not import it at all.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from syncline.errors import Interrupted, SynclineError, UsageError
from syncline.launcher import watch
from syncline.launcher.environment import is_rank_variable
from syncline.launcher.fork_server import start_fork_server
from syncline.launcher.wire import pack, unpack

if TYPE_CHECKING:
    from syncline.launcher.host_ranks import Director, Place
    from syncline.launcher.rank import Task

Result = TypeVar("Result")

LOOPBACK = "127.0.0.1"

_LAUNCHER_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")


def launch(
    function: Callable[..., Result],
    /,
    *args: Any,
    workers: int,
    threads: int | None = None,
    log_dir: str | Path | None = None,
    **kwargs: Any,
) -> list[Result]:
    """Run `function(*args, **kwargs)` in `workers` new processes on this machine and return their results by rank.

    Blocks until all have ended. Each sees the environment that torchrun would give it, so
    `torch.distributed.init_process_group("gloo")` just works. Lambdas and functions of a notebook or an unguarded
    script are fine. The first failure ends all ranks and raises RankFailed with the failing rank's own traceback.

    Rank 0 writes to the terminal; the others write to `rank-N.stdout.log` and `rank-N.stderr.log` in `log_dir`.
    Without one they write to a temporary folder. It stays if a rank wrote something, and a line on stderr, or the
    error, says where it is. `workers`, `threads` and `log_dir` are launch's own: a function that has parameters of
    these names gets them through `functools.partial` or a lambda.
    """
    call = functools.partial(function, *args, **kwargs)
    return run_for_user(
        call, (), workers=workers, threads=threads, log_dir=None if log_dir is None else Path(log_dir)
    )


def run_for_user(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    workers: int,
    threads: int | None,
    log_dir: Path | None,
    port: int = 0,
) -> list[Any]:
    """`run_ranks` for code that is not ours: says when cores are short, and keeps what every rank wrote."""
    warning = oversubscription(workers, threads or default_threads(max(1, workers)))
    if warning:
        print(warning, file=sys.stderr)
    with _output_kept(log_dir) as folder:
        return run_ranks(function, args, workers=workers, log_dir=folder, threads=threads, port=port)


@contextlib.contextmanager
def _output_kept(log_dir: Path | None) -> Iterator[Path]:
    """The user's folder, or a temporary one that goes away if no rank wrote anything."""
    if log_dir is not None:
        yield log_dir
        return
    folder = Path(tempfile.mkdtemp(prefix="syncline-"))
    named = False
    try:
        yield folder
    except SynclineError as error:
        named = str(folder) in str(error)
        raise
    finally:
        shutil.rmtree(folder / "outcomes", ignore_errors=True)
        for path in folder.iterdir():
            if not path.stat().st_size:
                path.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()
        elif not named:
            print(f"syncline: what ranks other than 0 wrote is in {folder}", file=sys.stderr, flush=True)


def run_ranks(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    workers: int,
    log_dir: Path | None,
    threads: int | None = None,
    preload: Sequence[str] = (),
    port: int = 0,
    max_restarts: int = 0,
) -> list[Any]:
    """`function(*args)` in each rank; results by rank. Raises RankFailed, Interrupted, or a rank's UsageError.

    `log_dir` receives outcomes and the output of ranks 1 and up; None means a folder that is removed afterwards.
    `preload` names modules for the fork server, which only the first run of a process can choose. `port` is the
    store's; 0 takes any free one. After a failure all ranks are started again, `max_restarts` times; the function
    finds in its placement which start this is.
    """
    check_numbers(workers, threads)
    with (
        signals_noted() as noted,
        log_folder(log_dir, range(workers)) as folder,
        listening(LOOPBACK, port) as listener,
    ):
        start_fork_server(preload)
        payload = packed(function, tuple(args))
        environment = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
        threads = threads or default_threads(workers)
        task = make_task(payload, threads, folder, temporary=log_dir is None, environment=environment)
        from syncline.launcher.alone import Alone
        from syncline.launcher.host_ranks import Place

        director = Alone(listener, port, noted, max_restarts)
        try:
            return run_task(task, Place(0, 1, workers), director, noted, max_restarts)
        finally:
            director.close()


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_threads(workers: int) -> int:
    """Threads per worker that fill the cores without sharing any."""
    return max(1, cores() // workers)


def oversubscription(workers: int, threads: int) -> str | None:
    """A sentence for the user if the workers' threads outnumber the cores, else None."""
    if workers * threads <= cores():
        return None
    return (
        f"Warning: {workers} worker{'s' if workers > 1 else ''} x {threads} thread{'s' if threads > 1 else ''} "
        f"share {cores()} core{'s' if cores() > 1 else ''}: times will be longer than on a machine with enough."
    )


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


def make_task(payload: bytes, threads: int, folder: Path, *, temporary: bool, environment: Mapping[str, str]) -> Task:
    """What each rank is sent. `environment` holds what the user may overrule, such as the interface for Gloo, which
    would otherwise bind to whatever address the hostname resolves to."""
    from syncline.launcher.rank import Task, Terminal

    return Task(
        payload=payload,
        environment={
            **environment,
            **{name: text for name, text in os.environ.items() if not is_rank_variable(name)},
            "OMP_NUM_THREADS": str(threads),
        },
        threads=threads,
        log_dir=str(folder),
        launcher=watch.identify(os.getpid()),
        leftovers=(get_temp_dir(), str(folder)) if temporary else (get_temp_dir(),),
        terminal=Terminal(),
    )


def run_task(task: Task, place: Place, director: Director, noted: list[int], max_restarts: int) -> list[Any]:
    """This host's ranks to their end: their results."""
    from syncline.launcher.host_ranks import HostRanks
    from syncline.launcher.rank import result_path

    folder = Path(task.log_dir)
    raise_if_interrupted(noted)
    ranks = HostRanks(task, place, director, run_id=uuid.uuid4().hex[:12], max_restarts=max_restarts)
    # A thread of its own: the main thread then only notes signals, and none of them can interrupt this between
    # starting a rank and remembering that it did.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="syncline-ranks") as pool:
        error = pool.submit(ranks.run).result()
    raise_if_interrupted(noted)
    if error is not None:
        try:
            raise error
        finally:
            error = None  # or this frame and the error would keep each other, and all that is open, alive
    return [taken(result_path(folder, rank)) for rank in place.ranks]


def raise_if_interrupted(noted: list[int]) -> None:
    if noted:
        raise Interrupted(f"Stopped by {signal_words(noted[0])}; every rank has ended.")


def signal_words(number: int) -> str:
    name = signal.Signals(number).name
    return "Ctrl-C" if name == "SIGINT" else name


def taken(path: Path) -> Any:
    result = unpack(path.read_bytes())
    path.unlink()
    return result


@contextlib.contextmanager
def log_folder(log_dir: Path | None, ranks: Iterable[int]) -> Iterator[Path]:
    """Where these ranks' outcomes and logs go, with nothing of an earlier run that could be taken for theirs."""
    from syncline.launcher.outcome import forget_outcomes

    folder = Path(tempfile.mkdtemp(prefix="syncline-")) if log_dir is None else log_dir.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        forget_outcomes(folder, ranks)
        yield folder
    finally:
        if log_dir is None:
            shutil.rmtree(folder, ignore_errors=True)


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
