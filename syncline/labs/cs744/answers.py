"""Answers of the lab cs744: the order of the methods, root exchange, buckets, differing losses, scalability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from syncline.accounting.statistics import Ratio
from syncline.methods import BASELINE, CONTROL, METHODS
from syncline.study.answering import Rows, listed, missing, no_difference, read, step_text, step_time, time_ratio
from syncline.study.rows import Row
from syncline.units import format_seconds

ROOT_METHODS = ("gather-scatter", "point-to-point")
SAME_LOSS = 1e-5
"""Relative: sums of 32-bit numbers in another order differ by less."""


def ranking(rows: Rows, others: Mapping[str, Rows]) -> str:
    """The methods on the most nodes, slowest first, in times of DDP's step; those within the spread together."""
    there = _on_most(rows)
    control = there.get(CONTROL)
    if control is None or len(there) < 2:
        return missing("methods on several nodes beside DDP")
    ratios = {name: _ratio(row, control) for name, row in there.items() if name != CONTROL}
    own = [_on_most(these) for these in others.values()]
    for more in own:
        if CONTROL in more:  # measured beside DDP in turns of their own
            ratios |= {name: _ratio(row, more[CONTROL]) for name, row in more.items() if name != CONTROL}
    known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    ordered = sorted(known, key=lambda name: -known[name].median)
    different = [name for name in ordered if not _equal(known[name])]
    slower = _grouped([name for name in different if known[name].median > 1], known, there)
    faster = _grouped([name for name in different if known[name].median < 1], known, there)
    equal = [_words(name, known[name]) for name in ordered if _equal(known[name])]
    parts = [f"slowest first, {', then '.join(slower)}"] if slower else []
    parts.append(f"{CONTROL} takes {step_text(control)} a step")
    parts += [f"no measurable difference from it: {', '.join(equal)}"] if equal else []
    parts += [f"faster than it: {', then '.join(faster)}"] if faster else []
    return f"On {control.workers} nodes, in times of {CONTROL}'s step: {'; '.join(parts)}. {_why(there)}"


def _grouped(names: Sequence[str], known: Mapping[str, Ratio], there: Mapping[str, Row]) -> list[str]:
    """In words, slowest first; neighbours that were measured side by side and do not differ are one entry."""
    groups: list[list[str]] = []
    for name in names:
        before = groups[-1][-1] if groups else ""
        paired = _ratio(there[name], there[before]) if before in there and name in there else None
        if paired is not None and _equal(paired):
            groups[-1].append(name)
        else:
            groups.append([name])
    return [
        " and ".join(_words(name, known[name]) for name in group) + (" (equal)" if len(group) > 1 else "")
        for group in groups
    ]


def _words(name: str, ratio: Ratio) -> str:
    return f"{name} {ratio.median:.2f} ±{ratio.spread / 2:.2f}"


def _equal(ratio: Ratio) -> bool:
    return ratio.no_difference


def _ratio(row: Row, other: Row) -> Ratio | None:
    """Turn by turn; both were measured side by side."""
    return time_ratio(row, other) if len(row.seconds) == len(other.seconds) else None


def _on_most(rows: Rows) -> dict[str, Row]:
    """By method: the timed rows on the most workers."""
    most = max((row.workers for row in rows), default=1)
    return {row.method: row for row in rows if row.workers == most > 1 and row.seconds}


def _why(there: Mapping[str, Row]) -> str:
    """One sentence, from what the methods do and what was measured of it."""
    most = next(iter(there.values())).workers
    words = []
    if any(name in there for name in ROOT_METHODS):
        words.append(
            f"a root's link carries the gradients {2 * (most - 1)} times in a step, each link of an all-reduce "
            f"{2 * (most - 1) / most:.3g} times"
        )
    hidden = read("overlap", there[CONTROL])
    if hidden is not None:
        words.append(f"all-reduce sends after backward, and {CONTROL} hides {hidden:.0%} of its transfers behind it")
    return f"Why: {'; '.join(words)}." if words else ""


def root_exchange(rows: Rows, _: Mapping[str, Rows]) -> str:
    """Why is the exchange through a root slow?"""
    there = _on_most(rows)
    roots = [there[name] for name in ROOT_METHODS if name in there]
    flat = there.get("all-reduce") or there.get("ddp")
    if not roots or flat is None:
        return missing("a root exchange beside an all-reduce")
    slowest = max(roots, key=step_time)
    most = slowest.workers
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
    there = _on_most(rows)
    plain = there.get("all-reduce")
    clever = [there[name] for name in ("ddp", "bucketed") if name in there]
    if plain is None or not clever:
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
    """Do the methods end with other losses than each other, and than one worker, and why?"""
    ended = {row.method: row.figures["losses"][-1]["loss"] for row in rows if row.figures.get("losses")}
    ended = ended or {row.method: row.figures["loss"] for row in rows if "loss" in row.figures and row.workers > 1}
    several = {method: loss for method, loss in ended.items() if method != BASELINE}
    if len(several) < 2:
        return missing("the loss of two methods")
    low, high = min(several, key=several.__getitem__), max(several, key=several.__getitem__)
    apart = several[high] - several[low]
    if apart == 0:
        text = f"Between methods they do not: {listed(list(several))} end with the same loss, {several[low]:.4f}."
    else:
        ends = f"{low} {several[low]:.4f}, {high} {several[high]:.4f}"
        text = f"Between methods the last losses differ by {apart:.2g} ({ends})."
    further = [row for these in others.values() for row in these]
    more = max(row.workers for row in rows) if apart else 0
    return " ".join(filter(None, [text, _certified(further, more), _one_and_many(rows, further)]))


def _certified(rows: Rows, trained: int) -> str:
    """`trained`: on how many workers the losses differ; 0 if they do not."""
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
    certified = max(row.workers for row in judged)
    if exact == len(judged) and trained <= certified:
        return f"{text}, bit for bit."
    if exact == len(judged):
        who = f"bit for bit on {certified} workers. On {trained} the methods"
    else:
        who = f"{exact} of them bit for bit; the others"
    return (
        f"{text}, {who} add the same numbers in another order, which rounds differently, and training lets such "
        "differences grow."
    )


def _one_and_many(rows: Rows, further: Rows) -> str:
    """One worker's first loss against several workers', with batch norm of each share and of the whole batch: all
    from the same weights and samples, before anything was sent."""
    alone = next((row for row in rows if row.method == BASELINE), None)
    many = next((row for row in rows if row.workers > 1 and row.method != BASELINE), None)
    synced = next((row for row in further if row.workers > 1 and _first_loss(row) is not None), None)
    one, own = (_first_loss(row) if row is not None else None for row in (alone, many))
    if one is None or own is None or many is None:
        return ""
    text = (
        f"One worker and {many.workers} differ already at step 0, with the same weights and samples and before "
        f"anything was sent: {one:.6f} and {own:.6f}."
    )
    if abs(one - own) <= SAME_LOSS * one:
        return (
            f"One worker and {many.workers} have the same loss at step 0, {one:.6f}: no layer depends on the share."
        )
    whole = _first_loss(synced) if synced is not None else None
    if whole is None:
        return f"{text} Batch norm, which normalises each worker's share by itself, would explain it; not tested."
    if abs(whole - one) <= SAME_LOSS * one:
        return (
            f"{text} The cause is batch norm, which normalises each worker's share by the mean and variance of that "
            f"share. The proof: with statistics of the whole batch (batch_norm = sync) {many.workers} workers have "
            f"one worker's loss, {whole:.6f}."
        )
    return f"{text} Batch norm alone does not explain it: with statistics of the whole batch it is {whole:.6f}."


def _first_loss(row: Row) -> float | None:
    lines = row.figures.get("losses") or []
    return float(lines[0]["loss"]) if lines and lines[0]["step"] == 0 else None


def scalability(rows: Rows, _: Mapping[str, Rows]) -> str:
    """The methods by their speed-up on the most nodes, each with the reason."""
    there = _on_most(rows)
    gains = {name: read("speedup", row, rows) for name, row in there.items()}
    known = {name: gain for name, gain in gains.items() if gain is not None}
    if len(known) < 2:
        return missing("the speed-up of two methods over one node")
    order = sorted(known, key=lambda name: -known[name])
    most = there[order[0]].workers
    lines = [f"On {most} nodes, best first:"]
    for place, name in enumerate(order):
        before = _ratio(there[name], there[order[place - 1]]) if place else None
        tie = before is not None and before.no_difference
        even = f", no measurable difference from {order[place - 1]}" if tie else ""
        loss = "" if known[name] > 1 else ", slower than one node"
        head = f"{name} {known[name]:.2f} times one node ({known[name] / most:.0%}{even}{loss})"
        lines.append(f"{head}: {_reason(there[name])}.")
    return "\n".join(lines)


def _reason(row: Row) -> str:
    share, hidden = read("communication_share", row), read("overlap", row)
    exposed = f"; {share:.0%} of its step is exposed communication" if share is not None else ""
    workers = row.workers
    if row.method in ROOT_METHODS:
        return f"the root's link carries {2 * (workers - 1)} times the gradients, and more with every node{exposed}"
    if METHODS[row.method].overlaps_steps:
        return f"transfers run behind backward and behind the next forward{exposed}"
    carried = 2 * (workers - 1) / workers
    each = f"each link carries {carried:.3g} times the gradients, at most 2 times on any number of nodes"
    if hidden:
        return f"{each}, and {hidden:.0%} of that hides behind backward{exposed}"
    return f"{each}, but only after backward{exposed}"


def weak_and_strong(rows: Rows, others: Mapping[str, Rows]) -> str:
    """How far does it scale, at one global batch and at one batch per worker?"""
    results = [_best("one global batch (strong)", rows)]
    results += [_best(f"one batch per worker ({name})", these) for name, these in others.items()]
    known: Sequence[str] = [text for text in results if text]
    if not known:
        return missing("scaling against one worker")
    most = max(row.workers for these in (rows, *others.values()) for row in these)
    return f"Best efficiency on {most} nodes {'; '.join(known)}."


def _best(name: str, rows: Rows) -> str:
    gains = [(read("efficiency", row, rows), row) for row in _on_most(rows).values() if row.method != BASELINE]
    known = [(efficiency, row) for efficiency, row in gains if efficiency is not None]
    if not known:
        return ""
    value, row = max(known, key=lambda pair: pair[0])
    return f"at {name}: {value:.0%} with {row.method}"
