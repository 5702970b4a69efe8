"""Ranks on this machine that outlive each other: one that dies is replaced, and the others keep what they have.

Between two changes the ranks form a world, with a store of its own. When a rank has died, the others fail in their
next collective and ask for another world. As soon as all of them have asked, the launcher numbers the ranks anew,
starts those that are missing, and says so on a store that lasts for the whole run (worlds.py is the ranks' side).
Rank 0 of the new world is the one with the most commits, so its state is the newest.
"""

from __future__ import annotations

import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syncline.errors import SynclineError, UsageError
from syncline.launcher.adopt import ELASTIC_VARIABLE, torchrun_variables
from syncline.launcher.here.host_ranks import (
    RankProcess,
    end_processes,
    judge_processes,
    make_task,
    start_process,
    to_the_end,
)
from syncline.launcher.here.worlds import World, asks_key, hosts_key, world_key
from syncline.launcher.outcome import accept_exit, has_finished
from syncline.launcher.rank_life import Task, take_result
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
from syncline.machine import default_threads

_LOOK_SECONDS = 0.05
_DISCOVER_SECONDS = 1.0
_STORE_SECONDS = 5.0
MOST_RESETS = 20
"""A rank that dies again and again makes no progress; the user may allow more."""


@dataclass(frozen=True)
class Elastic:
    """How many ranks there may be. `discover` says how many fit at the moment, if that can change."""

    least: int
    most: int
    max_resets: int = MOST_RESETS
    discover: Callable[[], int] | None = None


def run_elastic(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    workers: int,
    elastic: Elastic,
    threads: int | None,
    log_dir: Path,
    is_script: bool,
) -> list[Any]:
    """As `run_ranks`, for a function that asks for another world when a rank is lost; results by rank of the last
    world."""
    check_numbers(workers, threads)
    with signals_noted() as signals, log_folder(log_dir, range(elastic.most)) as folder:
        start_fork_server()
        task = make_task(
            packed(function, tuple(args)), threads or default_threads(workers), folder, temporary=False,
            environment={"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}, is_script=is_script,
        )  # fmt: skip
        ranks = ElasticRanks(task, workers, elastic, lambda: bool(signals))
        to_the_end(ranks.run, signals)
        return [take_result(folder, slot, may_be_missing=is_script) for slot in ranks.slots_by_rank]


class ElasticRanks:
    """Each process has a slot, which names its files and stays; its rank is that of the current world."""

    def __init__(self, task: Task, workers: int, elastic: Elastic, must_stop: Callable[[], bool]) -> None:
        self._task = task
        self._log_dir = Path(task.log_dir)
        self._elastic = elastic
        self._must_stop = must_stop
        self._slots_wanted = workers
        self._announced = False
        self._run_id = uuid.uuid4().hex[:12]
        self._control = make_store(listening(LOOPBACK, 0))
        self._world = World(-1, {}, 0)
        self._stores: list[object] = []
        """Of all worlds: a thread of an earlier one may still look at its own."""
        self._first_death = 0.0
        """In this world; 0 if nobody has died."""
        self._processes: dict[int, RankProcess] = {}
        self._left: list[RankProcess] = []
        """Of earlier worlds: replaced, or told to go."""

    @property
    def slots_by_rank(self) -> list[int]:
        return sorted(self._world.ranks, key=self._world.ranks.__getitem__)

    def run(self) -> SynclineError | None:
        """Returns when the ranks have ended for good: None if all succeeded, otherwise why not."""
        try:
            with self._discovering():
                self._open(list(range(self._target())))
                return self._watch()
        finally:
            end_processes([*self._processes.values(), *self._left])
            del self._control
            self._stores.clear()

    def _watch(self) -> SynclineError | None:
        while not self._must_stop():
            codes = {slot: process.look() for slot, process in self._processes.items()}
            finished = [slot for slot, code in codes.items() if code == 0 and self._succeeded(slot)]
            dead = [slot for slot, code in codes.items() if code is not None and slot not in finished]
            living = [slot for slot, code in codes.items() if code is None]
            if dead:
                self._end_waits_on_store()
                error = self._verdict(dead)
                if isinstance(error, UsageError) or not living or finished:
                    return error
            elif not living:
                return None
            commits = self._commits(living)
            if living and len(commits) == len(living):
                if self._world.number >= self._elastic.max_resets:
                    return self._too_often(dead)
                self._reset(dead, commits)
            self._announce_hosts()
            time.sleep(_LOOK_SECONDS)
        return self._verdict(list(self._processes))

    def _end_waits_on_store(self) -> None:
        """The others hear of a lost rank by their connections to it. One that waits on the store for a rank that has
        died before it came hears of it only when the store goes, which torch tells in many words: so not at once."""
        self._first_death = self._first_death or time.monotonic()
        if time.monotonic() - self._first_death > _STORE_SECONDS:
            self._stores.clear()

    def _succeeded(self, slot: int) -> bool:
        if self._task.is_script:
            accept_exit(self._log_dir, slot)
        return has_finished(self._log_dir, slot)

    def _commits(self, living: list[int]) -> dict[int, int]:
        """Of those that have asked for the next world."""
        keys = {slot: asks_key(self._world.number, slot) for slot in living}
        return {slot: int(self._control.get(key)) for slot, key in keys.items() if self._control.check([key])}

    def _reset(self, dead: list[int], commits: dict[int, int]) -> None:
        ranks = self._world.ranks
        newest = min(commits, key=lambda slot: (-commits[slot], ranks[slot]))
        staying = [newest, *sorted(set(commits) - {newest}, key=ranks.__getitem__)][: self._target()]
        free = (slot for slot in range(self._target() + len(staying)) if slot not in staying)
        slots = staying + [next(free) for _ in range(self._target() - len(staying))]
        errors = [self._verdict([slot]) for slot in dead]
        # Its first line: the whole traceback belongs to the end of a run.
        words = [f"[rank {error.rank}] {error.message.splitlines()[0]}" for error in errors]
        what = " ".join(words) or f"There is room for {self._target()} ranks."
        print(
            f"syncline: {what} Going on with {len(slots)} ranks from the last commit, "
            f"reset {self._world.number + 1} of at most {self._elastic.max_resets}.",
            file=sys.stderr,
            flush=True,
        )
        self._left += [process for slot, process in self._processes.items() if slot not in staying]
        self._processes = {slot: self._processes[slot] for slot in staying}
        self._open(slots)

    def _open(self, slots: list[int]) -> None:
        """The next world: those who are there hear of it, the others are started."""
        # A store of its own for each world: keys of the last one would look like news.
        store = make_store(listening(LOOPBACK, 0))
        self._stores.append(store)
        self._announced, self._first_death = False, 0.0
        self._world = World(self._world.number + 1, {slot: rank for rank, slot in enumerate(slots)}, store.port)
        self._control.set(world_key(self._world.number), self._world.as_text())
        for slot in (slot for slot in slots if slot not in self._processes):
            place = self._world.placement(slot, self._run_id)
            variables = torchrun_variables(place, self._elastic.max_resets, self._log_dir)
            variables[ELASTIC_VARIABLE] = f"{self._control.port} {slot}"
            self._processes[slot] = start_process(self._task, slot, variables)

    def _verdict(self, slots: list[int]) -> SynclineError:
        error = judge_processes(self._task, {slot: self._processes[slot] for slot in slots})
        if error.rank is not None:
            error.rank = self._world.ranks[error.rank]
        return error

    def _target(self) -> int:
        return max(self._elastic.least, min(self._elastic.most, self._slots_wanted))

    def _announce_hosts(self) -> None:
        if not self._announced and self._target() != len(self._world.ranks):
            self._announced = True
            self._control.set(hosts_key(self._world.number), str(self._target()))

    def _too_often(self, dead: list[int]) -> SynclineError:
        limit = f"The ranks were reset {self._world.number} times, which is the limit."
        if not dead:
            return SynclineError(limit, action="Allow more with --reset-limit.")
        error = self._verdict(dead)
        error.action = f"{error.action} {limit}".strip()
        return error

    @contextmanager
    def _discovering(self) -> Iterator[None]:
        """The first answer counts at once, and an error in it ends the run; later ones are asked for beside it."""
        discover = self._elastic.discover
        if discover is None:
            yield
            return
        self._slots_wanted = discover()
        if self._slots_wanted < self._elastic.least:
            raise UsageError(
                f"there is room for {self._slots_wanted} ranks, and the run needs {self._elastic.least}.",
                action="Make room, or ask for a smaller --min-np.",
            )
        ended = threading.Event()

        def ask() -> None:
            while not ended.wait(_DISCOVER_SECONDS):
                try:
                    self._slots_wanted = discover()
                except SynclineError as error:  # it may answer again
                    print(f"syncline: {error}", file=sys.stderr, flush=True)

        thread = threading.Thread(target=ask, name="syncline-discovery", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
