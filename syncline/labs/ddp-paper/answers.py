"""Answers of the lab ddp-paper: what overlap saves, and what synchronising less often gives and costs."""

from __future__ import annotations

from collections.abc import Mapping

from syncline.study.answering import Rows, missing, no_difference, read, step_time, throughput
from syncline.study.rows import Row
from syncline.units import format_seconds


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
    if no_difference(on, off):
        return f"{who}: no difference ({format_seconds(times[0])} with overlap, {format_seconds(times[1])} without)."
    saved = times[1] - times[0]
    if saved < 0:
        return f"{who}: overlap costs {format_seconds(-saved)} of {format_seconds(times[1])} a step."
    return (
        f"{who}: overlap saves {format_seconds(saved)} of {format_seconds(times[1])} a step ({saved / times[1]:.0%})."
    )


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
