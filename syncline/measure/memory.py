"""How much memory each rank took, from the last `memory` record of its log."""

from __future__ import annotations

from dataclasses import dataclass

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
    found: dict[int, RankMemory] = {}
    for rank, record in events.of_kind("memory"):
        if record.get("method", "") == method and all(isinstance(record.get(name), int) for name in FIELDS):
            figures = {name: int(record[name]) for name in FIELDS}
            found[rank] = RankMemory(rank, **figures, gradients_in_buffers=bool(record.get("gradients_in_buffers")))
    return [found[rank] for rank in sorted(found)]
