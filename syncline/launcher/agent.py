"""The local ranks' agent: torch's elastic agent, kept on this machine's loopback and told when to stop.

Torch's agent starts the ranks with the same environment as torchrun. What differs here: its store listens on
loopback only, it watches exit codes instead of waiting for return values, it gives the rank that broke the run a
moment to say so before it ends the others, and it stops when it is asked to.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from syncline.launcher.outcome import read_outcome
from syncline.launcher.rank import Task, live
from syncline.launcher.verdict import Ending, is_echo

LOOPBACK = "127.0.0.1"
_MONITOR_SECONDS = 0.1
_ECHO_SECONDS = 2.0
_STOP_SECONDS = 5
_STORE_TIMEOUT = timedelta(minutes=5)

_main_module_lock = threading.Lock()


class LoopbackRendezvous(RendezvousHandler):
    """One host's meeting point. The socket is bound by us, since torch's store would listen on every interface."""

    def __init__(self, listener: socket.socket, run_id: str) -> None:
        self._run_id = run_id
        self._port = int(listener.getsockname()[1])
        self._store: TCPStore | None = TCPStore(
            LOOPBACK,
            self._port,
            is_master=True,
            timeout=_STORE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def get_backend(self) -> str:
        return "loopback"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        assert self._store is not None
        store = PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._port))

    def is_closed(self) -> bool:
        return self._store is None

    def set_closed(self) -> None:
        self._store = None

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self.set_closed()
        return True


class RankLogs(LogsSpecs):
    """Rank 0 stays on the terminal; the others' output goes to `rank-N.stdout.log` and `rank-N.stderr.log`."""

    def __init__(self, log_dir: Path) -> None:
        super().__init__(str(log_dir))
        self._log_dir = log_dir

    @property
    def root_log_dir(self) -> str:
        return str(self._log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        errors = {rank: str(self._log_dir / "outcomes" / f"rank-{rank}.torch.json") for rank in envs}
        for rank, error_file in errors.items():
            envs[rank]["TORCHELASTIC_ERROR_FILE"] = error_file
        return LogsDest(self._files(envs, "stdout"), self._files(envs, "stderr"), error_files=errors)

    def _files(self, ranks: dict[int, Any], stream: str) -> dict[int, str]:
        return {rank: str(self._log_dir / f"rank-{rank}.{stream}.log") if rank else "" for rank in ranks}


class Agent(LocalElasticAgent):
    """Runs the ranks of one task. `stop_requested` is looked at ten times a second."""

    def __init__(
        self, task: Task, workers: int, rendezvous: LoopbackRendezvous, stop_requested: Callable[[], object]
    ) -> None:
        self._log_dir = Path(task.log_dir)
        self._stop_requested = stop_requested
        self._processes: list[Any] = []
        self._last_alive: list[float] = []
        self._asked: set[int] = set()
        self._forced: set[int] = set()
        self._first_failure_seen: float | None = None
        spec = WorkerSpec(
            role="rank",
            local_world_size=workers,
            rdzv_handler=rendezvous,
            entrypoint=live,
            args=(task,),
            max_restarts=0,
            monitor_interval=_MONITOR_SECONDS,
            local_addr=LOOPBACK,
        )
        super().__init__(spec, RankLogs(self._log_dir), start_method="forkserver", shutdown_timeout=_STOP_SECONDS)

    def endings(self) -> list[Ending]:
        """How each rank's process ended; call after `run`."""
        return [
            Ending(process.exitcode, self._last_alive[rank], rank in self._asked, rank in self._forced)
            for rank, process in enumerate(self._processes)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        earlier = set(multiprocessing.active_children())
        try:
            with _main_module_hidden():
                pids = super()._start_workers(worker_group)
        except BaseException:
            for process in set(multiprocessing.active_children()) - earlier:
                process.kill()
            raise
        context: Any = self._pcontext
        self._processes = list(context._pc.processes)
        self._last_alive = [time.time()] * len(self._processes)
        return dict(pids)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = self._exit_codes()
        if self._stop_requested() or self._must_end(codes):
            self._end_ranks()
            return RunResult(state=WorkerState.FAILED)
        if all(code == 0 for code in codes):
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(range(len(codes))))
        return RunResult(state=WorkerState.HEALTHY)

    def _exit_codes(self) -> list[int | None]:
        now = time.time()
        codes = [process.exitcode for process in self._processes]
        for rank, code in enumerate(codes):
            if code is None:
                self._last_alive[rank] = now
        return codes

    def _must_end(self, codes: list[int | None]) -> bool:
        """A failure was seen, and its cause is known or has had its time to show."""
        failed = [rank for rank, code in enumerate(codes) if code or (code == 0 and not self._has_finished(rank))]
        if not failed:
            return False
        if self._first_failure_seen is None:
            self._first_failure_seen = time.monotonic()
        # A broken connection is an echo: the rank that caused it may still be on its way to say so.
        only_echoes = all(is_echo(self._log_dir, rank) for rank in failed)
        waited = time.monotonic() - self._first_failure_seen
        return not only_echoes or None not in codes or waited > _ECHO_SECONDS

    def _has_finished(self, rank: int) -> bool:
        """An exit code of 0 is not enough: os._exit(0) in the middle gives one too."""
        outcome = read_outcome(self._log_dir, rank)
        return outcome is not None and outcome.state == "finished"

    def _end_ranks(self) -> None:
        alive = {rank: p for rank, p in enumerate(self._processes) if p.exitcode is None}
        self._asked |= alive.keys()
        for process in alive.values():
            process.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        for rank, process in alive.items():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                self._forced.add(rank)
                process.kill()
        for process in alive.values():
            process.join(_STOP_SECONDS)


def run_agent(
    task: Task, workers: int, listener: socket.socket, run_id: str, stop_requested: Callable[[], object]
) -> tuple[bool, list[Ending]]:
    """Run all ranks to their end: whether every one succeeded, and how each ended."""
    rendezvous = LoopbackRendezvous(listener, run_id)
    agent = Agent(task, workers, rendezvous, stop_requested)
    with _log_to(Path(task.log_dir) / "agent.log"):
        try:
            result = agent.run()
        finally:
            rendezvous.shutdown()
    return not result.is_failed(), agent.endings()


@contextlib.contextmanager
def _log_to(path: Path) -> Iterator[None]:
    """Torch's agent warns and prints tracebacks of its own; here they go to a file."""
    logger = logging.getLogger("torch.distributed.elastic")
    handler = logging.FileHandler(path, delay=True)
    propagated, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated
        handler.close()


@contextlib.contextmanager
def _main_module_hidden() -> Iterator[None]:
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
