"""The finished cells of a study as rows, with what a probe of the same study found on their links; and what an
earlier stage found best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from syncline.accounting.breakdown import summarise
from syncline.accounting.outliers import is_outlier
from syncline.accounting.selection import look_at
from syncline.accounting.through_root import through_root
from syncline.accounting.usage import memory
from syncline.errors import RunFolderError
from syncline.methods import BASELINE, current_label, method_of
from syncline.store import Run
from syncline.study.cells import Cell, Chosen
from syncline.study.estimate import cost_of
from syncline.study.file import Stage
from syncline.study.rows import Row
from syncline.study.values import VALUES

FROM_PLAN = ("model", "data", "workers", "threads", "global_batch", "method", "hosts", "link", "compute")
"""Plan keys that every row's point has."""


def is_finished(path: Path) -> bool:
    run = Run(path)
    try:
        return (path / "run.json").exists() and run.status == "finished" and bool(run.summary)
    except RunFolderError:
        return False


def rows_of(cell: Cell, path: Path) -> list[Row]:
    """The rows of one finished cell."""
    run = Run(path)
    summary, plan = run.summary, run.plan
    given = plan.model_dump()
    place = {key: given.get(key) for key in FROM_PLAN if given.get(key) is not None} | dict(cell.point)
    if plan.replayed:
        place["threads"] = cell.point.get("threads", plan.threads)  # of those that were recorded
    entries = [_trained(run)] if cell.run == "train" else summary["rows"]
    if cell.run == "probe":
        entries = [_probed(entry) for entry in entries]
    costs = _costs(cell)
    return [_row(cell.stage, place, {**costs, **entry}, run) for entry in entries]


def _trained(run: Run) -> dict[str, Any]:
    """A training's summary, with its losses from the first step on."""
    entry = {**run.summary, "label": run.plan.method}
    return entry if run.plan.replayed else {**entry, "losses": losses_of(run) or entry.get("losses")}


def losses_of(run: Run) -> list[dict[str, Any]]:
    """The loss of every `log_every`-th step, counted from 0, over the global batch and on each rank, by the log."""
    frame = run.noted_losses()
    frame = frame.filter(frame["step"] % run.plan.log_every == 0).sort("step", "rank")
    lines: dict[int, dict[int, tuple[float, int]]] = {}
    for step, rank, value, samples in frame.select("step", "rank", "value", "samples").iter_rows():
        lines.setdefault(step, {})[rank] = (value, samples)
    return [
        {
            "step": step,
            "loss": sum(value * count for value, count in own.values()) / sum(count for _, count in own.values()),
            "by_rank": [own[rank][0] if rank in own else None for rank in range(max(own) + 1)],
        }
        for step, own in lines.items()
    ]


def _costs(cell: Cell) -> dict[str, float]:
    """By the cell's own plan: a replayed run no longer knows which data was recorded."""
    cost = cost_of(cell.plan) if cell.run in ("compare", "train") else None
    if cost is None or cost.guessed:
        return {}
    return {"gradient_bytes": cost.gradient_bytes, "flops_per_sample": cost.flops}


def run_rows(path: Path, stage: str) -> list[Row]:
    """The rows of a run that belongs to no study, for `syncline report`."""
    run = Run(path)
    return rows_of(Cell(stage, run.kind, run.plan, (), {}, 1), path)


def _row(stage: str, place: dict[str, Any], entry: dict[str, Any], run: Run) -> Row:
    keys = ["workers", "model"] + ([] if place.get("compute", "real") != "real" else ["threads"])
    own: dict[str, Any] = {key: entry[key] for key in keys if key in entry}
    if "label" in entry or "method" in entry:
        own["method"] = current_label(entry["label"] if "label" in entry else entry["method"])
    parts, counted = _accounted(run, own.get("method", ""), len(entry["seconds"])) if "seconds" in entry else ({}, {})
    return Row(
        stage=stage,
        point={**place, **own, **entry.get("point", {})},
        seconds=entry.get("seconds", ()),
        figures={**entry, **counted},
        parts=parts,
        # One worker beside others that share cores does not share its own.
        marks=tuple(mark for mark in run.marks if mark.kind != "stretched" or own.get("method") != BASELINE),
        runs=(run.path,),
    )


def _probed(entry: dict[str, Any]) -> dict[str, Any]:
    """A probe's operation as a row: what was fitted, beside every size."""
    fit = entry["fit"] or {}
    fitted = {"latency": fit.get("alpha_s"), "link_rate": fit.get("bytes_per_s")}
    point = {"backend": entry["backend"], "operation": entry["operation"]}
    return {**entry, **fitted, "method": " ".join(point.values()), "point": point}


def _accounted(run: Run, method: str, num_steps: int) -> tuple[dict[str, float], dict[str, Any]]:
    """The parts of a step, means over timed steps in seconds, outliers aside; and each rank's step time and bytes."""
    try:
        events = run.events
    except RunFolderError:
        return {}, {}
    steps = events.complete(method)[-num_steps:]
    if not len(steps):
        return {}, {}
    looked = look_at(steps)
    usual = looked.usual
    breakdown = summarise([looked.steps[index] for index in usual], [looked.breakdowns[index] for index in usual])
    if breakdown is None:
        return {}, {}
    figures: dict[str, Any] = {"step_by_rank": [rank.step_s for rank in breakdown.ranks]}
    figures |= through_root(events, method, steps)
    figures["outliers"] = sum(is_outlier(steps.longest.tolist()))
    if held := memory(events, method):
        figures["gradient_bytes"] = held[0].gradient_bytes
        figures["peak_bytes"] = max(rank.peak_resident_bytes for rank in held)
    return {**breakdown.parts_s, "hidden": breakdown.hidden_s}, figures


def best_points(stage: Stage, earlier: Sequence[Row]) -> Chosen:
    """For each combination of the `each` keys: the keys' values of the earlier stage's best row."""
    assert stage.best_of is not None
    chosen = stage.best_of
    value = VALUES[chosen.by]
    best: dict[tuple[Any, ...], tuple[float, dict[str, Any]]] = {}
    for row in earlier:
        quantity = value.read(row, earlier)
        group = tuple(row.point.get(key) for key in chosen.each)
        if quantity is None:
            continue
        score = -quantity.value if value.unit == "s" else quantity.value
        if group not in best or score > best[group][0]:
            best[group] = (score, {key: row.point[key] for key in chosen.keys})
    return {group: values for group, (_, values) in best.items()}


def with_links(rows: Sequence[Row]) -> list[Row]:
    """Rows with `link_bytes_per_s` and `probe_bytes_per_s`, where a probe had as many workers on as many hosts."""
    probes = [row for row in rows if "points" in row.figures]
    return [replace(row, figures={**row.figures, **_links_of(row, probes)}) if row.seconds else row for row in rows]


def _links_of(row: Row, probes: Sequence[Row]) -> dict[str, Any]:
    backend = "shared-memory" if method_of(row.method).in_memory else "gloo"
    here = {
        probe.point["operation"]: probe
        for probe in probes
        if probe.workers == row.workers
        and probe.point.get("hosts", 1) == row.point.get("hosts", 1)
        and probe.point["backend"] == backend
    }
    links: dict[str, Any] = {}
    if "send_receive" in here and (rate := here["send_receive"].figures.get("link_rate")):
        links["link_bytes_per_s"] = rate
    size, whole = row.figures.get("gradient_bytes"), here.get("all_reduce")
    # Ranks that share cores wait for each other's turn in a probe too: what it reached is no bound then.
    if whole is not None and size and not whole.stretched:
        nearest = min(whole.figures["points"], key=lambda point: abs(point["bytes"] - size))
        links["probe_bytes_per_s"] = nearest["bytes_per_s"]
    return links
