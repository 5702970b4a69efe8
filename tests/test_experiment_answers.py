"""The sentences about a study's own experiments: with data that makes them true, and data that makes them false."""

from __future__ import annotations

from typing import Any

from syncline.study.lab_code import LABS, load_answers
from syncline.study.rows import Row

ANSWERS = load_answers(LABS / "hpml-dataparallel")


def say(name: str, rows: list[Row]) -> str:
    return ANSWERS[name](rows, {})


def learnt(variant: str, batch: int, accuracy: float, loss: float = 1.0) -> Row:
    last = {"train_loss": loss, "test_accuracy": accuracy, "test_correct": round(accuracy * 10_000)}
    return Row("learn", {"variant": variant, "global_batch": batch}, figures={"epochs": [{}, {}, {}, {}, last]})


def test_remedies_that_help_are_said_to() -> None:
    rows = [
        learnt("small", 128, 0.6),
        learnt("large", 2048, 0.4),
        learnt("scaled", 2048, 0.5),
        learnt("both", 2048, 0.55),
    ]
    said = say("remedies", rows)
    assert said.startswith("After 5 epochs small has training loss 1.000 and test accuracy 60.0%, large has")
    assert said.endswith("The best of them, both, recovers 75% of the 20.0 points lost. Each ran with one seed.")


def test_remedies_that_do_not_help_are_said_not_to() -> None:
    rows = [
        learnt("small", 128, 0.6),
        learnt("large", 2048, 0.4),
        learnt("scaled", 2048, 0.1),
        learnt("both", 2048, 0.405),
    ]
    assert say("remedies", rows).endswith("They do not help here.")


def test_where_nothing_is_lost_nothing_is_mended() -> None:
    rows = [learnt("small", 128, 0.6), learnt("large", 2048, 0.595), learnt("scaled", 2048, 0.7)]
    assert "loses nothing that this test set can show" in say("remedies", rows)
    assert say("remedies", rows[:2]).startswith("Not answered")
    assert say("remedies", []).startswith("Not answered")


def sampled(name: str, same: float, seen: float) -> Row:
    return Row("order", {"sampler": name}, figures={"same_batches": same, "same_shard": same, "seen": seen})


def test_what_set_epoch_changes() -> None:
    told = sampled("DistributedSampler, set_epoch", 0.0, 0.875)
    said = say("set-epoch", [sampled("DistributedSampler", 1.0, 0.5), told, sampled("Syncline", 0.0, 0.88)])
    assert said.startswith("Because without set_epoch every epoch repeats the first")
    assert "sees only 50% of the training set" in said
    assert "With set_epoch 0% of its batches repeat, and it sees 88%." in said
    assert said.endswith("as an argument: 0% and 88%.")
    assert say("set-epoch", [sampled("DistributedSampler", 0.3, 0.9), told]).startswith("Nothing here")
    assert say("set-epoch", [told]).startswith("Not answered")


def sent(batch_norm: str, start: str = "same", classes: str = "all", **figures: Any) -> Row:
    usual = {"gradient_bytes": 2_000_000, "buffers": 0, "statistics": 0, "start_bytes": 2_100_000}
    ends = {"weights_apart": 0.0, "means_apart": 0.0, "accuracy_0": 0.5, "accuracy_1": 0.5}
    point = {"start": start, "classes": classes, "batch_norm": batch_norm}
    return Row("travels", point, figures={**usual, **ends, **figures})


def test_what_travels_besides_gradients() -> None:
    said = say("what-travels", [sent("local"), sent("broadcast", buffers=5600), sent("sync", statistics=22_000)])
    assert said == (
        "No. Before the first step rank 0 sends 2.1 MB, all its weights and buffers; each step then sends 2.0 MB of "
        "gradients, and with batch norm local nothing else; with batch norm broadcast 5.6 kB of buffers; with batch "
        "norm sync 22.0 kB of statistics."
    )
    assert "nothing else" not in say("what-travels", [sent("local", buffers=10)])
    assert say("what-travels", [sent("local", "different")]).startswith("Not answered")


def test_what_drifts_if_only_gradients_are_sent() -> None:
    apart = sent("local", "different", weights_apart=0.69, means_apart=0.7, accuracy_0=0.4)
    rows = [sent("local", means_apart=0.01), sent("local", classes="half", means_apart=0.05), apart, sent("sync")]
    said = say("only-gradients", rows)
    assert said.startswith("No. Ranks that start from different weights")
    assert "stay 69% apart and end as two models (accuracy 40.0% and 50.0%)" in said
    assert "means of batch norm drift 1.0% apart (5.0% if each rank sees only half of the classes)" in said
    assert "with statistics of the global batch (sync), nothing drifts" in said
    drifting = say("only-gradients", [*rows[:3], sent("sync", means_apart=0.1)])
    assert "nothing drifts" not in drifting
    assert say("only-gradients", [sent("local"), sent("local", "different")]) == "Nothing drifted apart in this run."
    assert say("only-gradients", [sent("sync")]).startswith("Not answered")
