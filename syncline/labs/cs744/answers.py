"""Answers of the lab cs744: root exchange, buckets, differing losses, weak and strong scaling."""

from __future__ import annotations

from collections.abc import Mapping

from syncline.methods import BASELINE
from syncline.study.answering import Rows, listed, missing, no_difference, read, step_text, step_time
from syncline.units import format_seconds

ROOT_METHODS = ("gather-scatter", "point-to-point")


def root_exchange(rows: Rows, _: Mapping[str, Rows]) -> str:
    """Why is the exchange through a root slow?"""
    most = max((row.workers for row in rows), default=1)
    there = {row.method: row for row in rows if row.workers == most and row.seconds}
    roots = [there[name] for name in ROOT_METHODS if name in there]
    flat = there.get("all-reduce") or there.get("ddp")
    if not roots or flat is None or most < 2:
        return missing("a root exchange beside an all-reduce")
    slowest = max(roots, key=step_time)
    moved = 2 * (most - 1)
    text = (
        f"Rank 0's link carries {moved} times the gradients in each step of {slowest.method} on {most} workers, "
        f"against {moved / most:.2f} times for each rank in an all-reduce"
    )
    ratio = step_time(slowest) / step_time(flat)
    if no_difference(slowest, flat) or ratio <= 1:
        return (
            f"{text}; but the step is not clearly slower than with {flat.method} ({step_text(slowest)} and "
            f"{step_text(flat)}): here the link is not the bottleneck."
        )
    share = read("communication_share", slowest)
    spent = f" and spends {share:.0%} of the step on communication" if share is not None else ""
    return f"{text}. Its step is {ratio:.1f} times as long as with {flat.method}{spent}."


def bucketing(rows: Rows, _: Mapping[str, Rows]) -> str:
    """What do buckets and overlap gain over one all-reduce for each parameter?"""
    most = max((row.workers for row in rows), default=1)
    there = {row.method: row for row in rows if row.workers == most and row.seconds}
    plain = there.get("all-reduce")
    clever = [there[name] for name in ("ddp", "bucketed") if name in there]
    if plain is None or not clever or most < 2:
        return missing("all-reduce beside a bucketed method")
    best = min(clever, key=step_time)
    if no_difference(best, plain):
        return (
            f"Nothing that this run can show: {best.method} takes {step_text(best)} and all-reduce "
            f"{step_text(plain)}, a difference within the spread."
        )
    saved = step_time(plain) - step_time(best)
    if saved < 0:
        return f"Nothing here: {best.method} takes {step_text(best)}, all-reduce {step_text(plain)}."
    share = f"{saved / step_time(plain):.0%}"
    text = f"{best.method} saves {format_seconds(saved)} of {step_text(plain)} a step ({share})"
    overlap = read("overlap", best)
    if overlap is not None:
        text += f"; it hides {overlap:.0%} of its communication behind backward"
    return f"{text}."


def losses_differ(rows: Rows, others: Mapping[str, Rows]) -> str:
    """Do the methods end with other losses, and why?"""
    ended = {row.method: row.figures["losses"][-1]["loss"] for row in rows if row.figures.get("losses")}
    ended = ended or {row.method: row.figures["loss"] for row in rows if "loss" in row.figures and row.workers > 1}
    several = {method: loss for method, loss in ended.items() if method != BASELINE}
    if len(several) < 2:
        return missing("the loss of two methods")
    low, high = min(several, key=several.__getitem__), max(several, key=several.__getitem__)
    apart = several[high] - several[low]
    if apart == 0:
        text = f"They do not: {listed(list(several))} end with the same loss, {several[low]:.4f}."
    else:
        text = f"The last losses differ by {apart:.2g} ({low} {several[low]:.4f}, {high} {several[high]:.4f})."
    return f"{text} {_certified([row for rows in others.values() for row in rows])}"


def _certified(rows: Rows) -> str:
    judged = [row for row in rows if "passed" in row.figures]
    if not judged:
        return "No certificate was computed."
    wrong = [row.method for row in judged if not row.figures["passed"]]
    if wrong:
        return (
            f"The certificate of {listed(list(dict.fromkeys(wrong)))} failed: that method does not compute the mean."
        )
    exact = sum(row.figures.get("sequential", {}).get("status") == "bitwise" for row in judged)
    text = f"All {len(judged)} certificates hold: each method computes the mean over the global batch"
    if exact == len(judged):
        return f"{text}, bit for bit."
    return (
        f"{text}, {exact} of them bit for bit; the others add the same numbers in another order, which rounds "
        "differently, and training lets such differences grow."
    )


def weak_and_strong(rows: Rows, others: Mapping[str, Rows]) -> str:
    """How far does it scale, at one batch per worker and at one global batch?"""
    results = []
    for name, these in (("one batch per worker (weak)", rows), *others.items()):
        scaled = [row for row in these if row.workers > 1 and row.method != BASELINE and row.seconds]
        most = max((row.workers for row in scaled), default=0)
        top = [(read("efficiency", row, these), row) for row in scaled if row.workers == most]
        known = [(efficiency, row) for efficiency, row in top if efficiency is not None]
        if known:
            value, row = max(known, key=lambda pair: pair[0])
            results.append(f"at {name.replace('strong', 'one global batch (strong)')}: {value:.0%} with {row.method}")
    if not results:
        return missing("scaling against one worker")
    most = max(row.workers for row in rows)
    return f"Best efficiency on {most} workers {'; '.join(results)}."
