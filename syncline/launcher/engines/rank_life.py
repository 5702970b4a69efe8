"""One process of an engine, from its first word at the desk to its last: wait for a rank, take its place, run the
function, say how it went.

The process is the engine's: it keeps the engine's own environment, and a function may use the engine from inside.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from syncline.launcher import stacks, watch
from syncline.launcher.engines.desk import PIECE_BYTES, STDERR, STDOUT, STREAMS, WORDS, report_to
from syncline.launcher.engines.seam import Order
from syncline.launcher.outcome import Outcome, raising
from syncline.launcher.route import interface_of, local_address
from syncline.launcher.starting import listening, make_store
from syncline.launcher.wire import Connection, pack, unpack
from syncline.machine import keep_freed_memory

_STOPPED = 128 + 15


@dataclass(frozen=True)
class Work:
    """What the launcher sends once every process has reported: who this one is, and what to do."""

    rank: int
    environment: Mapping[str, str]
    threads: int
    folder: str
    """The launcher's current folder."""
    search: list[str]
    """Where the launcher finds modules."""
    log_dir: str
    payload: bytes


def live(order: Order, number: int, host: str) -> None:
    """Called once in each process that an engine starts. Returns when every rank has succeeded; otherwise it ends the
    process, so that the other ranks and the engine hear of it at once."""
    words = _report(order, number, WORDS)
    address = local_address(order.address, order.port)
    with listening(address, 0) as listener:
        sees_folder = not order.mark or Path(order.mark).exists()
        words.send(
            {
                "say": "hello", "host": host, "name": socket.gethostname(), "address": address,
                "port": listener.getsockname()[1], "sees_folder": sees_folder,
            }
        )  # fmt: skip
        received = words.receive()
        if received is None or received[0]["say"] != "work":
            return  # the launcher does not need this process any more
        work: Work = unpack(received[1])
        all_done = threading.Event()
        threading.Thread(target=_obey, args=(words, all_done), name="syncline-orders", daemon=True).start()
        with _output(order, number), _surroundings(work, interface_of(address)):
            store = make_store(listener) if work.rank == 0 else None  # before it loads what takes long
            if sees_folder:
                stacks.write_on_signal(Path(work.log_dir), work.rank)
            outcome = _outcome(work, words)
            stacks.forget_empty()
    words.send({"say": "outcome", "outcome": asdict(replace(outcome, time=time.time()))})
    if outcome.state != "finished":
        watch.leave(1)
    all_done.wait()  # rank 0 serves the store, and another rank's failure ends all
    words.close()
    del store


def _report(order: Order, number: int, stream: int) -> Connection:
    return report_to(order.address, order.port, order.token, STREAMS * number + stream)


def _obey(words: Connection, all_done: threading.Event) -> None:
    """In a thread of its own: the main thread may be stuck in a collective."""
    received = words.receive()
    if received is not None and received[0]["say"] == "bye":
        all_done.set()
        return
    watch.leave(1 if received is None else _STOPPED, callbacks=True)  # told to stop, or the launcher is gone


def _outcome(work: Work, words: Connection) -> Outcome:
    outcome = Outcome(rank=work.rank, pid=os.getpid())
    try:
        import torch

        torch.set_num_threads(work.threads)
        keep_freed_memory()
        function, args = unpack(work.payload)
        result = None
        try:
            result = function(*args)
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise
        data = memoryview(pack(result))
        for start in range(0, len(data), PIECE_BYTES):
            words.send({"say": "result"}, bytes(data[start : start + PIECE_BYTES]))
    except BaseException as error:
        return raising(outcome, error)
    return replace(outcome, state="finished")


@contextlib.contextmanager
def _surroundings(work: Work, interface: str) -> Iterator[None]:
    """The rank's variables and the launcher's folder and modules, as far as they are here; all as before afterwards,
    because an engine may use its processes again."""
    before, path, folder = dict(os.environ), [*sys.path], os.getcwd()
    # What is set on this machine is its owner's choice.
    own = {name: interface for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if not os.environ.get(name)}
    os.environ.update({**own, **work.environment})
    sys.path += [entry for entry in work.search if entry not in sys.path and Path(entry).exists()]
    with contextlib.suppress(OSError):
        os.chdir(work.folder)
    try:
        yield
    finally:
        os.chdir(folder)
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _output(order: Order, number: int) -> Iterator[None]:
    """Standard output and error go to the launcher, by descriptor: also what C code and child processes say."""
    kept = {1: os.dup(1), 2: os.dup(2)}
    for descriptor, stream in ((1, STDOUT), (2, STDERR)):
        with _report(order, number, stream).take() as connected:
            os.dup2(connected.fileno(), descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        yield
    finally:
        for descriptor, old in kept.items():
            with contextlib.suppress(OSError, ValueError):
                (sys.stdout, sys.stderr)[descriptor - 1].flush()
            os.dup2(old, descriptor)
            os.close(old)
