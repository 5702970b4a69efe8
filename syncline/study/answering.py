"""Computed answers: sentences made from a study's rows. Each says only what the numbers of this run say.

An answer is a function of two arguments: the rows of its stage, and by name the rows of the further stages that the
question lists (`with_stages`). It returns a sentence or two; where the numbers do not suffice, it says what is
missing.

Here are the answers that any lab can name, and what a lab's own `answers.py` is written with: `read`, `step_time`,
`step_text`, `throughput`, `no_difference`, `listed`, `missing` and `best_value`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from syncline.accounting.sanity import inside_spread
from syncline.methods import BASELINE
from syncline.study.rows import Row
from syncline.study.values import VALUES

Rows = Sequence[Row]
Answer = Callable[[Rows, Mapping[str, Rows]], str]


def read(name: str, row: Row, rows: Rows = ()) -> float | None:
    """One of the values that a table can show, such as "speedup"; None where it was not measured.

    Values that compare a row with others, such as a speed-up with its baseline, look for them in `rows`.
    """
    quantity = VALUES[name].read(row, rows or [row])
    return None if quantity is None else quantity.value


def step_time(row: Row) -> float:
    """Seconds of the median step. Only for rows with timed steps (`row.seconds`)."""
    step = row.step()
    assert step is not None, "only rows with timed steps are ranked"
    return step.value


def step_text(row: Row) -> str:
    """The median step with its spread, as tables print it: 1.60 ±0.02 s."""
    return VALUES["step"].text(row.step())


def throughput(row: Row) -> float:
    """Samples a second. Only for rows with timed steps (`row.seconds`)."""
    return float(row.point["global_batch"]) / step_time(row)


def no_difference(row: Row, other: Row) -> bool:
    """Whether the difference of two step times lies inside their spread."""
    return inside_spread(row.seconds, other.seconds, ("", "")) is not None


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def missing(what: str) -> str:
    """The answer where the rows do not hold what the question needs."""
    return f"Not answered: {what} was not measured."


def fastest(rows: Rows, _: Mapping[str, Rows]) -> str:
    """Which method to use at the largest size, and what it gives against one worker."""
    most = max((row.workers for row in rows), default=1)
    there = [row for row in rows if row.workers == most and row.method != BASELINE and row.seconds]
    if most == 1 or not there:
        return missing("a method on several workers")
    ranked = sorted(there, key=step_time)
    best, worst = ranked[0], ranked[-1]
    equal = [row for row in ranked[1:] if no_difference(row, best)]
    also = f" (no measurable difference from {listed([row.method for row in equal])})" if equal else ""
    text = f"On {most} workers {best.method} is fastest{also}: {step_text(best)} a step"
    if worst is not best and worst not in equal:
        ratio = step_time(worst) / step_time(best)
        text += f", where {worst.method} takes {step_text(worst)}, {ratio:.1f} times as long"
    return f"{text}. {_gain(best, rows)}"


def _gain(row: Row, rows: Rows) -> str:
    speedup, efficiency = (read(name, row, rows) for name in ("speedup", "efficiency"))
    if speedup is None or efficiency is None:
        return "Its gain over one worker was not measured."
    verdict = "" if speedup > 1 else " It does not pay off."
    rate = f"{speedup:.2f} times as many samples a second as one worker"
    return f"It processes {rate}, an efficiency of {efficiency:.0%}.{verdict}"


def scaling(rows: Rows, _: Mapping[str, Rows]) -> str:
    """What do more workers give, and where does the rest go?"""
    scaled = [row for row in rows if row.workers > 1 and row.method != BASELINE and row.seconds]
    if not scaled:
        return missing("more than one worker")
    last = max(scaled, key=lambda row: row.workers)
    text = f"{last.workers} workers take {step_text(last)} a step. {_gain(last, rows)}"
    share = read("communication_share", last)
    return text if share is None else f"{text} Exposed communication is {share:.0%} of the step."


def best_value(rows: Rows, keys: Sequence[str], label: str) -> str:
    """For each model and method: the keys' values with the highest throughput, and those that do as well."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.seconds and any(key in row.point for key in keys):
            groups.setdefault((str(row.point.get("model", "")), row.method), []).append(row)
    sentences = [_best_of(group, keys, label, who) for who, group in groups.items() if len(group) > 1]
    return "\n".join(sentences) or missing(f"more than one {label}")


def _best_of(group: Rows, keys: Sequence[str], label: str, who: tuple[str, str]) -> str:
    ranked = sorted(group, key=lambda row: -throughput(row))
    best = ranked[0]
    same_batch = [row for row in ranked[1:] if row.point.get("global_batch") == best.point.get("global_batch")]
    equal = [row for row in same_batch if no_difference(row, best)]
    name = f"{who[0]} with {who[1]}" if who[0] else who[1]
    if len(equal) == len(group) - 1:
        return f"{name}: {label} makes no measurable difference."
    also = f" (no measurable difference from {', '.join(_values(row, keys) for row in equal)})" if equal else ""
    worst = ranked[-1]
    return (
        f"{name}: {label} {_values(best, keys)}{also}, {throughput(best):.4g} samples/s; "
        f"{_values(worst, keys)} gives {throughput(worst):.4g}."
    )


def _values(row: Row, keys: Sequence[str]) -> str:
    return " x ".join(f"{row.point.get(key, '-')}" for key in keys)


def _best(keys: Sequence[str], label: str) -> Answer:
    return lambda rows, _: best_value(rows, keys, label)


ANSWERS: dict[str, Answer] = {
    "fastest": fastest,
    "scaling": scaling,
    "best-bucket": _best(["options.bucket_cap_mb"], "bucket size in MB"),
    "best-groups": _best(["options.groups"], "number of process groups"),
    "best-threads": _best(["workers", "threads"], "workers x threads"),
    "best-batch": _best(["batch_per_worker"], "batch per worker"),
    "best-processes": _best(["workers_per_node", "threads"], "processes x threads"),
    "best-node-batch": _best(["batch_per_node"], "batch per node"),
}
"""By the names that a lab file uses."""
