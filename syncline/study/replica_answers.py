"""Computed answers about replicas in one process against processes: which is faster, by batch, and how it scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from syncline.measure.sanity import inside_spread
from syncline.study.rows import BASELINE, Row
from syncline.study.sweeps import MISSING, Answer, Rows
from syncline.study.values import VALUES
from syncline.units import format_bytes, format_seconds

REPLICAS, PROCESSES = "data-parallel", "ddp"
COMPUTED = ("forward", "backward")
SENT = ("pack", "wait", "wire")
KEEP_UP = 0.02
"""Loaders whose batches are waited for by less than this share of an epoch keep up."""


def replicas_or_processes(rows: Rows, _: Mapping[str, Rows]) -> str:
    """Which is faster, at each batch size, and in which part of the step the difference lies."""
    workers = _own_cores([row for row in rows if row.workers > 1])
    pairs = [
        (one, other)
        for one in rows
        for other in rows
        if (one.method, other.method) == (REPLICAS, PROCESSES)
        and one.workers == other.workers == workers
        and _batch(one) == _batch(other)
        and one.seconds
        and other.seconds
    ]
    if not pairs:
        return MISSING.format("data-parallel beside ddp on several workers")
    pairs.sort(key=lambda pair: _batch(pair[0]))
    text = f"On {workers} workers {'; '.join(_verdicts(pairs))}."
    apart = [pair for pair in pairs if not _alike(*pair)]
    if not apart:
        return text
    return f"{text} {_why(*max(apart, key=lambda pair: abs(_time(pair[0]) - _time(pair[1])) / _time(pair[1])))}"


def _own_cores(rows: Rows) -> int:
    """The most workers that had cores of their own; the fewest where none had."""
    fit = [row.workers for row in rows if not _shares_cores(row)]
    return max(fit) if fit else min((row.workers for row in rows), default=0)


def _verdicts(pairs: Sequence[tuple[Row, Row]]) -> list[str]:
    """One for each outcome, with all batch sizes that it holds for."""
    found: dict[str, list[str]] = {}
    for replicas, processes in pairs:
        ratio = _time(replicas) / _time(processes)
        outcome = f"{PROCESSES} is faster" if ratio > 1 else f"{REPLICAS} is faster"
        times = f"{_step(processes)} a step with {PROCESSES}, {_step(replicas)} with {REPLICAS}"
        if _alike(replicas, processes):
            outcome = "there is no difference that this run could show"
        else:
            times += f": {max(ratio, 1 / ratio):.2f} times as long"
        found.setdefault(outcome, []).append(f"at {_batch(replicas)} samples per worker ({times})")
    return [f"{outcome} {' and '.join(where)}" for outcome, where in found.items()]


def _alike(one: Row, other: Row) -> bool:
    return inside_spread(one.seconds, other.seconds, ("", "")) is not None


def _shares_cores(row: Row) -> bool:
    return row.stretched


def _why(replicas: Row, processes: Row) -> str:
    if not replicas.parts or not processes.parts:
        return "Why was not measured."
    compute = _sum(replicas, COMPUTED) - _sum(processes, COMPUTED)
    sent = _sum(processes, SENT) - _sum(replicas, SENT)
    slower = _time(replicas) > _time(processes)
    text = (
        f"At {_batch(replicas)}, forward and backward take {format_seconds(abs(compute))} "
        f"{'longer' if compute > 0 else 'less'} in data-parallel, and ddp's copying, waiting and sending takes "
        f"{format_seconds(sent)} that data-parallel does not have"
    )
    if slower and compute > max(0.0, sent):
        return f"{text}: threads that share one interpreter, and add gradients up one after the other, cost more."
    if not slower and compute <= 0 < sent:
        return f"{text}: the threads lose nothing to each other, and save the sending."
    if not slower and sent > compute:
        return f"{text}: the threads save more than they lose to each other."
    return f"{text}: that alone does not explain the difference."


def data_loading(rows: Rows, _: Mapping[str, Rows]) -> str:
    """What waiting for batches adds to an epoch."""
    shares = []
    for row in rows:
        whole, bare = (VALUES[name].read(row, rows) for name in ("epoch", "epoch_without_data"))
        if whole is not None and bare is not None and bare.value > 0:
            shares.append((whole.value / bare.value - 1, f"({row.method}, {_batch(row)} per worker)"))
    if not shares:
        return MISSING.format("an epoch with its data")
    low, high = min(shares), max(shares)
    most = f"{high[0]:.1%} {high[1]}"
    if high[0] < KEEP_UP:
        return f"Almost nothing: waiting for batches adds at most {most} to an epoch. The loaders keep up."
    return (
        f"Waiting for batches adds between {low[0]:.1%} {low[1]} and {most} to an epoch; loaders take their time "
        "from the same cores."
    )


def epoch_by_batch(rows: Rows, others: Mapping[str, Rows]) -> str:
    """At which batch size an epoch is shortest, for each method; and where the memory ends."""
    told = []
    for method in dict.fromkeys(row.method for row in rows):
        own = [row for row in rows if row.method == method and row.seconds]
        if len(own) > 1:
            told.append(_shortest(method, own))
    text = " ".join(told) or MISSING.format("an epoch at several batch sizes")
    return f"{text} {_memory([row for rows in others.values() for row in rows])}".strip()


def _shortest(method: str, rows: Rows) -> str:
    ranked = sorted(rows, key=lambda row: _time(row) / _samples(row))
    best, worst = ranked[0], ranked[-1]
    scaled = {id(row): [value / _samples(row) for value in row.seconds] for row in ranked}
    equal = [row for row in ranked[1:] if inside_spread(scaled[id(row)], scaled[id(best)], ("", "")) is not None]
    if len(equal) == len(ranked) - 1:
        return f"{method}: no difference between the batch sizes that were tried."
    gain = (_time(worst) / _samples(worst)) / (_time(best) / _samples(best))
    also = f" (no difference to {', '.join(str(_batch(row)) for row in equal)})" if equal else ""
    return (
        f"{method}: an epoch is shortest at {_batch(best)} per worker{also}; at {_batch(worst)} it takes "
        f"{gain:.2f} times as long."
    )


def _memory(rows: Rows) -> str:
    known = [row for row in rows if "needed_bytes" in row.figures]
    if not known:
        return ""
    figures = known[0].figures
    fit = [_batch(row) for row in known if row.figures["fits"]]
    text = (
        f"A sample takes {format_bytes(round(figures['bytes_per_sample']))}, measured: one worker has room for a "
        f"batch of {max(fit)}" if fit else "One worker has room for none of the batches"
    )  # fmt: skip
    missing = [_batch(row) for row in known if not row.figures["fits"]]
    return f"{text}, not for {min(missing)}." if missing and fit else f"{text}."


def kind_of_scaling(rows: Rows, others: Mapping[str, Rows]) -> str:
    """Whether the batch per worker or the global batch stayed the same in each stage, and what that gave."""
    stages = (rows, *others.values())
    told = [one for these in stages if (one := _scaling(these)) is not None]
    if not told:
        return MISSING.format("scaling against one worker")
    if any(_shares_cores(row) for these in stages for row in these):
        told.append("Some of these workers shared cores: what they gain is no measure of the method.")
    return " ".join(told)


def _scaling(rows: Rows) -> str | None:
    scaled = [row for row in rows if row.workers > 1 and row.method != BASELINE and row.seconds]
    known = [(row, speedup.value) for row in scaled if (speedup := VALUES["speedup"].read(row, rows)) is not None]
    if not known:
        return None
    each = {(_batch(row), row.point.get("global_batch")) for row, _ in known}
    weak = all(row.point.get("batch_per_worker") is not None for row, _ in known) and len(
        {whole for _, whole in each}
    ) > len({own for own, _ in each})
    kind = (
        "One batch per worker, so that the global batch grows with the workers, is weak scaling"
        if weak
        else "One global batch, of which each worker takes a smaller share, is strong scaling"
    )
    best = {count: max((pair for pair in known if pair[0].workers == count), key=lambda pair: pair[1])
            for count in sorted({row.workers for row, _ in known})}  # fmt: skip
    gains = [f"{value:.2f} on {count} workers ({row.method}, {_size(row)})" for count, (row, value) in best.items()]
    return f"{kind}: the best speed-up is {' and '.join(gains)}."


def link_use(rows: Rows, _: Mapping[str, Rows]) -> str:
    """How much of the link the all-reduce of gradients uses during training, and what shared memory does instead."""
    moved = [(row, one.value) for row in rows if (one := VALUES["bus_bandwidth"].read(row, rows)) is not None]
    used = [(row, rate, row.figures["link_bytes_per_s"]) for row, rate in moved if "link_bytes_per_s" in row.figures]
    if not used:
        return MISSING.format("the link beside the all-reduce")
    row, rate, link = max(used, key=lambda one: one[1] / one[2])
    text = (
        f"At most {rate / link:.0%}: {row.method} on {row.workers} workers at {_batch(row)} per worker moves "
        f"{rate / 1e9:.3g} GB/s of the {link / 1e9:.3g} GB/s that the link carries"
    )
    alone = VALUES["of_probe"].read(row, rows)
    if alone is not None:
        text += f", {alone.value:.0%} of what an all-reduce reaches with no backward beside it"
    shared = [rate for one, rate in moved if one.method == "shared-memory" and one.workers == row.workers]
    return f"{text}. shared-memory moves {max(shared) / 1e9:.3g} GB/s." if shared else f"{text}."


def _batch(row: Row) -> int:
    own = row.point.get("batch_per_worker")
    return int(own if own is not None else row.point["global_batch"] // row.workers)


def _size(row: Row) -> str:
    own = row.point.get("batch_per_worker")
    return f"{own} per worker" if own is not None else f"{row.point['global_batch']} in all"


def _samples(row: Row) -> int:
    return int(row.point["global_batch"])


def _sum(row: Row, names: tuple[str, ...]) -> float:
    return sum(row.parts.get(name, 0.0) for name in names)


def _time(row: Row) -> float:
    step = row.step()
    assert step is not None, "only rows with timed steps are ranked"
    return step.value


def _step(row: Row) -> str:
    return VALUES["step"].text(row.step())


REPLICA_ANSWERS: dict[str, Answer] = {
    "replicas-or-processes": replicas_or_processes,
    "data-loading": data_loading,
    "epoch-by-batch": epoch_by_batch,
    "kind-of-scaling": kind_of_scaling,
    "link-use": link_use,
}
