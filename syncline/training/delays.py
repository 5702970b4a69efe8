"""Delays on purpose: one rank sleeps in one phase, so that people and tests can see what a slow rank does."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType

from syncline.plan import Plan
from syncline.spans import Span


@dataclass(frozen=True)
class Delays:
    """What this rank suffers: a pause at the start of a phase, in every n-th step."""

    phase: str = ""
    seconds: float = 0.0
    every: int = 1

    def pause_s(self, phase: str, step: int) -> float:
        return self.seconds if phase == self.phase and step >= 0 and step % self.every == 0 else 0.0


NO_DELAYS = Delays()


def delays_of(plan: Plan, rank: int) -> Delays:
    inject = plan.inject
    return Delays(inject.phase, inject.delay_ms / 1e3, inject.every) if rank == inject.rank else NO_DELAYS


class Delayed:
    """A span that begins with a pause: the pause counts as part of the phase."""

    def __init__(self, span: Span, seconds: float) -> None:
        self._span = span
        self._seconds = seconds

    def __enter__(self) -> None:
        self._span.__enter__()
        time.sleep(self._seconds)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._span.__exit__(kind, error, trace)
