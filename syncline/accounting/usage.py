"""What a run used besides time: memory by rank, from the last `memory` record of its log, and operators, as torch's
profiler recorded them."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syncline.events import Events

FIELDS = ("peak_resident_bytes", "parameter_bytes", "gradient_bytes", "buffer_bytes")


@dataclass(frozen=True)
class RankMemory:
    """`peak_resident_bytes` is the whole process's, all methods of a comparison included."""

    rank: int
    peak_resident_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    buffer_bytes: int
    gradients_in_buffers: bool


def memory(events: Events, method: str) -> list[RankMemory]:
    """By rank; empty where the log holds none: the run is older, or ended early."""
    by_rank: dict[int, RankMemory] = {}
    for rank, record in events.of_kind("memory"):
        if record.get("method", "") == method and all(isinstance(record.get(name), int) for name in FIELDS):
            figures = {name: int(record[name]) for name in FIELDS}
            by_rank[rank] = RankMemory(rank, **figures, gradients_in_buffers=bool(record.get("gradients_in_buffers")))
    return [by_rank[rank] for rank in sorted(by_rank)]


@dataclass(frozen=True)
class OperatorTotal:
    """Per recorded step of one rank. `self_s` is without the operators that it calls, so that these add up."""

    name: str
    calls: float
    self_s: float
    total_s: float
    share: float
    """Of the self time of all operators."""


@dataclass(frozen=True)
class Profiled:
    operators: list[OperatorTotal]
    """The most time first."""
    recorded: list[tuple[int, int]]
    """(rank, step) of what was recorded."""
    problems: list[str]


def operator_totals(run: Path) -> Profiled | None:
    """Totals over the recorded steps and ranks of a run folder; None if none was recorded."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    recorded: list[tuple[int, int]] = []
    problems: list[str] = []
    for path in sorted((run / "profile").glob("rank-*-step-*.json")):
        if path.name.endswith(".trace.json"):
            continue
        try:
            content = json.loads(path.read_text())
            rows = [_row(operator) for operator in content["operators"]]
            recorded.append((int(content["rank"]), int(content["step"])))
        except (OSError, ValueError, KeyError, TypeError):
            problems.append(f"{path.name} is unreadable and left out")
            continue
        for name, *figures in rows:
            sums[name] = [before + figure for before, figure in zip(sums[name], figures, strict=True)]
    if not recorded:
        return Profiled([], [], problems) if problems else None
    return Profiled(_totals(sums, len(recorded)), recorded, problems)


def _row(operator: dict[str, Any]) -> tuple[str, float, float, float]:
    return str(operator["name"]), float(operator["calls"]), float(operator["self_us"]), float(operator["total_us"])


def _totals(sums: dict[str, list[float]], count: int) -> list[OperatorTotal]:
    all_self = sum(own for _, own, _ in sums.values()) or 1.0
    totals = [
        OperatorTotal(name, calls / count, own / count / 1e6, total / count / 1e6, own / all_self)
        for name, (calls, own, total) in sums.items()
    ]
    return sorted(totals, key=lambda operator: -operator.self_s)
