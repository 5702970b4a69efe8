"""Sanity rules: what makes a result doubtful, as warnings next to it.

Each rule is a pure function from numbers to a sentence, or None where nothing is wrong.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from syncline.accounting.statistics import spreads_overlap
from syncline.marks import Mark
from syncline.units import format_seconds

FEWEST_STEPS = 5
RANKS_DISAGREE = 0.10
OTHER_LOAD = 0.10
WARM_UP_FACTOR = 1.5
UNEVEN = 0.2


@dataclass(frozen=True)
class Warning:
    rule: str
    text: str


class Measured(Protocol):
    """What the rules look at; a study's row is one."""

    @property
    def point(self) -> Mapping[str, Any]: ...
    @property
    def seconds(self) -> Sequence[float]: ...
    @property
    def figures(self) -> Mapping[str, Any]: ...
    @property
    def marks(self) -> tuple[Mark, ...]: ...


def efficiency_above_one(efficiency: float, what: str) -> Warning | None:
    if efficiency <= 1.0:
        return None
    return Warning(
        "efficiency", f"{what}: {efficiency:.0%} efficiency is more than the workers can give; "
        "suspect the baseline (other threads, colder caches, another load)."
    )  # fmt: skip


def ranks_disagree(by_rank: Sequence[float], what: str) -> Warning | None:
    """Ranks of one synchronous step wait for each other, so their step times must agree."""
    if len(by_rank) < 2 or max(by_rank) <= min(by_rank) * (1 + RANKS_DISAGREE):
        return None
    low, high = min(range(len(by_rank)), key=by_rank.__getitem__), max(range(len(by_rank)), key=by_rank.__getitem__)
    return Warning(
        "ranks disagree", f"{what}: rank {low} measured {format_seconds(by_rank[low])} a step and rank {high} "
        f"{format_seconds(by_rank[high])}; a synchronous step has one length, so one of them leaves something out."
    )  # fmt: skip


def wrong_denominator(counted: int, ran: int, what: str) -> Warning | None:
    """An average over another number than the iterations that ran (after the warm-up)."""
    if counted == ran:
        return None
    return Warning("denominator", f"{what}: the average divides by {counted}, but {ran} iterations ran.")


def warm_up_inside(seconds: Sequence[float], what: str) -> Warning | None:
    """The first timed step is much slower than the rest: the window starts too early."""
    if len(seconds) < 3:
        return None
    rest = list(seconds[1:])
    middle = statistics.median(rest)
    if seconds[0] <= WARM_UP_FACTOR * middle or seconds[0] <= max(rest):
        return None
    return Warning(
        "warm-up", f"{what}: the first timed step took {format_seconds(seconds[0])}, the others "
        f"{format_seconds(middle)}: the timed steps include a warm-up step."
    )  # fmt: skip


def inside_spread(first: Sequence[float], second: Sequence[float], names: tuple[str, str]) -> Warning | None:
    """The difference of two medians is smaller than what each varies by itself."""
    if not first or not second:
        return None
    if not spreads_overlap(first, second):
        return None
    difference = abs(statistics.median(first) - statistics.median(second))
    return Warning(
        "spread", f"{names[0]} and {names[1]} differ by {format_seconds(difference)}, less than their spread: "
        "no difference."
    )  # fmt: skip


def too_few_steps(counted: int, what: str) -> Warning | None:
    if counted >= FEWEST_STEPS:
        return None
    steps = "1 timed step" if counted == 1 else f"{counted} timed steps"
    return Warning("too few steps", f"{what}: {steps}; time at least {FEWEST_STEPS} before you trust a median.")


def left_out(outliers: int, counted: int, what: str) -> Warning | None:
    """Parts and means of a step do not hold the outliers; the median hardly notices them."""
    if not outliers:
        return None
    steps = f"{outliers} of {counted} steps"
    return Warning("outliers", f"{what}: {steps} took more than twice the usual time; parts and mean leave them out.")


def uneven_steps(median_s: float, mean_s: float, what: str) -> Warning | None:
    """Two tables of a report then give two numbers for a step."""
    if mean_s <= median_s * (1 + UNEVEN):
        return None
    return Warning(
        "uneven steps", f"{what}: steps differ so much that the mean, to which the parts add up, is "
        f"{format_seconds(mean_s)} and the median {format_seconds(median_s)}."
    )  # fmt: skip


def other_load(share: float, what: str) -> Warning | None:
    """`share` of the machine's core time went to processes, or virtual machines, that are not the run's."""
    if share <= OTHER_LOAD:
        return None
    others = "other processes or virtual machines"
    return Warning("other load", f"{what}: {share:.0%} of the cores' time went to {others} during the run.")


def unreal_time(mark: str, what: str) -> Warning:
    return Warning("unreal time", f"{what}: {mark}.")


def check_rows(rows: Iterable[Measured]) -> list[Warning]:
    """Every rule that concerns single rows, each said once for all rows that it concerns."""
    rows = list(rows)
    several = len({row.point.get("model") for row in rows}) > 1
    by_rule: dict[str, list[tuple[str, Warning]]] = {}
    for row in rows:
        name = _name(row, model=several)
        for warning in _check(row, name):
            by_rule.setdefault(warning.rule, []).append((name, warning))
    return [merged(cases) for cases in by_rule.values()]


def _check(row: Measured, what: str) -> list[Warning]:
    figures = row.figures
    warnings: list[Warning | None] = []
    if row.seconds:
        warnings += [too_few_steps(len(row.seconds), what), warm_up_inside(row.seconds, what)]
    if "step_by_rank" in figures:
        warnings.append(ranks_disagree(figures["step_by_rank"], what))
    if figures.get("other_load") is not None:
        warnings.append(other_load(figures["other_load"], what))
    warnings.append(left_out(figures.get("outliers", 0), len(row.seconds), what))
    if row.seconds and sum(figures.get("step_by_rank", ())):
        mean = statistics.fmean(figures["step_by_rank"])
        warnings.append(uneven_steps(statistics.median(row.seconds), mean, what))
    if "counted" in figures and row.seconds:
        warnings.append(wrong_denominator(figures["counted"], len(row.seconds), what))
    warnings += [unreal_time(mark.text, what) for mark in row.marks]
    return [warning for warning in warnings if warning is not None]


def merged(cases: Sequence[tuple[str, Warning]]) -> Warning:
    """The first case in full; the others by name."""
    first = cases[0][1]
    others = list(dict.fromkeys(name for name, _ in cases[1:] if name != cases[0][0]))
    if not others:
        return first
    more = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
    return Warning(first.rule, f"{first.text} The same applies to {more}.")


def _name(row: Measured, *, model: bool = False) -> str:
    """What tells this row from the others, in a few words."""
    words = [str(row.point["method"])] if "method" in row.point else []
    words = [f"{row.point['model']} with {words[0]}"] if model and words and "model" in row.point else words
    if "workers" in row.point:
        words.append(f"{row.point['workers']} workers" if row.point["workers"] != 1 else "1 worker")
    return " on ".join(words) or "this row"
