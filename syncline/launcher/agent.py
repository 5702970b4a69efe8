"""One host's ranks: torch's elastic agent, told by a director when to start, to stop and to start again.

Torch's agent starts the ranks with the same environment as torchrun. What differs here: ranks follow from the host's
place and need no talk between agents, it watches exit codes instead of waiting for return values, it gives the rank
that broke the run a moment to say so before it ends the others, and it stops when it is asked to.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import sys
import threading
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from syncline.errors import SynclineError, UsageError
from syncline.launcher.environment import placement_from_environment
from syncline.launcher.outcome import forget_outcomes, read_outcome
from syncline.launcher.rank import Task, live
from syncline.launcher.verdict import Ending, is_echo, judge

LOOPBACK = "127.0.0.1"
_MONITOR_SECONDS = 0.1
_ECHO_SECONDS = 2.0
_STOP_SECONDS = 5

_main_module_lock = threading.Lock()


@dataclass(frozen=True)
class Place:
    """This host among the hosts of a run, with as many ranks on each."""

    node_rank: int
    nodes: int
    ranks_here: int
    address: str

    @property
    def first_rank(self) -> int:
        return self.node_rank * self.ranks_here


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks: which one it is, from 0, and where their store listens."""

    number: int
    address: str
    port: int


class Director(Protocol):
    """Who decides for the agent: this launcher alone, or all nodes together."""

    def next_attempt(self) -> Attempt:
        """Where ranks meet, as soon as all hosts are ready to start them; an error if that will not be."""

    def must_stop(self) -> bool:
        """Looked at ten times a second while ranks run."""

    def again(self, error: SynclineError, *, is_echo: bool) -> bool:
        """The ranks of this host have ended, for this reason or because of `must_stop`: whether to start again."""

    def all_finished(self) -> bool:
        """Asked again and again once the ranks of this host have succeeded: whether all hosts' have."""


class _Rendezvous(RendezvousHandler):
    def __init__(self, director: Director, place: Place, run_id: str) -> None:
        self._director = director
        self._place = place
        self._run_id = run_id
        self.attempt = Attempt(0, "", 0)

    def get_backend(self) -> str:
        return "syncline"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self.attempt = self._director.next_attempt()
        meeting = RendezvousStoreInfo(self.attempt.address, self.attempt.port)
        # Agents need no store: ranks follow from the place, and the director knows who has finished.
        return RendezvousInfo(HashStore(), self._place.node_rank, self._place.nodes, meeting)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
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
        ranks = {local: global_rank(environment) for local, environment in envs.items()}
        errors = {local: str(self._log_dir / "outcomes" / f"rank-{rank}.torch.json") for local, rank in ranks.items()}
        for local, error_file in errors.items():
            envs[local]["TORCHELASTIC_ERROR_FILE"] = error_file
        return LogsDest(self._files(ranks, "stdout"), self._files(ranks, "stderr"), error_files=errors)

    def _files(self, ranks: dict[int, int], stream: str) -> dict[int, str]:
        return {local: self._free(f"rank-{rank}.{stream}") if rank else "" for local, rank in ranks.items()}

    def _free(self, name: str) -> str:
        """What the rank said before it was started again is kept beside."""
        path = self._log_dir / f"{name}.log"
        if path.exists():
            earlier = len(list(self._log_dir.glob(f"{name}.*.log")))
            path.rename(self._log_dir / f"{name}.{earlier}.log")
        return str(path)


class Agent(LocalElasticAgent):
    """Runs the ranks of one task on one host, as often as its director says."""

    def __init__(self, task: Task, place: Place, director: Director, *, run_id: str, max_restarts: int) -> None:
        self._log_dir = Path(task.log_dir)
        self._keeps_logs = task.log_dir not in task.leftovers
        self._place = place
        self._director = director
        self._processes: list[Any] = []
        self._last_alive: list[float] = []
        self._asked: set[int] = set()
        self._forced: set[int] = set()
        self._first_failure_seen: float | None = None
        self._meeting = _Rendezvous(director, place, run_id)
        spec = WorkerSpec(
            role="rank",
            local_world_size=place.ranks_here,
            rdzv_handler=self._meeting,
            entrypoint=live,
            args=(task,),
            max_restarts=max_restarts,
            monitor_interval=_MONITOR_SECONDS,
            local_addr=place.address,
        )
        super().__init__(spec, RankLogs(self._log_dir), start_method="forkserver", shutdown_timeout=_STOP_SECONDS)

    def judge(self) -> SynclineError:
        """Why the ranks ended; call when they have."""
        endings = [
            Ending(process.exitcode, self._last_alive[local], local in self._asked, local in self._forced)
            for local, process in enumerate(self._processes)
        ]
        return judge(self._log_dir, endings, keeps_logs=self._keeps_logs, first_rank=self._place.first_rank)

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """In the order of the hosts, however many there are."""
        total = self._place.nodes * self._place.ranks_here
        ranks = [self._place.first_rank + local for local in range(self._place.ranks_here)]
        return [Worker(local, rank, rank, total, total) for local, rank in enumerate(ranks)]

    def _exit_barrier(self) -> None:
        """The director has waited for the others already."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # Torch tells ranks which start this is by what is left; a host that joined late has seen none of the earlier.
        self._remaining_restarts = worker_group.spec.max_restarts - self._meeting.attempt.number
        self._asked, self._forced, self._first_failure_seen = set(), set(), None
        forget_outcomes(self._log_dir, self._ranks())
        earlier = set(multiprocessing.active_children())
        try:
            with main_module_hidden():
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
        if self._director.must_stop() or self._must_end(codes):
            self._end_ranks()
            error = self.judge()
            echo = not isinstance(error, UsageError) and (error.rank is None or is_echo(self._log_dir, error.rank))
            self._remaining_restarts = int(self._director.again(error, is_echo=echo))
            return RunResult(state=WorkerState.FAILED)
        if all(code == 0 for code in codes) and self._director.all_finished():
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(self._ranks()))
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
        ends = zip(self._ranks(), codes, strict=True)
        failed = [rank for rank, code in ends if code or (code == 0 and not self._has_finished(rank))]
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

    def _ranks(self) -> range:
        return range(self._place.first_rank, self._place.first_rank + self._place.ranks_here)

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
    task: Task, place: Place, director: Director, *, run_id: str, max_restarts: int
) -> SynclineError | None:
    """Run this host's ranks to their end: None if all succeeded, otherwise why not."""
    agent = Agent(task, place, director, run_id=run_id, max_restarts=max_restarts)
    name = f"agent-{place.node_rank}.log" if place.node_rank else "agent.log"
    with _log_to(Path(task.log_dir) / name):
        result = agent.run()
    return agent.judge() if result.is_failed() else None


def global_rank(environment: dict[str, str]) -> int:
    place = placement_from_environment(environment)
    assert place is not None
    return place.rank


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
