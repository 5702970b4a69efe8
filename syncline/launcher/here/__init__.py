"""Ranks on this machine: `launch` for scripts and notebooks, `run_ranks` for the rest of the product.

The fork server is started first and torch is imported only after that, so that both load it at the same time; the
ranks, forked from the server, need not load it at all.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from syncline.errors import SynclineError, UsageError
from syncline.launcher.here.following import following
from syncline.launcher.here.host_ranks import Attempt, Share, make_task, restart_line, run_task
from syncline.launcher.starting import (
    LOOPBACK,
    check_numbers,
    listening,
    log_folder,
    make_store,
    packed,
    signals_noted,
    start_fork_server,
)
from syncline.machine import default_threads, oversubscription

if TYPE_CHECKING:
    from syncline.launcher.here.elastic import Elastic

Result = TypeVar("Result")


def launch(
    function: Callable[..., Result],
    /,
    *args: Any,
    workers: int,
    threads: int | None = None,
    log_dir: str | Path | None = None,
    all_ranks: bool = False,
    engine: str | None = None,
    address: str | None = None,
    **kwargs: Any,
) -> list[Result]:
    """Run `function(*args, **kwargs)` in `workers` new processes on this machine and return their results by rank.

    Blocks until all have ended. Each sees the environment that torchrun would give it, so
    `torch.distributed.init_process_group("gloo")` just works. Lambdas and functions of a notebook or an unguarded
    script are fine. The first failure ends all ranks and raises RankFailed with the failing rank's own traceback.

    Rank 0 writes to the terminal; the others write to `rank-N.stdout.log` and `rank-N.stderr.log` in `log_dir`.
    Without one they write to a temporary folder. It stays if a rank wrote something, and a line on stderr, or the
    error, says where it is. With `all_ranks=True` their lines are shown too, as they come, with `rank N: ` in front.
    With `engine="ray"` the processes are Ray's, on the cluster at `address`; see docs/engines.md.
    These keywords are launch's own: a function that has parameters of these names gets them through
    `functools.partial` or a lambda.
    """
    call = functools.partial(function, *args, **kwargs)
    folder = None if log_dir is None else Path(log_dir)
    if engine is None and address is not None:
        raise UsageError("address is for an engine.", action='Give engine="ray" too.')
    return run_for_user(
        call, (), workers=workers, threads=threads, log_dir=folder, all_ranks=all_ranks,
        engine=None if engine is None else (engine, address),
    )  # fmt: skip


def run_for_user(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    workers: int,
    threads: int | None,
    log_dir: Path | None,
    port: int = 0,
    all_ranks: bool = False,
    is_script: bool = False,
    elastic: Elastic | None = None,
    engine: tuple[str, str | None] | None = None,
) -> list[Any]:
    """`run_ranks` for code that is not ours: says when cores are short, and keeps or shows what every rank wrote.
    With `elastic`, ranks that die are replaced. `engine` is the name of one and its address."""
    warning = oversubscription(workers, threads or default_threads(max(1, workers)))
    if warning and engine is None:
        print(warning, file=sys.stderr)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_output_folder(log_dir, is_shown=all_ranks))
        if all_ranks:
            stack.enter_context(following(folder, elastic.most if elastic else workers))
        if engine is not None:
            from syncline.launcher.engines.place import launch_on

            return launch_on(*engine, function, workers=workers, threads=threads, log_dir=folder)
        if elastic is not None:
            from syncline.launcher.here.elastic import run_elastic

            return run_elastic(
                function, args, workers=workers, elastic=elastic, threads=threads, log_dir=folder, is_script=is_script
            )
        return run_ranks(
            function, args, workers=workers, log_dir=folder, threads=threads, port=port, is_script=is_script
        )


@contextlib.contextmanager
def _output_folder(log_dir: Path | None, *, is_shown: bool) -> Iterator[Path]:
    """The user's folder, or a temporary one that goes away if no rank wrote anything that was not shown."""
    if log_dir is not None:
        yield log_dir
        return
    folder = Path(tempfile.mkdtemp(prefix="syncline-"))
    error_says_where = False
    try:
        yield folder
        for path in folder.glob("*.stack.log"):
            path.unlink()  # of a hang that the function has got over
    except SynclineError as error:
        error_says_where = str(folder) in str(error)
        raise
    finally:
        shutil.rmtree(folder / "outcomes", ignore_errors=True)
        for path in folder.iterdir():
            if (is_shown and not error_says_where) or not path.stat().st_size:
                path.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()
        elif not error_says_where:
            print(f"syncline: the output of ranks other than 0 is in {folder}", file=sys.stderr, flush=True)


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
    is_script: bool = False,
) -> list[Any]:
    """`function(*args)` in each rank; results by rank. Raises RankFailed, Interrupted, or a rank's UsageError.

    `log_dir` receives outcomes and the output of ranks 1 and up; None means a folder that is removed afterwards.
    `preload` names modules for the fork server, which only the first run of a process can choose. `port` is the
    store's; 0 means any free one. After a failure all ranks restart, up to `max_restarts` times; the function's
    placement says how often they have. `is_script`: the function is a whole program, whose exit code says how it
    went, and not a result.
    """
    check_numbers(workers, threads)
    with (
        signals_noted() as signals,
        log_folder(log_dir, range(workers)) as folder,
        listening(LOOPBACK, port) as listener,
    ):
        start_fork_server(preload)
        payload = packed(function, tuple(args))
        environment = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
        threads = threads or default_threads(workers)
        task = make_task(
            payload, threads, folder, temporary=log_dir is None, environment=environment, is_script=is_script
        )
        director = _Alone(listener, port, signals, max_restarts)
        try:
            return run_task(task, Share(0, 1, workers), director, signals, max_restarts)
        finally:
            director.close()


class _Alone:
    """The director of ranks that are all on this machine. It stops when a signal has arrived in `signals`.

    `listener` is for the first start; later ones listen on `port` again.
    """

    def __init__(self, listener: socket.socket, port: int, signals: list[int], max_restarts: int) -> None:
        self._listener: socket.socket | None = listener
        self._port = port
        self._signals = signals
        self._max_restarts = max_restarts
        self._number = -1
        self._store: object = None

    def next_attempt(self) -> Attempt:
        self._number += 1
        # A store of its own for each start: keys of the last start would look like news.
        self._store = None
        listener, self._listener = self._listener or listening(LOOPBACK, self._port), None
        store = self._store = make_store(listener)
        return Attempt(self._number, LOOPBACK, store.port)

    def must_stop(self) -> bool:
        return bool(self._signals)

    def again(self, error: SynclineError, *, is_echo: bool) -> bool:
        if self._signals or isinstance(error, UsageError) or self._number >= self._max_restarts:
            return False
        print(restart_line(error, self._number + 1, self._max_restarts), file=sys.stderr, flush=True)
        return True

    def all_finished(self) -> bool:
        return True

    def close(self) -> None:
        self._store = None
