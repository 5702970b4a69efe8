"""Who waits for whom: a warning that names the rank, what it did last, and where it is now.

Ranks are asked every few seconds what they do; an answer costs nothing that could be measured. A name that some ranks
have submitted, or a step that some ranks wait in, for longer than HOROVOD_STALL_CHECK_TIME_SECONDS is told on stderr,
then again after twice the time. HOROVOD_STALL_SHUTDOWN_TIME_SECONDS ends the run; 0, the default, never does: minutes
of evaluation on one rank are normal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from syncline.horovod.matching import Entry, Matching, describe

CHECK_S = 5.0


class Stalls:
    """On rank 0. Not locked: its owner is."""

    def __init__(
        self,
        matching: Matching,
        send: Callable[[Iterable[int], dict[str, Any]], None],
        end_all: Callable[[str], None],
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._matching, self._send, self._end_all = matching, send, end_all
        self._say = say or (lambda line: print(line, file=sys.stderr, flush=True))
        self.check_s = float(os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS") or CHECK_S)
        self._limit_s = float(os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS") or 0)
        self._off = os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "") not in ("", "0")
        self._status: dict[int, dict[str, Any]] = {}
        self._steps: dict[str, Entry] = {}
        """Steps that ranks wait in, by name."""

    @property
    def pause_s(self) -> float:
        return max(0.05, self.check_s / 2)

    def look(self, now: float) -> None:
        """Every few seconds: warn of what has waited for too long, and ask all ranks what they do."""
        if self._off:
            return
        for key, entry in list(self._matching.waiting.items()):
            if key in self._matching.waiting:  # not if it was the other side of a name before
                self._look_at_name(key, entry, now)
        for step, entry in self._steps.items():
            missing = [rank for rank in self._matching.sets[0] if rank not in entry.requests]
            missing = [rank for rank in missing if rank not in self._matching.joined]
            if missing:
                self._warn(step, entry, missing, now)
        self._send(self._matching.sets[0], {"say": "status"})

    def on_status(self, rank: int, status: dict[str, Any], now: float) -> None:
        self._status[rank] = {**status, "heard": now}
        for entry in self._steps.values():
            entry.requests.pop(rank, None)
        if status["waits"]:
            self._steps.setdefault(status["waits"], Entry(now)).requests[rank] = {}
        self._steps = {step: entry for step, entry in self._steps.items() if entry.requests}

    def _look_at_name(self, key: tuple[int, str], entry: Entry, now: float) -> None:
        waited_s = now - entry.since
        missing = self._matching.missing(key)
        if waited_s > self.check_s and (other := self._matching.crossed(key)) is not None:
            mine, theirs = entry.requests, self._matching.waiting[other].requests
            sides = [f"rank {rank} submitted {describe(request)}" for rank, request in {**mine, **theirs}.items()]
            name = next(iter(mine.values()))["name"]
            for answer in self._matching.fail(
                (key, other), f"Mismatched operations of {name!r}: {', '.join(sides)}."
            ):
                self._send(answer["ranks"], answer)
        elif self._limit_s and waited_s > self._limit_s:
            self._end_all(f"{self._sentence(key[1], entry, missing, now)} The limit is {self._limit_s:g} s.")
            del self._matching.waiting[key]
        else:
            self._warn(key[1], entry, missing, now)

    def _warn(self, what: str, entry: Entry, missing: list[int], now: float) -> None:
        waited_s = now - entry.since
        if waited_s >= self.check_s and waited_s >= 2 * entry.warned_at:
            entry.warned_at = waited_s
            self._say(f"syncline.horovod: {self._sentence(what, entry, missing, now)}")

    def _sentence(self, what: str, entry: Entry, missing: list[int], now: float) -> str:
        here = ", ".join(str(rank) for rank in sorted(entry.requests))
        of = "; ".join(self._doing(rank, now) for rank in missing)
        return f"rank {here} has waited {now - entry.since:.0f} s in {what} for {of}."

    def _doing(self, rank: int, now: float) -> str:
        status = self._status.get(rank)
        if status is None:
            return f"rank {rank}"
        ago_s = status["ago"] + now - status["heard"]
        at = f" and is at {status['at']}" if status["at"] else ""
        return f"rank {rank}, which did {status['last']} {ago_s:.0f} s ago{at}"
