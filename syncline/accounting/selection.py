"""Which steps of a run are taken apart: all of them, or of a long run enough to know the means well.

How long a step took is known of every step. Where its time went is found step by step, which takes about a
millisecond each; so of a run of a night, stretches of steps spread over the whole of it are taken apart, and the
outliers that cost most, wherever they are.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from syncline.accounting.breakdown import RankBreakdown, break_down
from syncline.accounting.outliers import is_outlier
from syncline.events import Step, Steps
from syncline.units import format_seconds

MOST = 2000
"""Steps that are taken apart: with steps that differ by a tenth, their mean is known to 0.3 %."""
STRETCH = 50
"""Steps in a row: what held a rank up may be found in the step before."""
MOST_OUTLIERS = 500


@dataclass(frozen=True)
class Looked:
    """Steps that were taken apart, in order, and what each one's time went to."""

    steps: list[Step]
    breakdowns: list[Mapping[int, RankBreakdown]]
    is_out: list[bool]
    slow: Sequence[tuple[Step, Mapping[int, RankBreakdown]]]
    """Outliers, of these steps and of all others."""
    usual_s: float
    """The median of all steps but outliers."""
    note: str
    """Which steps these are, where they are not all; else empty."""

    @property
    def usual(self) -> list[int]:
        """Indices of those that are no outliers."""
        return [index for index, is_out in enumerate(self.is_out) if not is_out]


def look_at(steps: Steps) -> Looked:
    times = steps.longest.tolist()
    is_out = is_outlier(times)
    indices = chosen(len(steps))
    apart = {index: (step := steps[index], break_down(step)) for index in indices}
    slow = [index for index, out in enumerate(is_out) if out]
    dearest = sorted(sorted(slow, key=lambda index: -times[index])[:MOST_OUTLIERS] if len(steps) > MOST else slow)
    outliers = [apart[index] if index in apart else (steps[index], break_down(steps[index])) for index in dearest]
    usual_s = statistics.median(time for time, out in zip(times, is_out, strict=True) if not out) / 1e9
    return Looked(
        [apart[index][0] for index in indices], [apart[index][1] for index in indices],
        [is_out[index] for index in indices], outliers, usual_s, _note(steps, len(indices), len(slow)),
    )  # fmt: skip


def chosen(count: int) -> list[int]:
    """Indices, in order: one stretch at random in each equal part of the run, so that no rhythm is missed or caught
    each time. The same for the same run."""
    if count <= MOST:
        return list(range(count))
    rng, parts = random.Random(count), MOST // STRETCH
    bounds = [count * part // parts for part in range(parts + 1)]
    starts = [rng.randint(low, high - STRETCH) for low, high in pairwise(bounds)]
    return [start + offset for start in starts for offset in range(STRETCH)]


def _note(steps: Steps, looked: int, slow: int) -> str:
    if looked == len(steps):
        return ""
    mean = format_seconds(float(steps.longest.mean()) / 1e9)
    rare = f", and of {slow} outliers the {MOST_OUTLIERS} longest" if slow > MOST_OUTLIERS else ""
    return (
        f"Of {len(steps)} steps, which took {mean} on average, {looked} are taken apart: stretches of {STRETCH}, "
        f"spread over the run{rare}."
    )
