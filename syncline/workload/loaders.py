"""Loader processes: a rank's batches made ahead of time by children that share its memory.

The children are forked, so they hold what the rank holds (images in memory, an index) without a copy. A batch is cut
into pieces; piece after piece goes to the next loader in turn, and comes back in a slot of memory that all of them
share. The pieces are put together in their order, so the batch is the same with any number of loaders.

A loader ends with its rank, however that ends: the kernel sends it a signal, and it looks for itself too.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from syncline.errors import SynclineError

LOOK_EVERY_S = 1.0
ALIGNMENT = 64
_PR_SET_PDEATHSIG = 1  # as in sys/prctl.h

Request = tuple[Any, ...]
"""What a piece is made from; only `make` knows what it means."""
Made = tuple[Tensor, ...]
Make = Callable[[Request], Made]


class LoaderLost(SynclineError):
    """A loader process ended although nobody asked it to."""


@dataclass
class Ticket:
    """A batch that was asked for: its pieces, where they are, and how they came back."""

    requests: list[Request]
    slots: dict[int, int] = field(default_factory=dict)
    """Piece to slot, for pieces that were sent."""
    ready: dict[int, list[_Layout]] = field(default_factory=dict)
    abandoned: bool = False

    @property
    def unsent(self) -> range:
        return range(len(self.slots), len(self.requests))


@dataclass(frozen=True)
class _Layout:
    """One tensor in a slot: where it starts and how it lies in memory, so that channels last stays channels last."""

    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Loaders:
    """A pool for one rank. `slot_bytes` holds the largest piece's tensors, each rounded up to ALIGNMENT bytes.

    All calls come from the thread that made the pool: its end is the loaders' end.
    """

    def __init__(self, make: Make, *, num_loaders: int, slot_bytes: int, num_slots: int) -> None:
        self.num_loaders = num_loaders
        self.num_samples = 0
        self.busy_s = 0.0
        """Seconds that loaders spent making what has come back, all loaders together."""
        self._slot_bytes = _aligned(slot_bytes)
        self._memory = mmap.mmap(-1, self._slot_bytes * num_slots)
        self._free = deque(range(num_slots))
        self._reserve = num_loaders
        self._open: dict[int, tuple[Ticket, int]] = {}
        self._turn = 0
        self._next_number = 0
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        for _ in range(num_loaders):
            self._start(make)

    def ask(self, requests: list[Request]) -> Ticket:
        """Have a batch made in the background, as far as there is room for it; `take` brings the rest."""
        ticket = Ticket(requests)
        self._receive(0)
        self._send(ticket, keep=self._reserve)
        return ticket

    def take(self, ticket: Ticket, put: Callable[[int, Made], None]) -> None:
        """Wait for the batch; `put` gets each piece's number and tensors, which it must copy before it returns."""
        placed = 0
        while placed < len(ticket.requests):
            self._send(ticket, keep=0)
            if not ticket.ready:
                self._receive(LOOK_EVERY_S)
            for piece in list(ticket.ready):
                put(piece, self._tensors(ticket.slots[piece], ticket.ready.pop(piece)))
                self._free.append(ticket.slots[piece])
                placed += 1

    def abandon(self, ticket: Ticket) -> None:
        """The batch is no longer wanted; its slots are free again once its pieces are back."""
        ticket.abandoned = True
        for piece in ticket.ready:
            self._free.append(ticket.slots[piece])
        ticket.ready.clear()

    def close(self) -> None:
        """End the loaders now; what is in the making is lost. Safe to call twice."""
        for process in self._processes:
            process.kill()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join()
            connection.close()
        self._processes, self._connections = [], []

    def _start(self, make: Make) -> None:
        ours, theirs = multiprocessing.Pipe()
        arguments = (make, self._memory, self._slot_bytes, theirs, [*self._connections, ours], os.getpid())
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_live, args=arguments, name="syncline-loader", daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a loader uses nothing that other threads may hold
            process.start()
        theirs.close()
        self._connections.append(ours)
        self._processes.append(process)

    def _send(self, ticket: Ticket, *, keep: int) -> None:
        for piece in ticket.unsent:
            if len(self._free) <= keep:
                return
            slot = self._free.popleft()
            ticket.slots[piece] = slot
            self._open[self._next_number] = (ticket, piece)
            with _loss_named(self):
                self._connections[self._turn].send((self._next_number, slot, ticket.requests[piece]))
            self._next_number += 1
            self._turn = (self._turn + 1) % self.num_loaders

    def _receive(self, timeout_s: float) -> None:
        """Note every piece that has come back; wait for the first one if need be."""
        answering = wait(self._connections, timeout_s)
        if not answering and any(process.exitcode is not None for process in self._processes):
            raise self.loss()
        for connection in answering:
            assert isinstance(connection, Connection)
            with _loss_named(self):
                while connection.poll():
                    self._note(*connection.recv())

    def _note(self, number: int, outcome: Any, seconds: float) -> None:
        if isinstance(outcome, Exception):
            raise outcome
        ticket, piece = self._open.pop(number)
        self.busy_s += seconds
        self.num_samples += outcome[0].shape[0]
        if ticket.abandoned:
            self._free.append(ticket.slots[piece])
        else:
            ticket.ready[piece] = outcome

    def _tensors(self, slot: int, layouts: list[_Layout]) -> Made:
        return tuple(_view(self._memory, slot * self._slot_bytes, layout) for layout in layouts)

    def loss(self) -> LoaderLost:
        """Which loader is gone, and how it ended."""
        for number, process in enumerate(self._processes):
            process.join(LOOK_EVERY_S)
            if process.exitcode is not None:
                how = f"exit code {process.exitcode}"
                if process.exitcode < 0:
                    how = f"killed by {signal.Signals(-process.exitcode).name}"
                action = "If memory is short, set loaders to a smaller number, or to 0."
                return LoaderLost(f"loader process {number} of this rank ended: {how}.", action=action)
        return LoaderLost("the connection to a loader process broke.")


@contextlib.contextmanager
def _loss_named(loaders: Loaders) -> Any:
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise loaders.loss() from None


def _live(
    make: Make, memory: mmap.mmap, slot_bytes: int, connection: Connection, others: list[Connection], rank_pid: int
) -> None:
    """A loader's life: make what is asked for until the rank closes the connection or is gone."""
    _end_with(rank_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the rank, which ends its loaders
    for other in others:
        other.close()
    torch.set_num_threads(1)  # the rank's compute threads were not forked
    warnings.simplefilter("ignore")  # Pillow warns of what is odd but readable
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            while not connection.poll(LOOK_EVERY_S):
                if os.getppid() != rank_pid:
                    os._exit(1)
            number, slot, request = connection.recv()
            started = time.perf_counter()
            try:
                outcome: Any = _store(make(request), memory, slot * slot_bytes, slot_bytes)
            except SynclineError as error:
                outcome = error
            except Exception:
                outcome = RuntimeError(f"a loader process failed:\n{traceback.format_exc()}")
            connection.send((number, outcome, time.perf_counter() - started))
    os._exit(0)


def _end_with(rank_pid: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != rank_pid:
        os._exit(1)


def _store(made: Made, memory: mmap.mmap, start: int, limit: int) -> list[_Layout]:
    layouts = []
    place = start
    for tensor in map(_dense, made):
        size = tensor.numel() * tensor.element_size()
        if place + size > start + limit:
            raise ValueError(f"a piece of {size} bytes does not fit into a slot of {limit} bytes")
        layout = _Layout(place - start, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
        _view(memory, start, layout).copy_(tensor)
        layouts.append(layout)
        place += _aligned(size)
    return layouts


def _dense(tensor: Tensor) -> Tensor:
    """Without gaps, in its own order of dimensions where that is one of the usual two."""
    is_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor if is_last else tensor.contiguous()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _view(memory: mmap.mmap, start: int, layout: _Layout) -> Tensor:
    size = int(np.prod(layout.shape, dtype=np.int64)) * layout.dtype.itemsize
    raw: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8, size, start + layout.start)
    return torch.from_numpy(raw).view(layout.dtype).as_strided(layout.shape, layout.stride)
