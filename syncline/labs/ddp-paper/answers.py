"""Answers of the lab ddp-paper: what overlap and buckets save beside what the paper found, and what synchronising
less often gives and costs."""

from __future__ import annotations

from collections.abc import Mapping

from syncline.study.answering import Rows, best_value, missing, no_difference, read, step_text, step_time, throughput
from syncline.study.rows import Row
from syncline.units import format_seconds

PAPER_OVERLAP = "The paper saved 21 to 38 % of a step on GPUs"
PAPER_BUCKETS = "The paper found the shortest steps between the extremes"
LITTLE = 0.1
"""Share of a step below which there is hardly anything to hide."""


def overlap(rows: Rows, _: Mapping[str, Rows]) -> str:
    """What sending during backward saves, against sending the same buckets after it."""
    sentences = []
    for off in (row for row in rows if row.point.get("options.overlap") is False and row.seconds):
        for on in (row for row in rows if row.point.get("options.overlap") is True and row.seconds):
            alike = ("method", "model", "workers", "backend")
            if all(on.point.get(key) == off.point.get(key) for key in alike):
                sentences.append(_gain(on, off))
    return " ".join(sentences) or missing("a method with and without overlap")


def _gain(on: Row, off: Row) -> str:
    times = [step_time(row) for row in (on, off)]
    who = f"{on.point.get('model', '')} with {on.method}".strip()
    saved = times[1] - times[0]
    if no_difference(on, off):
        both = f"{format_seconds(times[0])} with overlap, {format_seconds(times[1])} without"
        return f"{who}: no difference ({both}). {PAPER_OVERLAP}; {_why_not(off)}."
    if saved < 0:
        lost = f"{who}: overlap costs {format_seconds(-saved)} of {format_seconds(times[1])} a step"
        return f"{lost}. {PAPER_OVERLAP}; {_why_not(off)}."
    text = (
        f"{who}: overlap saves {format_seconds(saved)} of {format_seconds(times[1])} a step ({saved / times[1]:.0%})"
    )
    return f"{text}. {PAPER_OVERLAP}: the same direction.{_most(off)}"


def _most(off: Row) -> str:
    """What any overlap with backward could save: the shorter of the two."""
    sent, behind = read("communication", off), read("backward", off)
    if sent is None or behind is None:
        return ""
    most = min(sent, behind)
    limit = "all of backward" if behind < sent else "all of the communication"
    return f" At most {format_seconds(most)} could hide here, {limit}."


def _why_not(off: Row) -> str:
    """Why this set-up does not show what the paper saw."""
    share = read("communication_share", off)
    if int(off.point.get("hosts", 1)) == 1:
        return (
            "over this machine's loopback there is no link's time to hide: sending takes the cores that compute, so "
            "this set-up cannot show it"
        )
    if off.stretched:
        return "here hosts share cores, so that sending takes time from computing, and this set-up cannot show it"
    if share is not None and share < LITTLE:
        return f"here communication is only {share:.0%} of a step without overlap, so there is little to hide"
    return "nothing measured here explains the difference"


def bucket_size(rows: Rows, _: Mapping[str, Rows]) -> str:
    """The best bucket size for each model and method, and whether both extremes cost what the paper says."""
    best = best_value(rows, ["options.bucket_cap_mb"], "bucket size in MB")
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.seconds and "options.bucket_cap_mb" in row.point:
            groups.setdefault((str(row.point.get("model", "")), row.method), []).append(row)
    curves = [_curve(name, method, group) for (name, method), group in groups.items() if len(group) > 2]
    return "\n".join([best, *curves, f"{PAPER_BUCKETS}."]) if curves else best


def _large_is_free(row: Row) -> str:
    hidden = read("overlap", row) or 0.0
    if hidden > 0.1:
        return f"{row.method} sends a bucket in pieces as they are ready and still hides {hidden:.0%} behind backward"
    return "so little is sent that hiding it gains nothing"


def _curve(name: str, method: str, rows: Rows) -> str:
    """What the smallest and the largest bucket cost over the best; and why, where one costs nothing."""
    ordered = sorted(rows, key=lambda row: float(row.point["options.bucket_cap_mb"]))
    small, large = ordered[0], ordered[-1]
    best = min(ordered, key=step_time)
    texts = []
    for row, cost, free in (
        (small, "each transfer costs time of its own", _small_is_free(small)),
        (large, "nothing is sent before backward ends", _large_is_free(large)),
    ):
        size = f"{row.point['options.bucket_cap_mb']:g} MB"
        if row is best or no_difference(row, best):
            texts.append(f"{size} costs nothing over the best, other than in the paper, because {free}")
        else:
            more = step_time(row) / step_time(best) - 1
            texts.append(f"{size} costs {more:.0%} more ({step_text(row)}), as in the paper: {cost}")
    return f"{name} with {method}: {'; '.join(texts)}."


def _small_is_free(row: Row) -> str:
    if row.method == "ddp" or int(row.point.get("hosts", 1)) == 1:
        return "a message between these ranks takes only tens of microseconds: no latency of a network is emulated"
    return "pieces travel one behind the other without waiting, and no latency of a network is emulated"


def skipped_synchronisation(rows: Rows, _: Mapping[str, Rows]) -> str:
    """Time per sample and what was learnt, by how many backward passes share one synchronisation."""
    measured = sorted(
        (row for row in rows if "accumulate" in row.point and row.seconds), key=lambda r: r.point["accumulate"]
    )
    if len(measured) < 2:
        return missing("synchronising less often")
    first, last = measured[0], measured[-1]
    faster = throughput(last) / throughput(first)
    text = (
        f"Synchronising once in {last.point['accumulate']} backward passes instead of once in "
        f"{first.point['accumulate']} gives {faster:.2f} times the samples a second"
    )
    before, after = (read("train_loss", row) for row in (first, last))
    if before is None or after is None:
        return f"{text}."
    if after > before:
        return f"{text}, but after as many samples the training loss is {after:.3f} instead of {before:.3f}."
    return f"{text}, and after as many samples the training loss is no worse ({after:.3f} and {before:.3f})."
