"""The report of the lab hpml-dataparallel, from made-up results of every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_report import BROWSER, MACHINE, PARTS, open_in_browser

from syncline.report.page import write_report
from syncline.study.cell_rows import with_links
from syncline.study.figures import Bar, Timeline
from syncline.study.file import load_study
from syncline.study.rows import Row
from syncline.study.runner import Contents, study_contents

METHODS = ("ddp", "thread-replicas", "shared-memory")
EXPERIMENTS = {
    "order": [({"sampler": name}, {"same_batches": same, "same_shard": same, "seen": 0.5})
              for name, same in (("DistributedSampler", 1.0), ("DistributedSampler, set_epoch", 0.0))],
    "travels": [({"start": start, "classes": "all", "batch_norm": "local"},
                 {"start_bytes": 9, "gradient_bytes": 9, "buffers": 0, "statistics": 0, "messages": 3,
                  "weights_apart": apart, "means_apart": 0.1, "accuracy_0": 0.5, "accuracy_1": 0.6})
                for start, apart in (("same", 0.0), ("different", 0.7))],
    "memory": [({"batch_per_worker": 32},
                {"bytes_per_sample": 7e6, "needed_bytes": 7e8, "room_share": 0.1, "fits": True})],
}  # fmt: skip


def timed(stage: str, method: str, workers: int, batch: int) -> Row:
    point: dict[str, Any] = {"method": method, "workers": workers, "global_batch": batch * workers}
    point |= {"batch_per_worker": batch} if stage != "strong" else {"global_batch": batch}
    seconds = [0.1 * batch * (1 + 0.2 * METHODS.index(method)) + 0.001 * i if method in METHODS else 0.1 * batch
               for i in range(5)]  # fmt: skip
    figures = {"train_samples": 1000, "gradient_bytes": 10**7}
    return Row(stage, point, seconds, figures, PARTS if method in METHODS else {})


def rows() -> list[Row]:
    found = [timed("epochs", method, 2, batch) for batch in (4, 16) for method in METHODS]
    for stage, batches in (("weak", (4, 16)), ("strong", (16,))):
        for batch in batches:
            found += [timed(stage, "single", 1, batch)]
            found += [timed(stage, method, workers, batch) for workers in (1, 2, 4) for method in METHODS]
    for operation in ("all_reduce", "send_receive"):
        point = {"workers": 2, "backend": "gloo", "operation": operation}
        points = [{"bytes": 10**7, "bytes_per_s": 1e9}]
        found.append(Row("link", point, figures={"latency": 1e-4, "link_rate": 2e9, "points": points}))
    for variant, batch, accuracy in (("batch 128", 128, 0.6), ("batch 1024", 1024, 0.4), ("scaled", 1024, 0.5)):
        last = {
            "train_loss": 1.0,
            "train_accuracy": 0.5,
            "test_loss": 1.0,
            "test_accuracy": accuracy,
            "test_correct": 100,
        }
        figures = {"losses": [{"step": 5, "loss": 2.0}, {"step": 10, "loss": 1.0}], "epochs": [last]}
        found.append(Row("learn", {"variant": variant, "global_batch": batch}, figures=figures))
    for stage, entries in EXPERIMENTS.items():
        found += [Row(stage, point, figures=figures) for point, figures in entries]
    return with_links(found)


@pytest.fixture
def contents() -> Contents:
    _, study = load_study("hpml-dataparallel")
    timeline = Timeline("A step", ["rank 0 compute"], [Bar("rank 0 compute", "forward", 0.0, 10.0, "forward 10 ms")])
    return study_contents(
        study, rows(), MACHINE, answers=True, timelines=[timeline], repeat="syncline lab x", quick=True
    )


def test_every_table_and_figure_is_filled_and_every_question_answered(contents: Contents) -> None:
    assert contents.main_table is not None
    assert contents.main_figure is not None
    for table in (contents.main_table, *contents.tables):
        assert table.rows, table.title
        for number, label in enumerate(table.columns):
            assert {line[number] for line in table.rows} != {"-"}, f"{table.title}: {label}"
    assert len(contents.figures) == 4
    assert [text for text, answer in contents.asks if "Not answered" in answer] == []


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_browser_draws_the_lab_without_an_error(contents: Contents, tmp_path: Path) -> None:
    drawn, errors = open_in_browser(write_report(contents, tmp_path / "report"), 1280, tmp_path)
    assert errors == []
    assert drawn.count("<table") == len(contents.tables) + 1
    assert drawn.count('class="main-svg"') >= len(contents.figures) + 2
    for table in contents.tables:
        assert table.title in drawn
