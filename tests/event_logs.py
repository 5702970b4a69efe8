"""Event logs made by hand, for tests of what reads them. Times are milliseconds; files hold nanoseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from syncline.events import Pack, Phase, RankStep, Step, Transfer
from syncline.spans import FORMAT

MS = 1_000_000

Line = dict[str, Any]


def header(rank: int, world_size: int, **other: Any) -> Line:
    return {
        "kind": "header", "format": FORMAT, "rank": rank, "world_size": world_size, "wall_ns": 10**18 + rank,
        "monotonic_ns": 0, "clock": "one", "host": 0, "threads": 1, **other,
    }  # fmt: skip


def span(kind: str, step: int, start: float, end: float, method: str = "bucketed", **fields: Any) -> Line:
    return {
        "kind": kind,
        **fields,
        "start": round(start * MS),
        "end": round(end * MS),
        "step": step,
        "method": method,
    }


def phase(name: str, step: int, start: float, end: float, method: str = "bucketed") -> Line:
    return span("phase", step, start, end, method, name=name)


def transfer(label: str, step: int, ready: float, start: float, end: float, method: str = "bucketed") -> Line:
    fields = {"name": "all_reduce", "label": label, "bytes": 1000, "ready": round(ready * MS)}
    return span("collective", step, start, end, method, **fields)


def whole_step(step: int, at: float = 0.0, method: str = "bucketed") -> list[Line]:
    """Forward 10, backward 20, sync 5, update 3: 40 ms with gaps of 1 before and after."""
    return [
        phase("forward", step, at + 1, at + 11, method),
        phase("backward", step, at + 11, at + 31, method),
        transfer("bucket 0", step, at + 30, at + 30, at + 35, method),
        phase("sync", step, at + 31, at + 36, method),
        phase("update", step, at + 36, at + 39, method),
        span("step", step, at, at + 40, method),
    ]


def write_log(run: Path, rank: int, lines: list[Line]) -> Path:
    path = run / "events" / f"rank-{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def rank_step(
    rank: int,
    phases: dict[str, tuple[float, float]],
    buckets: dict[str, tuple[float, float, float]] | None = None,
    packs: list[tuple[float, float, float]] | None = None,
    *,
    end: float,
    start: float = 0.0,
    num_bytes: int = 1000,
) -> RankStep:
    """phases: name to (start, end); buckets: label to (ready, start, end); packs: (start, end, busy)."""
    return RankStep(
        rank,
        round(start * MS),
        round(end * MS),
        tuple(Phase(name, round(a * MS), round(b * MS)) for name, (a, b) in phases.items()),
        tuple(
            Transfer("all_reduce", label, num_bytes, round(ready * MS), round(a * MS), round(b * MS))
            for label, (ready, a, b) in (buckets or {}).items()
        ),
        tuple(Pack("all gradients", round(a * MS), round(b * MS), round(busy * MS)) for a, b, busy in packs or []),
    )


def step_of(*ranks: RankStep, number: int = 0) -> Step:
    return Step(number, 0, {one.rank: one for one in ranks})
