"""Answers of the lab spark: why gradients are not summed by Spark's jobs, from times, bytes and tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from syncline.study.answering import Rows, listed, missing, no_difference, read, step_text, step_time, time_ratio
from syncline.study.rows import Row
from syncline.units import format_bytes, format_seconds

SPARK = "tree-aggregate"
SPREAD_OUT = ("ring", "bucketed", "ddp")
"""Methods in which no rank carries more than any other."""
DEPTH = 2


def why_not(rows: Rows, others: Mapping[str, Rows]) -> str:
    """Why are gradients not summed by Spark's jobs? For each model, on the most workers."""
    sentences = []
    for model, group in _by_model(rows).items():
        there = _on_most(group)
        spark, best = there.get(SPARK), _fastest([row for name, row in there.items() if name != SPARK])
        if spark is None or best is None:
            continue
        sentences.append(_verdict(model, spark, best))
    if not sentences:
        return missing("tree-aggregate beside a method with ranks")
    return "\n".join([*sentences, _certified([row for these in others.values() for row in these])])


def _verdict(model: str, spark: Row, best: Row) -> str:
    ratio = time_ratio(spark, best)
    both = f"{SPARK} takes {step_text(spark)} a step, {best.method} {step_text(best)}"
    head = f"{model} on {spark.workers} workers: {both}"
    if no_difference(spark, best):
        return f"{head}: no measurable difference here."
    if ratio.median < 1:
        return f"{head}: Spark is faster here, {ratio.median:.2f} times {best.method}'s time."
    words = [f"{head}: {ratio.median:.1f} times as long"]
    wire, whole = read("wire", spark), spark.mean_step_s()
    if wire is not None and whole:
        words.append(f"{wire / whole:.0%} of it is Spark's own work, in which no task computes")
    tasks, root, shuffled = (_figure(spark, name) for name in ("tasks", "root_bytes", "shuffle_bytes"))
    if tasks is not None and root is not None:
        other, files = (
            _figure(best, "root_bytes"),
            f", writes {_bytes(shuffled)} of shuffle files" if shuffled else "",
        )
        beside = f", against {_bytes(other)} through rank 0 of {best.method}" if other is not None else ""
        words.append(f"each step starts {tasks:.0f} tasks{files} and puts {_bytes(root)} through the driver{beside}")
    hidden = read("overlap", best)
    if hidden:
        words.append(f"{best.method} hides {hidden:.0%} of its transfers behind backward, {SPARK} none")
    return "; ".join(words) + "."


def through_the_driver(rows: Rows, _: Mapping[str, Rows]) -> str:
    """What passes through the driver in a step, in times of the gradients, by the number of workers."""
    lines = []
    for model, group in _by_model(rows).items():
        spark = sorted((row for row in group if row.method == SPARK), key=lambda row: row.workers)
        known = [(row, _figure(row, "root_bytes"), read("gradients", row)) for row in spark]
        parts = [
            f"{root / size:.1f} times on {row.workers} ({_bytes(root)})" for row, root, size in known if root and size
        ]
        if parts:
            lines.append(f"{model}: the driver carries the gradients {listed(parts)}.{_beside(group)}")
    if not lines:
        return missing("what passes through the driver")
    return "\n".join(lines)


def _beside(rows: Rows) -> str:
    """What rank 0 of the other methods carries on the most workers."""
    there = _on_most(rows)
    found = {
        name: (_figure(row, "root_bytes"), read("gradients", row)) for name, row in there.items() if name != SPARK
    }
    even = [
        f"{name} {root / size:.1f}" for name, (root, size) in found.items() if root and size and name in SPREAD_OUT
    ]
    root_size = found.get("gather-scatter")
    text = (
        f" Rank 0 carries them, on {next(iter(there.values())).workers} workers: {listed(even)} times" if even else ""
    )
    if text and root_size and root_size[0] and root_size[1]:
        text += f"; as the root of gather-scatter {root_size[0] / root_size[1]:.1f} times"
    return f"{text}." if text else ""


def _partial_sums(partitions: int, depth: int = DEPTH) -> list[int]:
    """PySpark's rule: how many partial sums each level of treeAggregate has; none where all goes to the driver."""
    scale = max(_root(partitions, depth), 2)
    levels, left = [], float(partitions)
    while left > scale + left / scale:
        left /= scale
        levels.append(int(left))
    return levels


def _root(number: int, depth: int) -> int:
    """The smallest whole number whose power of `depth` is at least `number`."""
    return next(value for value in range(1, number + 1) if value**depth >= number)


def tree_levels(rows: Rows, _: Mapping[str, Rows]) -> str:
    """When there is a tree, and what it saves the driver, beside what Spark counted."""
    largest = _largest_model(rows)
    spark = sorted((row for row in largest if row.method == SPARK), key=lambda row: row.workers)
    lines = []
    for row in spark:
        stages, results, size = _figure(row, "stages"), _figure(row, "result_bytes"), read("gradients", row)
        if stages is None or results is None or not size:
            continue
        sums = _partial_sums(row.workers)
        first = f"{' then '.join(map(str, sums))} partial sums come first"
        how = first if sums else "no tree, all goes to the driver"
        lines.append(
            f"{row.workers} partitions: {how} ({stages:.0f} {'stage' if stages == 1 else 'stages'}, "
            f"{row.workers} gradients made, {results / size:.1f} sent to the driver), {step_text(row)} a step."
        )
    if not lines:
        return missing("the stages of tree-aggregate")
    rule = (
        "With depth 2, PySpark adds a level of partial sums only while partitions > s + partitions / s, where s is "
        "the square root of the partitions, rounded up."
    )
    return "\n".join([rule, *lines])


def a_job_a_step(rows: Rows, _: Mapping[str, Rows]) -> str:
    """What a job costs by itself: the smallest model's step, without what its tasks compute."""
    groups = _by_model(rows)
    sizes = {model: read("gradients", group[0]) or 0.0 for model, group in groups.items()}
    if not sizes:
        return missing("a small model")
    small = min(sizes, key=lambda model: sizes[model])
    lines = []
    for row in sorted((row for row in groups[small] if row.method == SPARK), key=lambda row: row.workers):
        tasks, wire = _figure(row, "tasks"), read("wire", row)
        best = _fastest([other for other in groups[small] if other.method != SPARK and other.workers == row.workers])
        if tasks and wire is not None and best is not None:
            lines.append(
                f"{row.workers} workers: {format_seconds(wire)} of a step of {step_text(row)} is Spark's own, "
                f"{format_seconds(wire / tasks)} for each of {tasks:.0f} tasks; "
                f"{best.method} takes {step_text(best)} in all."
            )
    if not lines:
        return missing("tree-aggregate with a small model")
    return "\n".join([f"{small} has only {_bytes(sizes[small])} of gradients to send.", *lines])


def no_overlap(rows: Rows, _: Mapping[str, Rows]) -> str:
    """What stands between one step's compute and the next one's."""
    group = _largest_model(rows)
    there = _on_most(group)
    spark, other = there.get(SPARK), there.get("bucketed") or there.get("ddp")
    if spark is None or other is None:
        return missing("tree-aggregate beside a method that overlaps")
    wire, backward, hidden = read("wire", spark), read("backward", spark), read("overlap", other)
    if wire is None or backward is None:
        return missing("where the step goes")
    beside = (
        f" {other.method} sends each bucket as backward fills it, and hides {hidden:.0%} of that." if hidden else ""
    )
    return (
        "A task's gradients leave it when the task ends, so nothing is sent while backward runs; a stage begins when "
        "the last task of the one before has ended; the update waits for the driver's sum, and the next forward for "
        f"the broadcast of the weights.{beside} If Spark could send during backward, at most "
        f"{format_seconds(min(wire, backward))} of {format_seconds(step_time(spark))} could hide: the other "
        f"{format_seconds(max(0.0, wire - backward))} of what it does could not."
    )


def _by_model(rows: Rows) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.seconds:
            groups.setdefault(str(row.point.get("model", "")), []).append(row)
    return groups


def _largest_model(rows: Rows) -> Rows:
    groups = _by_model(rows)
    return max(groups.values(), key=lambda group: read("gradients", group[0]) or 0.0, default=[])


def _on_most(rows: Rows) -> dict[str, Row]:
    """By method, on the most workers that tree-aggregate ran with."""
    most = max((row.workers for row in rows if row.method == SPARK), default=0)
    return {row.method: row for row in rows if row.workers == most}


def _fastest(rows: Sequence[Row]) -> Row | None:
    return min(rows, key=step_time, default=None)


def _figure(row: Row, name: str) -> float | None:
    value = row.figures.get(name)
    return None if value is None else float(value)


def _bytes(value: float) -> str:
    return format_bytes(round(value))


def _certified(rows: Rows) -> str:
    judged = [row for row in rows if "passed" in row.figures]
    if not judged:
        return "What it computes was not certified."
    if not all(row.figures["passed"] for row in judged):
        return "Its certificate failed: it does not compute the mean over the global batch."
    return "It is not wrong, only slow: it computes the mean over the global batch, by certificate."
