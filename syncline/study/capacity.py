"""Whether a cell fits into memory, by bytes that an earlier stage measured (see measure/capacity.py)."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.methods import method_of
from syncline.study.cells import Cell
from syncline.study.rows import Row
from syncline.units import format_bytes


def does_not_fit(cell: Cell, measured: Sequence[Row]) -> str | None:
    """Why it does not, or None: it fits, or nothing was measured for its model."""
    known = [row.figures for row in measured if row.point.get("model") == cell.plan.model]
    if not known or "bytes_per_sample" not in known[0]:
        return None
    figures, room = known[0], known[0]["room_bytes"]
    needed = needed_bytes(cell, figures["bytes_per_sample"], figures["process_bytes"])
    if needed <= room:
        return None
    each = format_bytes(round(figures["bytes_per_sample"]))
    free = format_bytes(round(room))
    return f"needs about {format_bytes(needed)} of memory, at a measured {each} per sample; {free} may be taken"


def needed_bytes(cell: Cell, bytes_per_sample: float, process_bytes: float) -> int:
    """Of all ranks. What a method frees stays with its process, so rank 0 of a comparison in which one process takes
    the whole batch holds that beside all others' shares."""
    alone = cell.plan.num_ranks > 1 and any(method_of(name).alone for name in cell.methods)
    samples = cell.plan.global_batch * (2 if alone else 1)
    return round(cell.plan.num_ranks * process_bytes + samples * bytes_per_sample)
