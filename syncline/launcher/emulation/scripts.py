"""Run any script that torchrun could run, on the hosts of an emulated cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from syncline.launcher.adopt import Placement, torchrun_variables
from syncline.launcher.emulation import EmulatedCluster
from syncline.launcher.starting import listening, make_store

_PORT = 29500
_LOOK_SECONDS = 0.05
_ECHO_SECONDS = 1.0
_STOP_SECONDS = 8.0
_TAIL_LINES = 20


@dataclass(frozen=True)
class Failure:
    """The rank that failed first. `exit_code` is negative for a signal, as in subprocess."""

    host: int
    rank: int
    exit_code: int
    output: str = ""
    """The end of its stderr, if that was not on the terminal."""


def run_script(
    cluster: EmulatedCluster,
    command: Sequence[str],
    *,
    workers_per_host: int,
    log_dir: Path,
    show_all: bool,
    stop_requested: Callable[[], object],
) -> Failure | None:
    """The command as every rank, to its end on all hosts; None if all went well, or if it was asked to stop.

    Each rank finds what torchrun would have set. The first failure ends all ranks.
    """
    # As torchrun's agents do: a store that outlives every rank. Torch would print a C++ trace of each that leaves.
    quiet = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    store = cluster.call(0, _serve_store, cluster.address(0), env=quiet)
    ranks = [_Rank(cluster, command, place, log_dir, show_all) for place in _places(cluster, workers_per_host)]
    while not stop_requested():
        codes = [rank.process.poll() for rank in ranks]
        if any(codes) or None not in codes:
            break
        if store.poll() is not None:
            store.result()
        time.sleep(_LOOK_SECONDS)
    _wait(ranks, _ECHO_SECONDS)
    for rank in ranks:
        rank.process.terminate()
    _wait(ranks, _STOP_SECONDS)
    if stop_requested():
        return None
    failed = [rank for rank in ranks if rank.process.poll() != 0]
    # The others fail because of the first. One that lives on has not failed first; its cluster's end is its own.
    return min(failed, key=lambda rank: rank.process.ended).failure() if failed else None


class _Rank:
    """Output goes to files of the rank's own, and to the terminal too where all are shown.

    If not, rank 0 alone has the terminal itself: progress bars then work as ever.
    """

    def __init__(
        self, cluster: EmulatedCluster, command: Sequence[str], place: Placement, log_dir: Path, show_all: bool
    ) -> None:
        self._place = place
        self._copiers: list[threading.Thread] = []
        host, own = place.host_index, {"TORCHELASTIC_ERROR_FILE": str(log_dir / f"rank-{place.rank}.error.json")}
        environment = {**os.environ, **torchrun_variables(place, 0, log_dir), **own}
        stdout, self._stderr = (log_dir / f"rank-{place.rank}.{stream}.log" for stream in ("stdout", "stderr"))
        if show_all:
            pipe = subprocess.PIPE
            self.process = cluster.popen(host, command, env=environment, stdout=pipe, stderr=pipe)
            prefix = f"{cluster.name(host)} rank {place.rank}: ".encode()
            self._copy(self.process.stdout, stdout, sys.stdout.buffer, prefix)
            self._copy(self.process.stderr, self._stderr, sys.stderr.buffer, prefix)
        elif place.rank == 0:
            self.process = cluster.popen(host, command, env=environment)
        else:
            with stdout.open("wb") as out, self._stderr.open("wb") as err:
                self.process = cluster.popen(host, command, env=environment, stdout=out, stderr=err)

    def has_ended(self) -> bool:
        """Once all that it said is copied."""
        return self.process.poll() is not None and not any(copier.is_alive() for copier in self._copiers)

    def failure(self) -> Failure:
        code = self.process.poll()
        lines = self._stderr.read_text(errors="replace").splitlines() if self._stderr.is_file() else []
        output = "\n".join(lines[-_TAIL_LINES:])
        return Failure(self._place.host_index, self._place.rank, -signal.SIGKILL if code is None else code, output)

    def _copy(self, source: IO[bytes] | None, path: Path, terminal: IO[bytes], prefix: bytes) -> None:
        assert source is not None
        copier = threading.Thread(target=_copy_lines, args=(source, path, terminal, prefix), daemon=True)
        copier.start()
        self._copiers.append(copier)


def _copy_lines(source: IO[bytes], path: Path, terminal: IO[bytes], prefix: bytes) -> None:
    with source, path.open("wb") as file:
        for line in source:
            file.write(line)
            terminal.write(prefix + line.removesuffix(b"\n") + b"\n")
            terminal.flush()


def _wait(ranks: list[_Rank], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not all(rank.has_ended() for rank in ranks):
        time.sleep(_LOOK_SECONDS)


def _serve_store(address: str) -> None:
    _store = make_store(listening(address, _PORT))
    signal.pause()


def _places(cluster: EmulatedCluster, workers_per_host: int) -> list[Placement]:
    run_id = uuid.uuid4().hex[:12]
    return [
        Placement(
            rank=host * workers_per_host + local,
            world_size=cluster.num_hosts * workers_per_host,
            local_rank=local,
            local_world_size=workers_per_host,
            host_index=host,
            num_hosts=cluster.num_hosts,
            master_addr=cluster.address(0),
            master_port=_PORT,
            launcher="torchrun",
            run_id=run_id,
        )
        for host in range(cluster.num_hosts)
        for local in range(workers_per_host)
    ]
