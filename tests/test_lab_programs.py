"""Programs beside a lab's report: plain torch.distributed, with the losses of the lab's own run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import TORCHS_OWN_ABORT

import syncline
from syncline.plan import load_plan
from syncline.study.cell_rows import losses_of
from syncline.study.file import load_study
from syncline.study.lab_code import LABS, built_in_labs
from syncline.study.programs import settings_of, write_programs

SETTINGS: dict[str, Any] = {
    "model": "vgg11-quarter", "data": "synthetic", "global_batch": 16, "steps": 3, "log_every": 1, "threads": 1,
    "recipe": "course", "evaluate": False, "seed": 7, "measure.calibration": 0,
}  # fmt: skip
SAME = 1e-5
"""Relative: sums in another order."""


@pytest.mark.parametrize("lab", built_in_labs())
def test_every_lab_has_programs_that_are_python(lab: str, tmp_path: Path) -> None:
    _, study = load_study(lab)
    assert study.scripts in {stage.name for stage in study.stage}
    names = write_programs(LABS / lab, load_plan(None, {**SETTINGS, "workers": 4}), tmp_path / "scripts")
    assert names
    for name in (*names, "model_and_data.py"):
        text = (tmp_path / "scripts" / name).read_text()
        compile(text, name, "exec")
        assert "$" not in text
        assert name == "model_and_data.py" or len(text.splitlines()) < 60, "small enough to read at once"
        assert name == "model_and_data.py" or "syncline." not in text, "plain PyTorch but for model and data"


def test_gather_and_scatter_take_about_40_lines() -> None:
    text = (LABS / "cs744" / "scripts" / "part2a_gather_scatter.py.template").read_text()
    assert len(text.splitlines()) <= 40


def test_settings_are_those_that_decide_the_losses() -> None:
    plan = load_plan(None, {**SETTINGS, "workers": 2, "optimizer.learning_rate": 0.02})
    again = load_plan(None, settings_of(plan))
    assert (again.optimizer, again.seed, again.global_batch) == (plan.optimizer, 7, 16)
    assert settings_of(plan)["optimizer.learning_rate"] == 0.02
    assert "epochs" not in settings_of(plan)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("lab", "program", "method"),
    [
        ("cs744", "part1_single", "single"),
        ("cs744", "part2a_gather_scatter", "gather-scatter"),
        ("cs744", "part2a_point_to_point", "point-to-point"),
        ("cs744", "part2b_all_reduce", "all-reduce"),
        ("cs744", "part3_ddp", "ddp"),
        ("ddp-paper", "figure6_overlap", "bucketed"),
    ],
)
def test_a_program_has_the_losses_of_the_lab_s_own_run(lab: str, program: str, method: str, tmp_path: Path) -> None:
    workers = 1 if method == "single" else 2
    run = syncline.train(settings={**SETTINGS, "method": method, "workers": workers}, run_dir=tmp_path / "run")
    write_programs(LABS / lab, run.plan, tmp_path / "scripts")
    launcher = (
        [sys.executable] if workers == 1 else [Path(sys.executable).with_name("torchrun"), "--nproc-per-node", "2"]
    )
    command = [str(word) for word in (*launcher, tmp_path / "scripts" / f"{program}.py")]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0 or TORCHS_OWN_ABORT in done.stderr, done.stderr
    printed = {
        (int(rank), int(step)): float(loss)
        for rank, step, loss in re.findall(r"rank (\d+) step (\d+) loss ([\d.]+)", done.stdout)
    }
    expected = {(rank, line["step"]): loss for line in losses_of(run) for rank, loss in enumerate(line["by_rank"])}
    assert printed.keys() == expected.keys()
    assert printed == {place: pytest.approx(loss, rel=SAME, abs=1e-6) for place, loss in expected.items()}
