"""Answers of the lab hpml-dataparallel: replicas or processes, batch sizes, scaling, the link, learning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from syncline.accounting.sanity import inside_spread
from syncline.methods import BASELINE
from syncline.study.answering import Rows, missing, no_difference, read, step_text, step_time
from syncline.study.rows import Row
from syncline.units import format_bytes, format_seconds

REPLICAS, PROCESSES = "thread-replicas", "ddp"
COMPUTED = ("forward", "backward")
SENT = ("pack", "wait", "wire")
KEEP_UP = 0.02
"""Loaders whose batches are waited for by less than this share of an epoch keep up."""


def replicas_or_processes(rows: Rows, _: Mapping[str, Rows]) -> str:
    """Which is faster, at each batch size, and in which part of the step the difference lies."""
    workers = _own_cores([row for row in rows if row.workers > 1])
    pairs = [
        (replicas, processes)
        for replicas in rows
        for processes in rows
        if (replicas.method, processes.method) == (REPLICAS, PROCESSES)
        and replicas.workers == processes.workers == workers
        and _batch(replicas) == _batch(processes)
        and replicas.seconds
        and processes.seconds
    ]
    if not pairs:
        return missing(f"{REPLICAS} beside {PROCESSES} on several workers")
    pairs.sort(key=lambda pair: _batch(pair[0]))
    text = f"On {workers} workers {'; '.join(_verdicts(pairs))}."
    apart = [pair for pair in pairs if not no_difference(*pair)]
    if not apart:
        return text
    return f"{text} {_why(*max(apart, key=lambda pair: abs(step_time(pair[0]) / step_time(pair[1]) - 1)))}"


def _own_cores(rows: Rows) -> int:
    """The most workers that had cores of their own; the fewest where none had."""
    fit = [row.workers for row in rows if not row.stretched]
    return max(fit) if fit else min((row.workers for row in rows), default=0)


def _verdicts(pairs: Sequence[tuple[Row, Row]]) -> list[str]:
    """One for each outcome, with all batch sizes that it holds for."""
    by_outcome: dict[str, list[str]] = {}
    for replicas, processes in pairs:
        ratio = step_time(replicas) / step_time(processes)
        outcome = f"{PROCESSES} is faster" if ratio > 1 else f"{REPLICAS} is faster"
        times = f"{step_text(processes)} a step with {PROCESSES}, {step_text(replicas)} with {REPLICAS}"
        if no_difference(replicas, processes):
            outcome = "this run shows no difference"
        else:
            times += f": {max(ratio, 1 / ratio):.2f} times as long"
        by_outcome.setdefault(outcome, []).append(f"at {_batch(replicas)} samples per worker ({times})")
    return [f"{outcome} {' and '.join(where)}" for outcome, where in by_outcome.items()]


def _why(replicas: Row, processes: Row) -> str:
    if not replicas.parts or not processes.parts:
        return "The run did not record why."
    compute = _sum(replicas, COMPUTED) - _sum(processes, COMPUTED)
    sent = _sum(processes, SENT) - _sum(replicas, SENT)
    slower = step_time(replicas) > step_time(processes)
    text = (
        f"At {_batch(replicas)}, forward and backward take {format_seconds(abs(compute))} "
        f"{'longer' if compute > 0 else 'less'} in {REPLICAS}, and {PROCESSES} spends {format_seconds(abs(sent))} "
        f"{'more' if sent > 0 else 'less'} on copying, waiting and sending"
    )
    if slower and compute > max(0.0, sent):
        return f"{text}: sharing one interpreter and adding gradients one after the other costs the threads more."
    if not slower and compute <= 0 < sent:
        return f"{text}: the threads do not slow each other down, and have nothing to send."
    if not slower and sent > compute:
        return f"{text}: the threads save more than they cost each other."
    return f"{text}: that alone does not explain the difference."


def data_loading(rows: Rows, _: Mapping[str, Rows]) -> str:
    """What waiting for batches adds to an epoch."""
    shares = []
    for row in rows:
        whole, bare = (read(name, row) for name in ("epoch", "epoch_without_data"))
        if whole is not None and bare is not None and bare > 0:
            shares.append((whole / bare - 1, f"({row.method}, {_batch(row)} per worker)"))
    if not shares:
        return missing("an epoch with its data")
    low, high = min(shares), max(shares)
    most = f"{high[0]:.1%} {high[1]}"
    if high[0] < KEEP_UP:
        return f"Almost nothing: waiting for batches adds at most {most} to an epoch. The loaders keep up."
    return (
        f"Waiting for batches adds between {low[0]:.1%} {low[1]} and {most} to an epoch; loaders run on the same "
        "cores as training."
    )


def epoch_by_batch(rows: Rows, others: Mapping[str, Rows]) -> str:
    """At which batch size an epoch is shortest, for each method; and where the memory ends."""
    sentences = []
    for method in dict.fromkeys(row.method for row in rows):
        own = [row for row in rows if row.method == method and row.seconds]
        if len(own) > 1:
            sentences.append(_shortest(method, own))
    text = " ".join(sentences) or missing("an epoch at several batch sizes")
    return f"{text} {_memory([row for rows in others.values() for row in rows])}".strip()


def _shortest(method: str, rows: Rows) -> str:
    ranked = sorted(rows, key=lambda row: step_time(row) / _samples(row))
    best, worst = ranked[0], ranked[-1]
    scaled = {id(row): [value / _samples(row) for value in row.seconds] for row in ranked}
    equal = [row for row in ranked[1:] if inside_spread(scaled[id(row)], scaled[id(best)], ("", "")) is not None]
    if len(equal) == len(ranked) - 1:
        return f"{method}: no difference between the batch sizes tried."
    gain = (step_time(worst) / _samples(worst)) / (step_time(best) / _samples(best))
    also = f" (no measurable difference from {', '.join(str(_batch(row)) for row in equal)})" if equal else ""
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
        f"A sample takes {format_bytes(round(figures['bytes_per_sample']))} of memory (measured): one worker has "
        f"room for a batch of {max(fit)}" if fit else "One worker has room for none of the batches"
    )  # fmt: skip
    missing = [_batch(row) for row in known if not row.figures["fits"]]
    return f"{text}, but not for one of {min(missing)}." if missing and fit else f"{text}."


def kind_of_scaling(rows: Rows, others: Mapping[str, Rows]) -> str:
    """Whether the batch per worker or the global batch stayed the same in each stage, and what that gave."""
    stages = (rows, *others.values())
    sentences = [sentence for these in stages if (sentence := _scaling(these)) is not None]
    if not sentences:
        return missing("scaling against one worker")
    if any(row.stretched for these in stages for row in these):
        sentences.append("Some of these workers shared cores, so their speed-up says little about the method.")
    return " ".join(sentences)


def _scaling(rows: Rows) -> str | None:
    scaled = [row for row in rows if row.workers > 1 and row.method != BASELINE and row.seconds]
    known = [(row, speedup) for row in scaled if (speedup := read("speedup", row, rows)) is not None]
    if not known:
        return None
    each = {(_batch(row), row.point.get("global_batch")) for row, _ in known}
    weak = all(row.point.get("batch_per_worker") is not None for row, _ in known) and len(
        {whole for _, whole in each}
    ) > len({own for own, _ in each})
    kind = (
        "At one batch per worker the global batch grows with the workers: weak scaling"
        if weak
        else "At one global batch each worker takes a smaller share of it: strong scaling"
    )
    best = {count: max((pair for pair in known if pair[0].workers == count), key=lambda pair: pair[1])
            for count in sorted({row.workers for row, _ in known})}  # fmt: skip
    gains = [f"{value:.2f} on {count} workers ({row.method}, {_size(row)})" for count, (row, value) in best.items()]
    return f"{kind}. The best speed-up is {' and '.join(gains)}."


def link_use(rows: Rows, _: Mapping[str, Rows]) -> str:
    """How much of the link the all-reduce of gradients uses during training, and what shared memory does instead."""
    moved = [(row, rate) for row in rows if (rate := read("bus_bandwidth", row)) is not None]
    used = [(row, rate, row.figures["link_bytes_per_s"]) for row, rate in moved if "link_bytes_per_s" in row.figures]
    if not used:
        return missing("the link beside the all-reduce")
    row, rate, link = max(used, key=lambda case: case[1] / case[2])
    text = (
        f"At most {rate / link:.0%}: {row.method} on {row.workers} workers at {_batch(row)} per worker moves "
        f"{rate / 1e9:.3g} GB/s of the {link / 1e9:.3g} GB/s that the link carries"
    )
    alone = read("of_probe", row)
    if alone is not None:
        text += f", {alone:.0%} of what an all-reduce reaches while nothing computes"
    shared = [rate for other, rate in moved if (other.method, other.workers) == ("shared-memory", row.workers)]
    return f"{text}. shared-memory moves {max(shared) / 1e9:.3g} GB/s." if shared else f"{text}."


def remedies(rows: Rows, _: Mapping[str, Rows]) -> str:
    """What a large batch loses against a small one after as many epochs, and what each remedy wins back.

    The reference is the smallest batch; of the largest, the first in the file is without any remedy.
    """
    ended = [row for row in rows if row.figures.get("epochs") and "test_accuracy" in row.figures["epochs"][-1]]
    sizes = sorted({row.point["global_batch"] for row in ended})
    large = [row for row in ended if sizes and row.point["global_batch"] == sizes[-1]]
    if len(sizes) < 2 or len(large) < 2:
        return missing("a large batch with and without remedies")
    reference = next(row for row in ended if row.point["global_batch"] == sizes[0])
    plain, *remedied = large
    count = len(reference.figures["epochs"])
    lost = _accuracy(reference) - _accuracy(plain)
    text = f"After {count} epochs {_outcome(reference)}, {_outcome(plain)}. "
    if lost <= _doubt(reference, plain):
        return f"{text}The large batch loses nothing that this test set can show, so there is nothing to remedy."
    best = max(remedied, key=_accuracy)
    text += f"With remedies: {'; '.join(_outcome(row) for row in remedied)}. "
    won = _accuracy(best) - _accuracy(plain)
    if won <= _doubt(best, plain):
        return f"{text}They do not help here."
    gain = f"{won / lost:.0%} of the {100 * lost:.1f} points lost"
    return f"{text}The best of them, {best.point['variant']}, recovers {gain}. Each ran with one seed."


def _outcome(row: Row) -> str:
    last = row.figures["epochs"][-1]
    return f"{row.point['variant']} has training loss {last['train_loss']:.3f} and test accuracy {_accuracy(row):.1%}"


def _accuracy(row: Row) -> float:
    return float(row.figures["epochs"][-1]["test_accuracy"])


def _doubt(first: Row, second: Row) -> float:
    """Two standard errors of a difference of accuracies, from the number of test samples."""
    variance = 0.0
    for row in (first, second):
        right, share = row.figures["epochs"][-1].get("test_correct"), _accuracy(row)
        if right and share:
            variance += share * (1 - share) / (right / share)
    return 2 * float(variance**0.5)


def set_epoch(rows: Rows, _: Mapping[str, Rows]) -> str:
    """What a rank gets from epoch to epoch, with and without set_epoch."""
    by_name = {str(row.point.get("sampler")): row.figures for row in rows if "same_batches" in row.figures}
    without_epoch, with_epoch = by_name.get("DistributedSampler"), by_name.get("DistributedSampler, set_epoch")
    if without_epoch is None or with_epoch is None:
        return missing("a sampler with and without set_epoch")
    if without_epoch["same_batches"] < 1:
        return f"Nothing here: without set_epoch only {without_epoch['same_batches']:.0%} of a rank's batches repeat."
    text = (
        "Because without set_epoch every epoch repeats the first: a rank gets the same batches again and sees only "
        f"{without_epoch['seen']:.0%} of the training set in all its epochs. With set_epoch "
        f"{with_epoch['same_batches']:.0%} of its batches repeat, and it sees {with_epoch['seen']:.0%}"
    )
    own = by_name.get("Syncline")
    if own is not None and own["same_batches"] < 1:
        shares = f"{own['same_batches']:.0%} and {own['seen']:.0%}"
        return f"{text}. Syncline's sharding takes the epoch as an argument: {shares}."
    return f"{text}."


def what_travels(rows: Rows, _: Mapping[str, Rows]) -> str:
    """Bytes of a step by batch-norm policy, beside the gradients."""
    by_policy = {
        row.point["batch_norm"]: row.figures
        for row in rows
        if "start_bytes" in row.figures and (row.point.get("start"), row.point.get("classes")) == ("same", "all")
    }
    if not by_policy:
        return missing("the bytes of a step")
    first = next(iter(by_policy.values()))
    text = (
        f"No. Before the first step rank 0 sends {format_bytes(first['start_bytes'])}, all its weights and buffers; "
        f"each step then sends {format_bytes(first['gradient_bytes'])} of gradients, and"
    )
    return f"{text} {'; '.join(_besides(policy, figures) for policy, figures in by_policy.items())}."


def _besides(policy: str, figures: Mapping[str, Any]) -> str:
    more = [f"{format_bytes(figures[kind])} of {kind}" for kind in ("buffers", "statistics") if figures.get(kind)]
    return f"with batch norm {policy} {' and '.join(more) or 'nothing else'}"


def only_gradients(rows: Rows, _: Mapping[str, Rows]) -> str:
    """Where ranks drift apart although every gradient is averaged."""
    measured = [row for row in rows if "weights_apart" in row.figures]
    local = [row for row in measured if row.point["batch_norm"] == "local"]
    start = next((row for row in local if row.point["start"] == "different"), None)
    same = next((row for row in local if (row.point["start"], row.point["classes"]) == ("same", "all")), None)
    if start is None or same is None:
        return missing("training that sends gradients only")
    sentences = []
    if start.figures["weights_apart"] > 0:
        sentences.append(
            f"Ranks that start from different weights stay {start.figures['weights_apart']:.0%} apart and end as two "
            f"models (accuracy {start.figures['accuracy_0']:.1%} and {start.figures['accuracy_1']:.1%})"
        )
    if same.figures["weights_apart"] == 0 and same.figures["means_apart"] > 0:
        sentences.append(
            "from the same start, weights stay bitwise equal, but the running means of batch norm drift "
            f"{same.figures['means_apart']:.1%} apart{_half(local, same)}"
        )
    synced = [row for row in measured if row.point["batch_norm"] == "sync"]
    whole = next((row for row in synced if row.point["start"] == "same"), None)
    if sentences and whole is not None and whole.figures["means_apart"] == 0:
        sentences.append("with statistics of the global batch (sync), nothing drifts")
    return f"No. {'; '.join(sentences)}." if sentences else "Nothing drifted apart in this run."


def _half(local: Rows, same: Row) -> str:
    half = next((row for row in local if row.point["classes"] != "all"), None)
    if half is None or half.figures["means_apart"] <= same.figures["means_apart"]:
        return ""
    return f" ({half.figures['means_apart']:.1%} if each rank sees only half of the classes)"


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
