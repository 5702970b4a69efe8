"""What the way between ranks can do: each operation by message size, timed and checked, on ranks of any launcher.

All sizes take turns, so that a noisy moment hits each alike. Before each repetition all ranks meet; its time is the
slowest rank's, from leaving the meeting to having its result. A send and its receive are timed there and back, and
half of that counts. After every repetition every rank compares every value of its result with what it must be.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

import torch

from syncline.comm.communicator import Communicator
from syncline.errors import CommunicationError, PlanError
from syncline.measure.fit import fit_line
from syncline.measure.probe_cells import CELLS, Cell
from syncline.measure.statistics import spread
from syncline.units import format_bytes

FORMAT = 1
WARMUP_VISITS = 1


class Observer(Protocol):
    def progress(self, done: int, total: int, figures: str) -> None: ...


def run_probe(
    communicator: Communicator, backends: Sequence[str], sizes: Sequence[int], visits: int, observer: Observer
) -> list[dict[str, Any]]:
    """The rows of the probe, the same on every rank. Collective; the communicator is the one without wrappers."""
    if communicator.world_size < 2:
        raise PlanError("a probe needs somebody to talk to.", action="Take at least 2 workers.")
    cells = [cell for backend in backends for cell in CELLS[backend](communicator, backend, sizes)]
    total = (WARMUP_VISITS + visits) * len(cells)
    for visit in range(WARMUP_VISITS + visits):
        for number, cell in enumerate(cells):
            what = f"{cell.backend} {cell.operation} {format_bytes(cell.num_bytes)}"
            observer.progress(visit * len(cells) + number, total, what)
            _visit(communicator, cell, counts=visit >= WARMUP_VISITS)
    for cell in cells:
        cell.close()
    return _rows(cells, _slowest(communicator, cells), communicator.world_size)


def _visit(communicator: Communicator, cell: Cell, *, counts: bool) -> None:
    for _ in range(cell.in_a_row):
        cell.prepare()
        communicator.all_reduce(torch.zeros(1, device=communicator.device), label="meet")
        start_ns = time.monotonic_ns()
        cell.run()
        if counts:
            cell.seconds.append((time.monotonic_ns() - start_ns) / 1e9 * cell.share)
        if not cell.is_right():
            raise CommunicationError(
                f"{cell.operation} of {format_bytes(cell.num_bytes)} over {cell.backend} gave wrong values.",
                action="Nothing that this backend computes can be trusted.",
                rank=communicator.rank,
            )


def _slowest(communicator: Communicator, cells: Sequence[Cell]) -> list[list[float]]:
    own = torch.tensor([value for cell in cells for value in cell.seconds], dtype=torch.float64)
    by_rank = [part.cpu() for part in communicator.all_gather(own.to(communicator.device))]
    slowest = torch.stack(by_rank).amax(0)
    return [part.tolist() for part in slowest.split([len(cell.seconds) for cell in cells])]


def _rows(cells: Sequence[Cell], seconds: Sequence[Sequence[float]], world_size: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for backend, operation in dict.fromkeys((cell.backend, cell.operation) for cell in cells):
        points = [
            _point(cell, times, world_size)
            for cell, times in zip(cells, seconds, strict=True)
            if (cell.backend, cell.operation) == (backend, operation)
        ]
        fit = fit_line([point["bytes"] for point in points], [point["median_s"] for point in points])
        fitted = {**asdict(fit), "bytes_per_s": fit.bytes_per_s} if fit else None
        rows.append({"backend": backend, "operation": operation, "points": points, "fit": fitted})
    return rows


def _point(cell: Cell, seconds: Sequence[float], world_size: int) -> dict[str, Any]:
    middle = statistics.median(seconds)
    return {
        "bytes": cell.num_bytes,
        "median_s": middle,
        "spread_s": spread(seconds),
        "repeats": len(seconds),
        "bytes_per_s": cell.num_bytes / middle,
        "bus_bytes_per_s": cell.num_bytes / middle * bus_factor(cell.operation, world_size),
    }


def bus_factor(operation: str, world_size: int) -> float:
    """What the busiest link carries, as a multiple of the message, when the pattern is the best one."""
    if operation == "all_reduce":
        return 2 * (world_size - 1) / world_size
    return float(world_size - 1) if operation in ("gather", "scatter") else 1.0


def summarise(rows: list[dict[str, Any]], *, workers: int, hosts: int = 1, link: str | None = None) -> dict[str, Any]:
    """What a probe run keeps. `links` is the rate and latency of one link by backend, from one message at a time."""
    return {
        "format": FORMAT,
        "workers": workers,
        "hosts": hosts,
        "link": link,
        "links": {
            row["backend"]: {"bytes_per_s": row["fit"]["bytes_per_s"], "latency_s": row["fit"]["alpha_s"]}
            for row in rows
            if row["operation"] == "send_receive" and row["fit"] and row["fit"]["bytes_per_s"]
        },
        "rows": rows,
    }


def link_rate(probe: dict[str, Any], backend: str = "gloo") -> float | None:
    """Bytes per second that one link carries one way: the denominator of utilisation."""
    found = probe.get("links", {}).get(backend)
    return float(found["bytes_per_s"]) if found else None
