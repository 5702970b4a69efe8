"""Computed answers: sentences made from a study's rows. Each says only what the numbers of this run say.

An answer is a function of two arguments: the rows of its stage, and by name the rows of the further stages that the
question lists (`with_stages`). It returns a sentence or two; where the numbers do not suffice, it says what is
missing.

Here are the answers that any lab can name, and what a lab's own `answers.py` is written with: `read`, `step_time`,
`step_text`, `throughput`, `no_difference`, `ranked`, `listed`, `missing` and `best_value`. Where times that an answer
reads through these are doubtful (other load, shared cores, too few steps, an unequal baseline), `answered` says so in
the same sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from syncline.accounting.doubts import doubted
from syncline.accounting.ranking import Ranking, describe, listed, rank
from syncline.accounting.statistics import Ratio, paired_ratio, ratio_of_medians
from syncline.methods import BASELINE
from syncline.study.rows import Row, baseline_of, key_label, kind_of_compute, side_by_side
from syncline.study.values import UNTIMED, VALUES, batch_of

__all__ = [
    "ANSWERS", "Answer", "Rows", "answered", "best_value", "listed", "missing", "no_difference", "ranked", "read",
    "step_text", "step_time", "throughput", "time_ratio",
]  # fmt: skip

Rows = Sequence[Row]
Answer = Callable[[Rows, Mapping[str, Rows]], str]

NOT_ANSWERED = "Not answered: "
AGAINST_ONE = ("speedup", "efficiency", "over_one_worker")
"""Values that hold a row against one worker."""
WORK = ("model", "data", "global_batch")
"""What a step does, besides how it computes: step times of different work have no order."""
PLACE = ("stage", "workers", "nodes", "compute", "batch_per_worker", "batch_per_node", "run")
"""Follow from the rest, or are the same for all that is compared."""


@dataclass
class _Used:
    """What an answer has read of times so far."""

    rows: list[Row] = field(default_factory=list)
    baselines: list[tuple[Row, Row, float]] = field(default_factory=list)


_used: ContextVar[_Used | None] = ContextVar("_used", default=None)


def answered(answer: Answer, rows: Rows, others: Mapping[str, Rows]) -> str:
    """The answer, with what is doubtful about the times that it read; or why there is none."""
    token = _used.set(used := _Used())
    try:
        text = answer(rows, others)
    finally:
        _used.reset(token)
    return text if text.startswith(NOT_ANSWERED) else doubted(text, used.rows, used.baselines)


def _note(*rows: Row) -> None:
    used = _used.get()
    if used is not None:
        used.rows += rows


def _note_baseline(row: Row, rows: Rows) -> None:
    used, base = _used.get(), baseline_of(row, rows)
    if used is not None and base is not None and base is not row:
        efficiency = VALUES["efficiency"].read(row, rows)
        used.rows.append(base)
        used.baselines.append((base, row, efficiency.value if efficiency is not None else 0.0))


def read(name: str, row: Row, rows: Rows = ()) -> float | None:
    """One of the values that a table can show, such as "speedup"; None where it was not measured.

    Values that compare a row with others, such as a speed-up with its baseline, look for them in `rows`.
    """
    rows = rows or [row]
    quantity = VALUES[name].read(row, rows)
    if quantity is None:
        return None
    if name not in UNTIMED:
        _note(row)
    if name in AGAINST_ONE:
        _note_baseline(row, rows)
    return quantity.value


def step_time(row: Row) -> float:
    """Seconds of the median step. Only for rows with timed steps (`row.seconds`)."""
    step = row.step()
    assert step is not None, "only rows with timed steps are ranked"
    _note(row)
    return step.value


def step_text(row: Row) -> str:
    """The median step with its spread, as tables print it: 1.60 ±0.02 s."""
    _note(row)
    return VALUES["step"].text(row.step())


def throughput(row: Row) -> float:
    """Samples a second. Only for rows with timed steps (`row.seconds`)."""
    return batch_of(row) / step_time(row)


def no_difference(row: Row, other: Row) -> bool:
    """Whether the difference of two step times lies inside their spread."""
    return bool(row.seconds) and bool(other.seconds) and time_ratio(row, other).no_difference


def time_ratio(row: Row, other: Row) -> Ratio:
    """Step times of one row over another's: round by round where they were measured side by side."""
    _note(row, other)
    of = paired_ratio if side_by_side(row, other) else ratio_of_medians
    return of(row.seconds, other.seconds)


def ranked(rows: Rows) -> Ranking[Row]:
    """Of rows with timed steps that do the same work: which are fastest, and how much longer the others take."""
    return rank(rows, time_ratio)


def missing(what: str) -> str:
    """The answer where the rows do not hold what the question needs."""
    return f"{NOT_ANSWERED}{what} was not measured."


def fastest(rows: Rows, _: Mapping[str, Rows]) -> str:
    """Which method to use at the largest size, and what it gives against one worker; for each kind of work."""
    most = max((row.workers for row in rows), default=1)
    there = [row for row in rows if row.workers == most and row.method != BASELINE and row.seconds]
    if most == 1 or not there:
        return missing("a method on several workers")
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in there:
        groups.setdefault(_work(row), []).append(row)
    several = [number for number, values in enumerate(zip(*groups, strict=True)) if len(set(values)) > 1]
    sentences = []
    for work, group in groups.items():
        what = f" with {listed([work[number] for number in several])}" if several else ""
        sentences.append(f"On {most} workers{what} {_fastest_of(group, rows)}")
    return "\n".join(sentences)


def _work(row: Row) -> tuple[str, ...]:
    """In words, as far as the row says it."""
    named = [f"{key_label(key)} {row.point[key]}" if key in row.point else "" for key in WORK]
    return (*named, f"{kind_of_compute(row)} compute")


def _fastest_of(group: Rows, rows: Rows) -> str:
    names = _labels(group)
    ranking = ranked(group)
    best = ranking.fastest[0]
    text = describe(ranking, lambda row: names[id(row)])
    return f"{text}. {names[id(best)]} takes {step_text(best)} a step. {_gain(best, rows)}"


def _labels(rows: Rows) -> dict[int, str]:
    """By id: what a row is called among the others, by what varies between them; by its run if nothing else does."""
    keys = _varying(rows, [key for row in rows for key in row.point if key not in ("method", *PLACE)])
    names = {id(row): f"{row.method} with {_place(row, keys)}" if keys else row.method for row in rows}
    if len(set(names.values())) < len(rows):
        names = {id(row): f"{names[id(row)]} ({_run_name(row)})" for row in rows}
    return names


def _varying(rows: Rows, keys: Sequence[str]) -> list[str]:
    """Those of the keys in which the rows differ."""
    return [key for key in dict.fromkeys(keys) if len({str(row.point.get(key)) for row in rows}) > 1]


def _place(row: Row, keys: Sequence[str]) -> str:
    return listed([f"{key_label(key)} {row.point.get(key, '-')}" for key in keys])


def _run_name(row: Row) -> str:
    return f"run {row.runs[0].name}" if row.runs else f"{row.workers} workers"


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
    ranking = rank(group, _ratio_per_sample)
    best, *equal = ranking.fastest
    name = f"{who[0]} with {who[1]}" if who[0] else who[1]
    if ranking.all_equal:
        return f"{name}: {label} makes no measurable difference."
    also = f" (no measurable difference from {', '.join(_values(row, keys) for row in equal)})" if equal else ""
    worst, ratio = ranking.slower[-1]
    return (
        f"{name}: {label} {_values(best, keys)}{also}, {throughput(best):.4g} samples/s; "
        f"{_values(worst, keys)} gives {throughput(worst):.4g}, {ratio} times as long for each sample."
    )


def _ratio_per_sample(row: Row, other: Row) -> Ratio:
    """Batches may differ; then the rows' steps are of different lengths, and their times a sample are compared."""
    _note(row, other)
    each = [[value / float(one.point["global_batch"]) for value in one.seconds] for one in (row, other)]
    return (paired_ratio if side_by_side(row, other) else ratio_of_medians)(*each)


def _values(row: Row, keys: Sequence[str]) -> str:
    return " x ".join(f"{row.point.get(key, '-')}" for key in keys)


def _best(keys: Sequence[str], label: str) -> Answer:
    def answer(rows: Rows, _: Mapping[str, Rows]) -> str:
        return best_value(rows, keys, label)

    answer.__doc__ = f"Which {label} has the highest throughput, and which do as well?"
    return answer


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
