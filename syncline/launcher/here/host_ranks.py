"""One host's ranks: processes of the fork server. A director says when they start, stop and restart.

They find the same variables as under torchrun. The launcher watches exit codes and outcome files. It gives the rank
that broke the run a moment to say so before it ends the others, and it stops when it is asked to.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import connection
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from syncline.errors import SynclineError, UsageError
from syncline.launcher import watch
from syncline.launcher.adopt import Placement, is_rank_variable, torchrun_variables
from syncline.launcher.outcome import Ending, Patience, accept_exit, forget_outcomes, is_echo, judge, output_files
from syncline.launcher.rank_life import Task, Terminal, live, take_result
from syncline.launcher.starting import main_module_hidden, raise_if_interrupted

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

_LOOK_SECONDS = 0.1
_STOP_SECONDS = 5


@dataclass(frozen=True)
class Share:
    """This host's share of the ranks of a run: as many as every other host's."""

    node_rank: int
    nodes: int
    ranks_here: int

    @property
    def ranks(self) -> range:
        first = self.node_rank * self.ranks_here
        return range(first, first + self.ranks_here)


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks: which one it is, from 0, and where their store listens."""

    number: int
    address: str
    port: int


class Director(Protocol):
    """Who decides about the ranks: this launcher alone, or all nodes together."""

    def next_attempt(self) -> Attempt:
        """Where ranks meet, as soon as all hosts are ready to start them; an error if that will not be."""

    def must_stop(self) -> bool:
        """Looked at ten times a second while ranks run."""

    def again(self, error: SynclineError, *, is_echo: bool) -> bool:
        """The ranks of this host have ended, for this reason or because of `must_stop`: whether to restart them."""

    def all_finished(self) -> bool:
        """Asked again and again once the ranks of this host have succeeded: whether all hosts' have."""


def make_task(
    payload: bytes,
    threads: int,
    folder: Path,
    *,
    temporary: bool,
    environment: Mapping[str, str],
    is_script: bool = False,
) -> Task:
    """What each rank is sent. `environment` holds what the user may overrule, such as the interface for Gloo, which
    would otherwise bind to whatever address the hostname resolves to."""
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
        terminal=Terminal(numbers=(0, 1, 2) if is_script else (1, 2)),
        is_script=is_script,
    )


def run_task(task: Task, share: Share, director: Director, signals: list[int], max_restarts: int) -> list[Any]:
    """This host's ranks to their end: their results."""
    ranks = HostRanks(task, share, director, run_id=uuid.uuid4().hex[:12], max_restarts=max_restarts)
    to_the_end(ranks.run, signals)
    return [take_result(Path(task.log_dir), rank, may_be_missing=task.is_script) for rank in share.ranks]


def to_the_end(run: Callable[[], SynclineError | None], signals: list[int]) -> None:
    """Start and watch ranks until they have ended; raises why, if they have not succeeded."""
    raise_if_interrupted(signals)
    # A thread of its own: the main thread then only notes signals, and none of them can interrupt this between
    # starting a rank and remembering that it did.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="syncline-ranks") as pool:
        error = pool.submit(run).result()
    raise_if_interrupted(signals)
    if error is not None:
        try:
            raise error
        finally:
            error = None  # or this frame and the error would keep each other, and all that is open, alive


def restart_line(error: SynclineError, number: int, max_restarts: int) -> str:
    return f"syncline: {error} All ranks start again from the last checkpoint, restart {number} of {max_restarts}."


@dataclass
class RankProcess:
    """A rank's process, and how the launcher saw it end."""

    process: ForkServerProcess
    exit_code: int | None = None
    last_alive: float = 0.0
    asked: bool = False
    forced: bool = False
    found_stopped: bool = False

    @property
    def is_stopped(self) -> bool:
        return self.process.pid is not None and watch.is_stopped(self.process.pid)

    def look(self) -> int | None:
        """Its exit code, None while it lives."""
        if self.exit_code is None:
            now = time.time()
            self.exit_code = self.process.exitcode
            if self.exit_code is None:
                self.last_alive = now
        return self.exit_code

    def wait(self, seconds: float) -> None:
        self.process.join(seconds)
        self.look()


class HostRanks:
    """The ranks of one task on one host, started as often as the director says."""

    def __init__(self, task: Task, share: Share, director: Director, *, run_id: str, max_restarts: int) -> None:
        self._task = task
        self._share = share
        self._director = director
        self._run_id = run_id
        self._max_restarts = max_restarts
        self._log_dir = Path(task.log_dir)
        self._processes: list[RankProcess] = []

    def run(self) -> SynclineError | None:
        """Returns when the ranks have ended for good: None if all succeeded, otherwise why not."""
        while True:
            attempt = self._director.next_attempt()
            try:
                self._start(attempt)
                succeeded = self._watch()
            finally:
                # Whatever happened, also here: no rank outlives its launcher's interest in it.
                end_processes(self._processes)
            if succeeded:
                return None
            error = self._judge()
            # Why a rank failed decides with other nodes' reasons; one that only lost its peer has nothing to add.
            echo = not isinstance(error, UsageError) and (error.rank is None or is_echo(self._log_dir, error.rank))
            if not self._director.again(error, is_echo=echo):
                return error

    def _start(self, attempt: Attempt) -> None:
        self._processes = []
        for local, rank in enumerate(self._share.ranks):
            self._processes.append(start_process(self._task, rank, self._variables(local, rank, attempt)))

    def _variables(self, local: int, rank: int, attempt: Attempt) -> dict[str, str]:
        placement = Placement(
            rank=rank,
            world_size=self._share.nodes * self._share.ranks_here,
            local_rank=local,
            local_world_size=self._share.ranks_here,
            host_index=self._share.node_rank,
            num_hosts=self._share.nodes,
            master_addr=attempt.address,
            master_port=attempt.port,
            launcher="syncline",
            run_id=self._run_id,
            restart=attempt.number,
        )
        return torchrun_variables(placement, self._max_restarts, self._log_dir)

    def _watch(self) -> bool:
        """To the end of the run: whether all ranks of all hosts succeeded."""
        patience = Patience(self._log_dir)
        while True:
            codes = self._exit_codes()
            if self._director.must_stop() or patience.is_over(codes) or self._rest_is_stopped(codes):
                return False
            if not any(code != 0 for code in codes.values()) and self._director.all_finished():
                return True
            self._wait_for_news()

    def _rest_is_stopped(self, codes: dict[int, int | None]) -> bool:
        """A rank has failed, and those that live will not say more."""
        living = [process for process in self._processes if process.exit_code is None]
        return any(codes.values()) and bool(living) and all(process.is_stopped for process in living)

    def _exit_codes(self) -> dict[int, int | None]:
        """By rank, None for those that live."""
        codes = dict(zip(self._share.ranks, [process.look() for process in self._processes], strict=True))
        if self._task.is_script:
            for rank in (rank for rank, code in codes.items() if code == 0):
                accept_exit(self._log_dir, rank)
        return codes

    def _wait_for_news(self) -> None:
        living = [rank.process.sentinel for rank in self._processes if rank.exit_code is None]
        if living:
            connection.wait(living, _LOOK_SECONDS)
        else:
            time.sleep(_LOOK_SECONDS)

    def _judge(self) -> SynclineError:
        self._exit_codes()
        return judge_processes(self._task, dict(zip(self._share.ranks, self._processes, strict=True)))


def start_process(task: Task, number: int, variables: Mapping[str, str]) -> RankProcess:
    """A rank of that number."""
    make_room(Path(task.log_dir), number)
    own = replace(task, environment={**task.environment, **variables}, number=number)
    # No daemon: such a process could have no children, and ranks have data loaders.
    process = multiprocessing.get_context("forkserver").Process(target=live, args=(own,))
    with main_module_hidden():
        process.start()
    return RankProcess(process, last_alive=time.time())


def end_processes(processes: Sequence[RankProcess]) -> None:
    """Ask, then use force: at once for a rank that was stopped and cannot answer. The others do so in their watcher's
    thread, even where they are stuck in a collective."""
    living = [process for process in processes if process.look() is None]
    for process in living:
        process.asked = True
        process.forced = process.found_stopped = process.is_stopped
        (process.process.kill if process.forced else process.process.terminate)()
    deadline = time.monotonic() + _STOP_SECONDS
    for process in living:
        process.wait(max(0.0, deadline - time.monotonic()))
        if process.exit_code is None:
            process.forced = True
            process.process.kill()
    for process in processes:
        process.wait(_STOP_SECONDS)
        with contextlib.suppress(ValueError):  # one that even a SIGKILL does not end, such as in a broken mount
            process.process.close()


def judge_processes(task: Task, processes: Mapping[int, RankProcess]) -> SynclineError:
    """Why the run of these processes ended."""
    endings = {
        number: Ending(process.exit_code, process.last_alive, process.asked, process.forced)
        for number, process in processes.items()
    }
    error = judge(Path(task.log_dir), endings, keeps_logs=task.log_dir not in task.leftovers)
    stopped = ", ".join(str(number) for number, process in processes.items() if process.found_stopped)
    if stopped:
        error.action = f"Rank {stopped} had been stopped (SIGSTOP, Ctrl-Z or a debugger). {error.action}".strip()
    return error


def make_room(log_dir: Path, number: int) -> None:
    """For a rank that starts: its earlier outcome is forgotten, its earlier output kept."""
    forget_outcomes(log_dir, [number])
    for path in output_files(log_dir, number):
        _put_aside(path)


def _put_aside(path: Path) -> None:
    """A rank that restarts keeps the output of its earlier starts."""
    if path.exists():
        earlier = len(list(path.parent.glob(f"{path.stem}.*.log")))
        path.rename(path.with_suffix(f".{earlier}.log"))
