"""A small study that scales what it recorded, at the best of its earlier stages, from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Cli

from syncline.study.cells import Ground, expand
from syncline.study.file import parse_study

SMALL = """
title = "Small"
question = "Q?"
answer = "laws"
answer_stage = "strong"
[plan]
model = "mlp"
evaluate = false
steps = 2
"measure.warmup" = 1
[[stage]]
name = "threads"
methods = ["bucketed"]
grid = { workers_per_node = [1, 2], threads = [1, 1000] }
plan = { nodes = 1, global_batch = 8, "measure.calibration" = 0 }
threads_per_core = 2
[[stage]]
name = "batch"
methods = ["bucketed"]
grid = { batch_per_node = [4, 8, 16] }
best_of = { stage = "threads", keys = ["workers_per_node", "threads"] }
plan = { nodes = 1, "measure.calibration" = 2 }
[[stage]]
name = "strong"
methods = ["single", "bucketed"]
grid = { nodes = [1, 2, 4, 8] }
best_of = { stage = "batch", keys = ["workers_per_node", "threads"] }
plan = { global_batch = 16 }
replay = "batch"
[[table]]
title = "Strong"
stage = "strong"
rows = ["method", "nodes"]
values = ["step", "speedup", "efficiency"]
main = true
"""


def test_a_study_scales_what_it_recorded_at_its_best(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    (folder / "small.toml").write_text(SMALL)
    done = cli("lab", "small.toml", "--set", "data=synthetic")
    assert done.returncode == 0, done.stderr
    assert "9 cells" in done.stdout
    assert "nodes 8" in (skipped := next(line for line in done.stdout.splitlines() if "skipped" in line))
    assert "stage batch recorded no mlp at" in skipped
    told = (folder / "runs" / "lab-small" / "report" / "report.md").read_text()
    lines = [line.split(" | ") for line in told.splitlines() if line.startswith("| bucketed")]
    assert [line[1] for line in lines] == ["1", "2", "4"]
    assert all("-" not in line[2:] for line in lines), "a replayed row has a replayed baseline"
    assert "**replayed**: Compute is slept, only the exchange over this machine's loopback is real." in told
    assert "Amdahl, mlp:" in told or "No answer: other programs took" in told, "the machine may be busy"
    cells = {path.name.partition("-")[0] for path in (folder / "runs" / "lab-small" / "cells").iterdir()}
    assert cells == {"threads", "batch", "strong"}
    again = cli("report", "runs/lab-small", "-o", "again")
    assert again.returncode == 0, again.stderr
    assert [line for line in (folder / "again" / "report.md").read_text().splitlines() if "| bucketed" in line] == [
        line for line in told.splitlines() if "| bucketed" in line
    ], "with the settings of the run"


@pytest.mark.parametrize(("per_node", "alone"), [(1, [True, False]), (2, [False, False])])
def test_one_worker_on_the_whole_batch_has_no_recorded_time(per_node: int, alone: list[bool]) -> None:
    study = parse_study(SMALL, "small.toml")
    best = {(): {"workers_per_node": per_node, "threads": 1}}
    cells = expand(study, study.stage[2], Ground(), quick=False, best=best, recorded={("mlp", 8): "runs/one"})
    assert ["single" in cell.methods for cell in cells[:2]] == alone
