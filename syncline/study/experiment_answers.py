"""Computed answers from a study's own experiments: large batches, samplers, what travels, gradients only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from syncline.study.rows import Row
from syncline.study.sweeps import MISSING, Answer, Rows
from syncline.units import format_bytes


def remedies(rows: Rows, _: Mapping[str, Rows]) -> str:
    """What a large batch loses against a small one after as many epochs, and what each remedy wins back.

    The reference is the smallest batch; of the largest, the first in the file is without any remedy.
    """
    ended = [row for row in rows if row.figures.get("epochs") and "test_accuracy" in row.figures["epochs"][-1]]
    sizes = sorted({row.point["global_batch"] for row in ended})
    large = [row for row in ended if sizes and row.point["global_batch"] == sizes[-1]]
    if len(sizes) < 2 or len(large) < 2:
        return MISSING.format("a large batch with and without remedies")
    reference = next(row for row in ended if row.point["global_batch"] == sizes[0])
    plain, *remedied = large
    count = len(reference.figures["epochs"])
    lost = _accuracy(reference) - _accuracy(plain)
    text = f"After {count} epochs {_told(reference)}, {_told(plain)}. "
    if lost <= _doubt(reference, plain):
        return f"{text}The large batch loses nothing that this test set could show, so there is nothing to mend."
    best = max(remedied, key=_accuracy)
    text += f"With remedies: {'; '.join(_told(row) for row in remedied)}. "
    won = _accuracy(best) - _accuracy(plain)
    if won <= _doubt(best, plain):
        return f"{text}They do not help here."
    gain = f"{won / lost:.0%} of the {100 * lost:.1f} points that were lost"
    return f"{text}The best of them, {best.point['variant']}, wins back {gain}. One seed each."


def _told(row: Row) -> str:
    last = row.figures["epochs"][-1]
    return (
        f"{row.point['variant']} is at training loss {last['train_loss']:.3f} and test accuracy {_accuracy(row):.1%}"
    )


def _accuracy(row: Row) -> float:
    return float(row.figures["epochs"][-1]["test_accuracy"])


def _doubt(one: Row, other: Row) -> float:
    """Two standard errors of a difference of accuracies, from the number of test samples."""
    variance = 0.0
    for row in (one, other):
        right, share = row.figures["epochs"][-1].get("test_correct"), _accuracy(row)
        if right and share:
            variance += share * (1 - share) / (right / share)
    return 2 * float(variance**0.5)


def set_epoch(rows: Rows, _: Mapping[str, Rows]) -> str:
    """What a rank gets from epoch to epoch, with and without set_epoch."""
    by_name = {str(row.point.get("sampler")): row.figures for row in rows if "same_batches" in row.figures}
    untold, told = by_name.get("DistributedSampler"), by_name.get("DistributedSampler, set_epoch")
    if untold is None or told is None:
        return MISSING.format("a sampler with and without set_epoch")
    if untold["same_batches"] < 1:
        return f"Nothing here: without set_epoch only {untold['same_batches']:.0%} of a rank's batches repeat."
    text = (
        "Without set_epoch every epoch is the first one again: all batches of a rank are those of the one before, "
        f"and it has seen {untold['seen']:.0%} of the training set in all its epochs. With it "
        f"{told['same_batches']:.0%} of the batches repeat, and it has seen {told['seen']:.0%}"
    )
    own = by_name.get("Syncline")
    if own is not None and own["same_batches"] < 1:
        found = f"{own['same_batches']:.0%} and {own['seen']:.0%}"
        return f"{text}. Syncline's sharding takes the epoch as an argument: {found}."
    return f"{text}."


def what_travels(rows: Rows, _: Mapping[str, Rows]) -> str:
    """Bytes of a step by batch-norm policy, beside the gradients."""
    found = {
        row.point["batch_norm"]: row.figures
        for row in rows
        if "start_bytes" in row.figures and (row.point.get("start"), row.point.get("classes")) == ("same", "all")
    }
    if not found:
        return MISSING.format("the bytes of a step")
    first = next(iter(found.values()))
    text = (
        f"Before the first step {format_bytes(first['start_bytes'])}, all weights and buffers of rank 0; in each "
        f"step {format_bytes(first['gradient_bytes'])} of gradients, and"
    )
    return f"{text} {'; '.join(_besides(policy, figures) for policy, figures in found.items())}."


def _besides(policy: str, figures: Mapping[str, Any]) -> str:
    more = [f"{format_bytes(figures[kind])} of {kind}" for kind in ("buffers", "statistics") if figures.get(kind)]
    return f"with batch norm {policy} {' and '.join(more) or 'nothing else'}"


def only_gradients(rows: Rows, _: Mapping[str, Rows]) -> str:
    """Where ranks drift apart although every gradient is averaged."""
    found = [row for row in rows if "weights_apart" in row.figures]
    local = [row for row in found if row.point["batch_norm"] == "local"]
    start = next((row for row in local if row.point["start"] == "different"), None)
    same = next((row for row in local if (row.point["start"], row.point["classes"]) == ("same", "all")), None)
    if start is None or same is None:
        return MISSING.format("training that sends gradients only")
    told = []
    if start.figures["weights_apart"] > 0:
        told.append(
            f"Ranks that did not start from the same weights stay {start.figures['weights_apart']:.0%} apart and are "
            f"two models ({start.figures['accuracy_0']:.1%} and {start.figures['accuracy_1']:.1%} right)"
        )
    if same.figures["weights_apart"] == 0 and same.figures["means_apart"] > 0:
        told.append(
            "from the same start weights stay equal to the bit, but the running means of batch norm lie "
            f"{same.figures['means_apart']:.1%} apart{_half(local, same)}"
        )
    whole = next((row for row in found if row.point["batch_norm"] == "sync" and row.point["start"] == "same"), None)
    if told and whole is not None and whole.figures["means_apart"] == 0:
        told.append("with statistics of the global batch (sync) nothing drifts")
    return f"{'; '.join(told)}." if told else "Nothing drifted apart in this run."


def _half(local: Rows, same: Row) -> str:
    half = next((row for row in local if row.point["classes"] != "all"), None)
    if half is None or half.figures["means_apart"] <= same.figures["means_apart"]:
        return ""
    return f", {half.figures['means_apart']:.1%} where each rank sees half of the classes"


EXPERIMENT_ANSWERS: dict[str, Answer] = {
    "remedies": remedies,
    "set-epoch": set_epoch,
    "what-travels": what_travels,
    "only-gradients": only_gradients,
}
