"""Computed answers: sentences made from a study's rows. Each says only what the numbers of this run say.

An answer gets the rows of its stage, and of the further stages that the question names, and returns a sentence or
two; where the numbers do not suffice it says what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping

from syncline.measure.sanity import inside_spread
from syncline.study.experiment_answers import EXPERIMENT_ANSWERS
from syncline.study.replica_answers import REPLICA_ANSWERS
from syncline.study.rows import BASELINE, Row
from syncline.study.scalability import SCALABILITY
from syncline.study.sweeps import MISSING, SWEEPS, Answer, Rows, listed
from syncline.study.values import VALUES
from syncline.units import format_seconds

ROOT_METHODS = ("gather-scatter", "point-to-point")


def fastest(rows: Rows, _: Mapping[str, Rows]) -> str:
    """Which method to take at the largest size, and what it gives against one worker."""
    most = max((row.workers for row in rows), default=1)
    there = [row for row in rows if row.workers == most and row.method != BASELINE and row.seconds]
    if most == 1 or not there:
        return MISSING.format("a method on several workers")
    ranked = sorted(there, key=_time)
    best, worst = ranked[0], ranked[-1]
    equal = [row for row in ranked[1:] if inside_spread(row.seconds, best.seconds, ("", "")) is not None]
    also = f" (no difference to {listed([row.method for row in equal])})" if equal else ""
    text = f"On {most} workers {best.method} is fastest{also}: {_step(best)} a step"
    if worst is not best and worst not in equal:
        text += f", where {worst.method} takes {_step(worst)}, {_time(worst) / _time(best):.1f} times as long"
    return f"{text}. {_gain(best, rows)}"


def _gain(row: Row, rows: Rows) -> str:
    speedup, efficiency = (VALUES[name].read(row, rows) for name in ("speedup", "efficiency"))
    if speedup is None or efficiency is None:
        return "What it gains over one worker was not measured."
    share = f"{efficiency.value:.0%} of what {row.workers} workers could give"
    if speedup.value <= 1:
        return (
            f"It trains {speedup.value:.2f} times as many samples a second as one worker ({share}): it does not pay."
        )
    return f"It trains {speedup.value:.2f} times as many samples a second as one worker: {share}."


def root_exchange(rows: Rows, _: Mapping[str, Rows]) -> str:
    """Why is the exchange through a root slow?"""
    most = max((row.workers for row in rows), default=1)
    there = {row.method: row for row in rows if row.workers == most and row.seconds}
    roots = [there[name] for name in ROOT_METHODS if name in there]
    flat = there.get("all-reduce") or there.get("ddp")
    if not roots or flat is None or most < 2:
        return MISSING.format("a root exchange beside an all-reduce")
    slowest = max(roots, key=_time)
    moved = 2 * (most - 1)
    text = (
        f"Rank 0's link carries {moved} times the gradients in each step of {slowest.method} on {most} workers, "
        f"against {moved / most:.2f} times for each rank in an all-reduce"
    )
    ratio = _time(slowest) / _time(flat)
    if inside_spread(slowest.seconds, flat.seconds, ("", "")) is not None or ratio <= 1:
        return (
            f"{text}; yet here the step is not clearly slower than with {flat.method} "
            f"({_step(slowest)} and {_step(flat)}): the link does not decide here."
        )
    share = _communication(slowest)
    spent = f" and spends {share:.0%} of the step on communication" if share is not None else ""
    return f"{text}. Its step is {ratio:.1f} times as long as with {flat.method}{spent}."


def bucketing(rows: Rows, _: Mapping[str, Rows]) -> str:
    """What do buckets and overlap gain over one all-reduce for each parameter?"""
    most = max((row.workers for row in rows), default=1)
    there = {row.method: row for row in rows if row.workers == most and row.seconds}
    plain = there.get("all-reduce")
    clever = [there[name] for name in ("ddp", "bucketed") if name in there]
    if plain is None or not clever or most < 2:
        return MISSING.format("all-reduce beside a bucketed method")
    best = min(clever, key=_time)
    if inside_spread(best.seconds, plain.seconds, ("", "")) is not None:
        return (
            f"Nothing that this run can show: {best.method} takes {_step(best)} and all-reduce {_step(plain)}, "
            "a difference inside the spread."
        )
    saved = _time(plain) - _time(best)
    if saved < 0:
        return f"Nothing here: {best.method} takes {_step(best)}, all-reduce {_step(plain)}."
    text = f"{best.method} saves {format_seconds(saved)} of {_step(plain)} a step ({saved / _time(plain):.0%})"
    overlap = VALUES["overlap"].read(best, rows)
    if overlap is not None:
        text += f"; it hides {overlap.value:.0%} of its communication behind backward"
    return f"{text}."


def losses_differ(rows: Rows, others: Mapping[str, Rows]) -> str:
    """Do the methods end with other losses, and why?"""
    ended = {row.method: row.figures["losses"][-1]["loss"] for row in rows if row.figures.get("losses")}
    ended = ended or {row.method: row.figures["loss"] for row in rows if "loss" in row.figures and row.workers > 1}
    several = {method: loss for method, loss in ended.items() if method != BASELINE}
    if len(several) < 2:
        return MISSING.format("the loss of two methods")
    low, high = min(several, key=several.__getitem__), max(several, key=several.__getitem__)
    apart = several[high] - several[low]
    if apart == 0:
        text = f"They do not: {listed(list(several))} end with the same loss, {several[low]:.4f}."
    else:
        text = f"The last losses lie {apart:.2g} apart ({low} {several[low]:.4f}, {high} {several[high]:.4f})."
    return f"{text} {_certified([row for rows in others.values() for row in rows])}"


def _certified(rows: Rows) -> str:
    judged = [row for row in rows if "passed" in row.figures]
    if not judged:
        return "No certificate was made."
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
    told = []
    for name, these in (("one batch per worker (weak)", rows), *((f"{stage}", one) for stage, one in others.items())):
        scaled = [row for row in these if row.workers > 1 and row.method != BASELINE and row.seconds]
        most = max((row.workers for row in scaled), default=0)
        top = [(VALUES["efficiency"].read(row, these), row) for row in scaled if row.workers == most]
        known = [(quantity.value, row) for quantity, row in top if quantity is not None]
        if known:
            value, row = max(known, key=lambda pair: pair[0])
            told.append(f"at {name.replace('strong', 'one global batch (strong)')}: {value:.0%} with {row.method}")
    if not told:
        return MISSING.format("scaling against one worker")
    most = max(row.workers for row in rows)
    return f"Best efficiency on {most} workers {'; '.join(told)}."


def scaling(rows: Rows, _: Mapping[str, Rows]) -> str:
    """What do more workers give, and where does the rest go?"""
    scaled = [row for row in rows if row.workers > 1 and row.method != BASELINE and row.seconds]
    if not scaled:
        return MISSING.format("more than one worker")
    last = max(scaled, key=lambda row: row.workers)
    text = f"{last.workers} workers take {_step(last)} a step. {_gain(last, rows)}"
    share = _communication(last)
    return text if share is None else f"{text} Exposed communication is {share:.0%} of the step."


def _time(row: Row) -> float:
    step = row.step()
    assert step is not None, "only rows with timed steps are ranked"
    return step.value


def _step(row: Row) -> str:
    return VALUES["step"].text(row.step())


def _communication(row: Row) -> float | None:
    share = VALUES["communication_share"].read(row, [row])
    return None if share is None else share.value


ANSWERS: dict[str, Answer] = {
    "fastest": fastest,
    "root-exchange": root_exchange,
    "bucketing": bucketing,
    "losses-differ": losses_differ,
    "weak-and-strong": weak_and_strong,
    "scaling": scaling,
    **SWEEPS,
    **SCALABILITY,
    **REPLICA_ANSWERS,
    **EXPERIMENT_ANSWERS,
}
