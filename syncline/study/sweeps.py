"""Computed answers about sweeps: which value of a key is best, and what a switch gains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from syncline.measure.sanity import inside_spread
from syncline.study.rows import Row
from syncline.study.values import VALUES
from syncline.units import format_seconds

Rows = Sequence[Row]
Answer = Callable[[Rows, Mapping[str, Rows]], str]
MISSING = "Not answered: {} was not measured."


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def best_value(keys: Sequence[str], label: str) -> Answer:
    """For each model and method: the keys' values with the highest throughput, and those that do as well."""

    def answer(rows: Rows, _: Mapping[str, Rows]) -> str:
        groups: dict[tuple[str, str], list[Row]] = {}
        for row in rows:
            if row.seconds and any(key in row.point for key in keys):
                groups.setdefault((str(row.point.get("model", "")), row.method), []).append(row)
        told = [_best_of(group, keys, label, who) for who, group in groups.items() if len(group) > 1]
        return "\n".join(told) or MISSING.format(f"more than one {label}")

    return answer


def _best_of(group: Rows, keys: Sequence[str], label: str, who: tuple[str, str]) -> str:
    ranked = sorted(group, key=lambda row: -_rate(row))
    best = ranked[0]
    same_batch = [row for row in ranked[1:] if row.point.get("global_batch") == best.point.get("global_batch")]
    equal = [row for row in same_batch if inside_spread(row.seconds, best.seconds, ("", "")) is not None]
    name = f"{who[0]} with {who[1]}" if who[0] else who[1]
    if len(equal) == len(group) - 1:
        return f"{name}: no difference between any {label} that was tried."
    also = f" (no difference to {', '.join(_values(row, keys) for row in equal)})" if equal else ""
    worst = ranked[-1]
    return (
        f"{name}: {label} {_values(best, keys)}{also}, {_rate(best):.4g} samples/s; {_values(worst, keys)} gives "
        f"{_rate(worst):.4g}."
    )


def _values(row: Row, keys: Sequence[str]) -> str:
    return " x ".join(f"{row.point.get(key, '-')}" for key in keys)


def _rate(row: Row) -> float:
    quantity = VALUES["throughput"].read(row, [row])
    assert quantity is not None, "only rows with timed steps are ranked"
    return quantity.value


def overlap_gain(rows: Rows, _: Mapping[str, Rows]) -> str:
    """What sending during backward saves, against sending the same buckets after it."""
    told = []
    for off in (row for row in rows if row.point.get("options.overlap") is False and row.seconds):
        for on in (row for row in rows if row.point.get("options.overlap") is True and row.seconds):
            alike = ("method", "model", "workers", "backend")
            if all(on.point.get(key) == off.point.get(key) for key in alike):
                told.append(_gain(on, off))
    return " ".join(told) or MISSING.format("a method with and without overlap")


def _gain(on: Row, off: Row) -> str:
    times = [step.value for row in (on, off) if (step := row.step()) is not None]
    who = f"{on.point.get('model', '')} with {on.method}".strip()
    if inside_spread(on.seconds, off.seconds, ("", "")) is not None:
        return f"{who}: no difference ({format_seconds(times[0])} with overlap, {format_seconds(times[1])} without)."
    saved = times[1] - times[0]
    if saved < 0:
        return f"{who}: overlap costs {format_seconds(-saved)} of {format_seconds(times[1])} a step."
    return (
        f"{who}: overlap saves {format_seconds(saved)} of {format_seconds(times[1])} a step ({saved / times[1]:.0%})."
    )


def skipped_synchronisation(rows: Rows, _: Mapping[str, Rows]) -> str:
    """Time per sample and what was learnt, by how many backward passes share one synchronisation."""
    found = sorted(
        (row for row in rows if "accumulate" in row.point and row.seconds), key=lambda r: r.point["accumulate"]
    )
    if len(found) < 2:
        return MISSING.format("synchronising less often")
    first, last = found[0], found[-1]
    faster = _rate(last) / _rate(first)
    text = (
        f"Synchronising once in {last.point['accumulate']} backward passes instead of once in "
        f"{first.point['accumulate']} gives {faster:.2f} times the samples a second"
    )
    reached = [VALUES["train_loss"].read(row, rows) for row in (first, last)]
    if None in reached:
        return f"{text}."
    before, after = (quantity.value for quantity in reached if quantity is not None)
    if after > before:
        return f"{text}, but after as many samples the training loss is {after:.3f} instead of {before:.3f}."
    return f"{text}, and after as many samples the training loss is no worse ({after:.3f} and {before:.3f})."


SWEEPS: dict[str, Answer] = {
    "best-bucket": best_value(["options.bucket_cap_mb"], "bucket size in MB"),
    "best-groups": best_value(["options.groups"], "number of process groups"),
    "best-threads": best_value(["workers", "threads"], "workers x threads"),
    "best-batch": best_value(["batch_per_worker"], "batch per worker"),
    "overlap": overlap_gain,
    "skipped-synchronisation": skipped_synchronisation,
}
