"""The launcher's side of ranks on an engine: place them, watch them, name the one that failed, start them again."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from syncline.errors import HostError, SynclineError, UsageError
from syncline.launcher.adopt import HOSTS_VARIABLE, Placement, torchrun_variables
from syncline.launcher.engines.desk import STDOUT, Desk
from syncline.launcher.engines.placing import placements
from syncline.launcher.engines.rank_life import Work
from syncline.launcher.engines.seam import Engine, Order
from syncline.launcher.here.host_ranks import make_room, restart_line
from syncline.launcher.outcome import Ending, Outcome, Patience, judge, keep_outcome, output_files
from syncline.launcher.starting import check_numbers, log_folder, packed, raise_if_interrupted, signals_noted
from syncline.launcher.wire import pack, unpack
from syncline.machine import default_threads

_LOOK_SECONDS = 0.05
_STOP_SECONDS = 5.0
_LOST = -9
"""Stands for the exit code of a process that is gone without a word."""
_ITS_END = "its process is gone without a word: it was killed, its machine ran out of memory, or its node was lost."


def run_on(
    engine: Engine,
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    workers: int,
    log_dir: Path | None,
    threads: int | None = None,
    hosts: int | None = None,
    max_restarts: int = 0,
    needs_folder: bool = False,
) -> list[Any]:
    """`function(*args)` in each rank; results by rank. Raises RankFailed, Interrupted, or a rank's UsageError.

    As `here.run_ranks`, but the processes are the engine's. With `needs_folder`, those that see `log_dir` write their
    stacks there.
    """
    check_numbers(workers, threads)
    with signals_noted() as signals, log_folder(log_dir, range(workers)) as folder:
        payload = packed(function, tuple(args))
        threads = threads or default_threads(workers)
        run_id = uuid.uuid4().hex[:12]
        for number in itertools.count():
            raise_if_interrupted(signals)
            for rank in range(workers):
                make_room(folder, rank)
            start = _Start(engine, folder, signals, workers=workers, keeps_logs=log_dir is not None)
            try:
                with _mark(folder if needs_folder else None) as mark:
                    try:
                        start.begin(threads, hosts, mark)
                    except (HostError, UsageError):
                        raise_if_interrupted(signals)
                        raise
                    start.hand_out(payload, threads, run_id=run_id, restart=number, max_restarts=max_restarts)
                error = start.watch()
            finally:
                start.end()
            raise_if_interrupted(signals)
            if error is None:
                return start.results()
            if isinstance(error, UsageError) or number >= max_restarts:
                raise error
            print(restart_line(error, number + 1, max_restarts), file=sys.stderr, flush=True)
    raise AssertionError("a run ends with a result or an error")


class _Start:
    """One start of all ranks."""

    def __init__(self, engine: Engine, folder: Path, signals: list[int], *, workers: int, keeps_logs: bool) -> None:
        self._engine = engine
        self._folder = folder
        self._signals = signals
        self._keeps_logs = keeps_logs
        self._places: Mapping[int, Placement] = {}
        self._output = _Output(folder)
        self._desk = Desk(engine.address, workers, self._output.take)
        self._patience = Patience(folder)

    def begin(self, threads: int, hosts: int | None, mark: str) -> None:
        """Have the engine start the processes, and wait until all of them have reported."""
        desk = self._desk
        self._engine.start(Order(self._engine.address, desk.port, desk.token, len(desk.guests), threads, hosts, mark))
        deadline = time.monotonic() + self._engine.start_timeout_s
        while any(guest.seat is None for guest in desk.guests):
            lost = self._engine.lost()
            silent = [number for number, guest in enumerate(desk.guests) if guest.seat is None]
            for number in set(silent) & set(lost):
                raise HostError(f"{self._engine.name} could not start worker {number}: {lost[number]}")
            if self._signals:
                return
            if time.monotonic() > deadline:
                raise HostError(
                    f"{len(silent)} of {len(desk.guests)} workers of {self._engine.name} did not report within "
                    f"{self._engine.start_timeout_s:g} s.",
                    action=f"Check that its nodes can reach {self._engine.address} port {desk.port}, this process.",
                )
            time.sleep(_LOOK_SECONDS)

    def hand_out(self, payload: bytes, threads: int, *, run_id: str, restart: int, max_restarts: int) -> None:
        """Each process gets its rank."""
        seats = [guest.seat for guest in self._desk.guests if guest.seat is not None]
        if len(seats) < len(self._desk.guests):
            return  # interrupted
        self._places = placements(seats, run_id=run_id, restart=restart, launcher=self._engine.name)
        self._output.ranks = {number: place.rank for number, place in self._places.items()}
        for number, place in self._places.items():
            work = Work(
                place.rank, self._environment(place, threads, max_restarts), threads, os.getcwd(),
                [entry for entry in sys.path if entry], str(self._folder), payload,
            )  # fmt: skip
            self._desk.send(number, {"say": "work"}, pack(work))

    def watch(self) -> SynclineError | None:
        """Until all ranks have succeeded, or why they will not."""
        if not self._places:
            return None
        while not self._signals:
            codes = self._exit_codes()
            if self._patience.is_over(codes):
                self._ask_all_to_stop()
                return self._judge(codes)
            if all(code == 0 for code in codes.values()):
                for number in self._places:
                    self._desk.send(number, {"say": "bye"})
                return None
            time.sleep(_LOOK_SECONDS)
        self._ask_all_to_stop()
        return None

    def results(self) -> list[Any]:
        by_rank = {self._places[number].rank: guest.result for number, guest in enumerate(self._desk.guests)}
        return [unpack(bytes(by_rank[rank])) for rank in sorted(by_rank)]

    def end(self) -> None:
        """Nothing of this start lives on, whatever happens."""
        try:
            self._desk.ask_to_stop()
            self._desk.wait_for_ends(_STOP_SECONDS)
        finally:
            self._engine.stop()
            self._desk.close()
            self._output.close()

    def _environment(self, place: Placement, threads: int, max_restarts: int) -> dict[str, str]:
        users = {name: text for name, text in os.environ.items() if name.startswith("SYNCLINE_")}
        given = torchrun_variables(place, max_restarts, self._folder)
        del given["TORCHELASTIC_ERROR_FILE"]  # of a folder that may not be there
        # A rank's name tells its host only where all have equally many: it counts from the number of its own.
        even = place.local_world_size * place.num_hosts == place.world_size
        names = {HOSTS_VARIABLE: " ".join(place.host_names)} if even and place.num_hosts > 1 else {}
        return {**users, **given, **names, "NODE_RANK": str(place.host_index), "OMP_NUM_THREADS": str(threads)}

    def _exit_codes(self) -> dict[int, int | None]:
        """By rank: 0 for one that has succeeded, None for those that live. Writes what they said to their files."""
        codes: dict[int, int | None] = {}
        for number, place in self._places.items():
            guest = self._desk.guests[number]
            is_gone = guest.is_gone
            if guest.outcome is not None:
                outcome = Outcome(**guest.outcome)
                keep_outcome(self._folder, outcome)
                codes[place.rank] = 0 if outcome.state == "finished" else 1
            else:
                codes[place.rank] = _LOST if is_gone else None
        return codes

    def _ask_all_to_stop(self) -> None:
        self._desk.ask_to_stop()
        self._desk.wait_for_ends(_STOP_SECONDS)

    def _judge(self, codes: Mapping[int, int | None]) -> SynclineError:
        lost = self._engine.lost()
        endings = {}
        for number, place in self._places.items():
            code = codes[place.rank]
            words = (lost.get(number) or _ITS_END) if code == _LOST else ""
            asked = code is None
            endings[place.rank] = Ending(code, self._desk.guests[number].last_alive, asked, asked, words)
        error = judge(self._folder, endings, keeps_logs=self._keeps_logs)
        for place in self._places.values():
            if place.rank == error.rank:
                error.host = place.host_names[place.host_index]
        return error


class _Output:
    """What processes write: rank 0's to the terminal, that of the others to their files beside the outcomes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, BinaryIO] = {}
        self._lock = threading.Lock()
        self.ranks: Mapping[int, int] = {}
        """By number of the process; none of them writes before they are known."""

    def take(self, number: int, stream: int, data: bytes) -> None:
        with self._lock:
            files = output_files(self._folder, self.ranks[number])
            if not files:
                terminal = sys.stdout if stream == STDOUT else sys.stderr
                terminal.write(data.decode(errors="replace"))
                terminal.flush()
                return
            path = files[0 if stream == STDOUT else 1]
            if path not in self._files:
                self._files[path] = path.open("wb")
            self._files[path].write(data)
            self._files[path].flush()

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                file.close()


@contextlib.contextmanager
def _mark(folder: Path | None) -> Iterator[str]:
    """A file for a moment, by which processes know whether they have the launcher's file system."""
    if folder is None:
        yield ""
        return
    path = folder / f".here-{uuid.uuid4().hex}"
    path.touch()
    try:
        yield str(path)
    finally:
        path.unlink(missing_ok=True)
