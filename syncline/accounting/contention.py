"""Compute slowed by communication: what phases cost in real steps against what they cost when nothing is sent.

On a CPU, communication threads take cores and memory bandwidth from backward. Calibration steps, in which nothing is
sent (training/calibrate.py), give the bare times; the difference is contention. Reports show it next to hidden
communication, which is not free if it slows compute.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from syncline.accounting.breakdown import COMPUTE
from syncline.accounting.statistics import spread
from syncline.events import Events
from syncline.units import format_seconds

Times = Mapping[int, Mapping[str, Sequence[float]]]
"""By rank and phase: the seconds of each step."""


@dataclass(frozen=True)
class Slowdown:
    """One phase: medians over steps, then over ranks, in seconds."""

    bare_s: float
    real_s: float
    noise_s: float
    """The larger of the two spreads: a difference inside it is none."""

    @property
    def slowed_s(self) -> float:
        return self.real_s - self.bare_s

    @property
    def is_real(self) -> bool:
        return self.slowed_s > self.noise_s


@dataclass(frozen=True)
class Contention:
    phases: dict[str, Slowdown]
    steps: int
    """Calibration steps of each rank."""

    @property
    def slowed_s(self) -> float:
        """What compute lost to communication, in the phases where it is more than noise."""
        return sum(slowdown.slowed_s for slowdown in self.phases.values() if slowdown.is_real)


def bare_times(events: Events) -> dict[int, dict[str, list[float]]]:
    """The calibration steps in the logs."""
    times: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for rank, record in events.of_kind("calibration"):
        for phase in COMPUTE:
            if isinstance(record.get(phase), int):
                times[rank][phase].append(record[phase] / 1e9)
    return {rank: dict(phases) for rank, phases in times.items()}


def contention(bare: Times, real: Times) -> Contention | None:
    """None where the same ranks did not do both: `single` alone in a comparison, a run without calibration."""
    if not bare or set(bare) != set(real):
        return None
    phases = {}
    for phase in COMPUTE:
        if all(times[rank].get(phase) for times in (bare, real) for rank in bare):
            phases[phase] = Slowdown(
                bare_s=_middle(bare, phase),
                real_s=_middle(real, phase),
                noise_s=max(_noise(bare, phase), _noise(real, phase)),
            )
    if not phases:
        return None
    return Contention(phases, steps=min(len(seconds) for times in bare.values() for seconds in times.values()))


def _middle(times: Times, phase: str) -> float:
    return statistics.median(statistics.median(by_phase[phase]) for by_phase in times.values())


def _noise(times: Times, phase: str) -> float:
    return statistics.median(spread(by_phase[phase]) for by_phase in times.values())


def describe(measured: Contention | None, *, hidden_s: float, compute: str = "real") -> str:
    """One sentence for `explain`, beside hidden communication."""
    if compute != "real":
        return f"Compute is {compute}, so communication cannot slow it down: contention was not measured."
    if measured is None:
        return "Contention was not measured: these ranks took no calibration steps (measure.calibration)."
    slowed = {phase: slowdown for phase, slowdown in measured.phases.items() if slowdown.is_real}
    if not slowed:
        return (
            "Communication does not slow compute: no difference from the calibration steps, in which nothing is sent."
        )
    parts = [
        f"{phase} by {format_seconds(slowdown.slowed_s)} ({format_seconds(slowdown.bare_s)} bare, "
        f"{format_seconds(slowdown.real_s)} in steps)"
        for phase, slowdown in slowed.items()
    ]
    opening = "Hidden communication is not free: compute is" if hidden_s > 0 else "Compute is"
    return f"{opening} slower than when nothing is sent: {', '.join(parts)}."
