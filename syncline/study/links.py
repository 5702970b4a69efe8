"""What a probe of the same study found, beside the rows that used the same links: the ground of utilisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from syncline.methods import method_of
from syncline.study.rows import Row


def with_links(rows: Sequence[Row]) -> list[Row]:
    """Rows with `link_bytes_per_s` and `probe_bytes_per_s`, where a probe had as many workers on as many hosts."""
    probes = [row for row in rows if "points" in row.figures]
    return [replace(row, figures={**row.figures, **_of(row, probes)}) if row.seconds else row for row in rows]


def _of(row: Row, probes: Sequence[Row]) -> dict[str, Any]:
    backend = "shared-memory" if method_of(row.method).in_memory else "gloo"
    here = {
        one.point["operation"]: one
        for one in probes
        if one.workers == row.workers
        and one.point.get("hosts", 1) == row.point.get("hosts", 1)
        and one.point["backend"] == backend
    }
    found: dict[str, Any] = {}
    if "send_receive" in here and (rate := here["send_receive"].figures.get("link_rate")):
        found["link_bytes_per_s"] = rate
    size, whole = row.figures.get("gradient_bytes"), here.get("all_reduce")
    # Ranks that share cores wait for each other's turn in a probe too: what it reached is no bound then.
    if whole is not None and size and not whole.stretched:
        nearest = min(whole.figures["points"], key=lambda point: abs(point["bytes"] - size))
        found["probe_bytes_per_s"] = nearest["bytes_per_s"]
    return found
