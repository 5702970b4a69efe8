"""What passes through one process in a step: rank 0 of an exchange, or the driver of Spark's jobs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from syncline.events import Events, Steps
from syncline.methods import current_label

FIGURES = ("tasks", "stages", "broadcast_bytes", "result_bytes", "shuffle_bytes")
"""Of a `job` record."""


def through_root(events: Events, method: str, steps: Steps) -> dict[str, float]:
    """Medians over the steps: `root_bytes`, sent and received, and for jobs their FIGURES. Bytes of a rank are those
    on its sockets; of a driver, the pickle of what it broadcasts and what tasks sent it. Empty if unknown."""
    numbers = set(steps.numbers.tolist())
    if jobs := _records(events, "job", method, numbers):
        own = {name: _median(jobs, name) for name in FIGURES}
        return {**own, "root_bytes": own["broadcast_bytes"] + own["result_bytes"]}
    counted = _records(events, "counter", method, numbers)
    return {"root_bytes": _median(counted, "sent") + _median(counted, "received")} if counted else {}


def _records(events: Events, kind: str, method: str, numbers: set[int]) -> list[Mapping[str, Any]]:
    return [
        record
        for rank, record in events.of_kind(kind)
        if rank == 0 and current_label(record.get("method", "")) == method and record["step"] in numbers
    ]


def _median(records: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(statistics.median(record[name] for record in records))
