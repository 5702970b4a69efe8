"""Rows: what the cells of a study measured, one row for each point of the grid and method."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from syncline.accounting.breakdown import PARTS
from syncline.accounting.statistics import speedup, spread
from syncline.marks import Mark
from syncline.methods import BASELINE

KEY_LABELS = {
    "method": "method",
    "nodes": "nodes",
    "workers": "workers",
    "workers_per_node": "processes per node",
    "batch_per_node": "batch per node",
    "global_batch": "global batch",
    "batch_per_worker": "batch per worker",
    "options.bucket_cap_mb": "bucket MB",
    "options.groups": "groups",
    "options.overlap": "with overlap",
    "accumulate": "backward passes per sync",
}


@dataclass(frozen=True)
class Quantity:
    """A number with its spread (the interquartile range), where there is one."""

    value: float
    spread: float | None = None
    share: float | None = field(default=None, compare=False)
    """Of the whole that it is a part of."""


@dataclass(frozen=True)
class Row:
    stage: str
    point: Mapping[str, Any]
    """Where in the grid: the grid's keys, and method, workers, threads, model, global_batch."""
    seconds: Sequence[float] = ()
    """Every timed step, of all rounds, on the slowest rank."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """What else the run's summary says."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The breakdown of a step in seconds, means over ranks and timed steps, outliers aside."""
    marks: tuple[Mark, ...] = ()
    """What a reader must know beside the figure."""
    runs: tuple[Path, ...] = ()

    @property
    def method(self) -> str:
        return str(self.point.get("method", ""))

    @property
    def workers(self) -> int:
        return int(self.point.get("workers", 1))

    @property
    def stretched(self) -> bool:
        """Workers shared cores."""
        return any(mark.kind == "stretched" for mark in self.marks)

    def step(self) -> Quantity | None:
        if not self.seconds:
            return None
        return Quantity(statistics.median(self.seconds), spread(self.seconds))

    def mean_step_s(self) -> float | None:
        """The mean over ranks and timed steps, outliers aside: what the parts add up to."""
        return sum(self.parts.get(name, 0.0) for name in PARTS) if self.parts else None

    def label(self, keys: Iterable[str]) -> str:
        return ", ".join(str(self.point.get(key, "-")) for key in keys)


def key_label(key: str) -> str:
    return KEY_LABELS.get(key, key.rpartition(".")[2].replace("_", " "))


def matching(rows: Iterable[Row], stage: str, where: Mapping[str, Any] | None = None) -> list[Row]:
    """The rows of a stage whose point has these values; a list of values means any of them."""
    wanted = {key: value if isinstance(value, list) else [value] for key, value in (where or {}).items()}
    return [
        row
        for row in rows
        if row.stage == stage and all(row.point.get(key) in values for key, values in wanted.items())
    ]


def pooled(rows: Sequence[Row]) -> list[Row]:
    """Rows of one point, measured in several rounds, as one row."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.stage, *sorted((key, str(value)) for key, value in row.point.items())), []).append(row)
    return [_pool(group) for group in groups.values()]


def _pool(group: Sequence[Row]) -> Row:
    first = group[0]
    if len(group) == 1:
        return first
    names = {name for row in group for name in row.parts}
    return replace(
        first,
        seconds=[value for row in group for value in row.seconds],
        parts={name: statistics.fmean(row.parts.get(name, 0.0) for row in group) for name in names},
        marks=tuple(dict.fromkeys(mark for row in group for mark in row.marks)),
        runs=tuple(path for row in group for path in row.runs),
    )


def side_by_side(row: Row, other: Row) -> bool:
    """Measured in the same runs, taking turns: step by step, their times belong together."""
    return row.runs == other.runs and len(row.seconds) == len(other.seconds)


def baseline_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """The row that a scaled row is held against: same stage, model, threads and kind of compute, on one worker, or
    on one node where the study says how many workers a node has.

    At the same global batch in strong scaling, at one worker's (or node's) batch in weak scaling; `single` where that
    ran, else the same method.
    """
    if row.method.startswith(f"{BASELINE},"):
        return None  # one worker on all cores: another baseline, not something scaled
    same = ["model", "threads", "data", "batch_per_worker", "batch_per_node"]
    same += ["workers_per_node"] if "nodes" in row.point else []
    unit = _workers_of_unit(row)
    batch = row.point.get("batch_per_node", row.point.get("global_batch"))
    if "batch_per_worker" in row.point:
        batch = row.point["batch_per_worker"] * unit
    alone = [
        candidate
        for candidate in rows
        if candidate.stage == row.stage
        and candidate.workers == unit
        and candidate.point.get("global_batch") == batch
        and all(candidate.point.get(key) == row.point.get(key) for key in same)
        and kind_of_compute(candidate) == kind_of_compute(row)
        and candidate.method in (BASELINE, row.method)
    ]
    # Of two that ran `single`, the one measured side by side with this row.
    nodes = row.point.get("nodes")
    alone.sort(
        key=lambda candidate: (
            candidate.method != BASELINE,
            candidate.runs != row.runs,
            candidate.point.get("nodes") != nodes,
        )
    )
    return alone[0] if alone else None


def speedup_over(base: Row, row: Row) -> float:
    """Of two rows with timed steps: T(1)/T(n) at one global batch, throughput(n)/throughput(1) otherwise."""
    return speedup(base.seconds, row.seconds, work=row.point["global_batch"] / base.point["global_batch"])


def _workers_of_unit(row: Row) -> int:
    """A sweep over workers_per_node has no nodes in its grid: there the unit is the worker."""
    return int(row.point.get("workers_per_node", 1)) if "nodes" in row.point else 1


def kind_of_compute(row: Row) -> str:
    """real, replay or sleep: in strong scaling every size replays times of its own batch."""
    return str(row.point.get("compute", "real")).partition(":")[0]
