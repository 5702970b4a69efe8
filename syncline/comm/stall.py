"""Where a rank stands when it waits for long, published on the store for the others to read.

A thread looks twice a second; a wait of less than a second costs nothing but two assignments.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

STALLED_AFTER_S = 1.0
LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class Place:
    """A call of a rank: the same on every rank that takes part in it."""

    scope: str
    channel: str
    """'all', or '0>1' for what rank 0 sends to rank 1."""
    index: int
    """Count of calls in this scope and channel, from 0."""
    visit: int
    """How many times this scope came to this call, from 0."""

    def __str__(self) -> str:
        scope = f" of {self.scope!r}" if self.scope else ""
        return f"call {self.index}{scope}"


@dataclass(frozen=True)
class Stall:
    place: Place
    signature: str


class StallBoard:
    """One rank's view of who is stalled where."""

    def __init__(self, store: Store, rank: int) -> None:
        self._rank = rank
        self._own_store = store.clone()  # type: ignore[attr-defined]  # the main thread may be blocked in a wait on the other one
        self._store = store
        self._waiting: tuple[float, Place, Callable[[], str]] | None = None
        self._published: Place | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def enter(self, place: Place, signature: Callable[[], str]) -> None:
        """A wait begins. Plain calls and not a context manager: this is on the path of every message."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="syncline-stall", daemon=True)
            self._thread.start()
        self._waiting = (time.monotonic(), place, signature)

    def leave(self) -> None:
        """The wait is over. Not called after an error: a rank that gave up here is not one that never came."""
        self._waiting = None

    def of(self, rank: int) -> Stall | None:
        """What a rank was last seen waiting for, if it still is."""
        key = f"stalled/{rank}"
        if not self._store.check([key]):
            return None
        state = json.loads(self._store.get(key))
        return Stall(Place(**state["place"]), state["signature"]) if state else None

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            waiting = self._waiting
            stalled = waiting is not None and time.monotonic() - waiting[0] > STALLED_AFTER_S
            place = waiting[1] if waiting is not None and stalled else None
            if place != self._published:
                self._published = place
                state = asdict(Stall(place, waiting[2]())) if waiting is not None and place is not None else None
                try:
                    self._own_store.set(f"stalled/{self._rank}", json.dumps(state))
                except dist.DistError:
                    return  # the store is gone, and so is anyone who would read it
