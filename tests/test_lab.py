"""`syncline lab`, `scale` and `report` from the command line, on studies of seconds."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from conftest import SYNCLINE, Cli, CliServer, cli_environment, killed_at_end

STUDY = """
title = "Small study"
question = "Which is fastest?"
answer = "fastest"
answer_stage = "time"
[plan]
model = "mlp"
data = "synthetic"
threads = 1
global_batch = 8
evaluate = false
"measure.calibration" = 0
[[stage]]
name = "time"
methods = ["all-reduce", "ddp"]
grid = { workers = [2] }
plan = { steps = 5, "measure.warmup" = 1 }
[[stage]]
name = "learn"
run = "train"
methods = ["ddp", "bucketed"]
plan = { workers = 2, steps = STEPS, log_every = 1 }
[[table]]
title = "Step time"
stage = "time"
values = ["step", "wire", "other"]
main = true
[[figure]]
title = "Loss"
kind = "loss"
stage = "learn"
[[figure]]
title = "A step"
kind = "timeline"
stage = "time"
where = { method = "ddp" }
"""


def write_study(folder: Path, steps: int = 2) -> Path:
    path = folder / "small.toml"
    path.write_text(STUDY.replace("STEPS", str(steps)))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, cli_server: CliServer) -> tuple[Path, str]:
    """A folder in which the study has run, and what it printed."""
    folder = tmp_path_factory.mktemp("lab")
    done = cli_server.run(("lab", write_study(folder)), folder, cli_environment())
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_a_study_runs_to_its_report(finished: tuple[Path, str]) -> None:
    folder, said = finished
    lines = said.splitlines()
    assert lines[:2] == ["Small study", f"3 cells; {Path('runs') / 'lab-small'}"]
    assert re.fullmatch(r"estimate: about .* of memory", lines[2])
    assert lines[-1] == "report runs/lab-small/report/index.html"
    report = folder / "runs" / "lab-small" / "report"
    assert 600_000 < (report / "index.html").stat().st_size < 1_500_000, "the plotting library is inside, packed"
    assert "### Step time" in (report / "report.md").read_text()
    assert (report / "figures" / "loss.svg").exists()


def test_started_again_it_repeats_nothing(finished: tuple[Path, str], cli: Cli) -> None:
    again = cli("lab", "small.toml", cwd=finished[0])
    assert again.returncode == 0, again.stderr
    assert "3 cells, 3 already finished" in again.stdout
    assert "[1/3]" not in again.stdout


def test_a_report_is_written_from_stored_runs_alone(finished: tuple[Path, str], cli: Cli) -> None:
    folder = finished[0]
    report = cli("report", "runs/lab-small", "-o", "other", "--no-answers", cwd=folder)
    assert report.returncode == 0, report.stderr
    assert "(left open)" in (folder / "other" / "report.md").read_text()
    cells = sorted((folder / "runs" / "lab-small" / "cells").glob("learn*"))
    single = cli("report", *cells, "-o", "runs-report", cwd=folder)
    assert single.returncode == 0, single.stderr
    assert re.search(
        r"^\| bucketed(<sup>[a-z,]+</sup>)? \| 2 \|", (folder / "runs-report" / "report.md").read_text(), re.MULTILINE
    )


def test_ctrl_c_keeps_what_is_finished(tmp_path: Path, cli: Cli) -> None:
    study = write_study(tmp_path, steps=100_000)
    process = subprocess.Popen(
        [SYNCLINE, "lab", study], cwd=tmp_path, env=cli_environment(), start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with killed_at_end(process):
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("[2/3]"):
                break
        os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Finished cells are kept; continue with: syncline lab" in error
    cells = tmp_path / "runs" / "lab-small" / "cells"
    finished = [
        path.name for path in cells.iterdir() if json.loads((path / "run.json").read_text())["status"] == "finished"
    ]
    assert [name.partition("-")[0] for name in finished] == ["time"]
    assert cli("report", "runs/lab-small", cwd=tmp_path).returncode == 0
    said = (tmp_path / "report" / "report.md").read_text()
    assert f"## Finish it\n\n```\nsyncline lab {study}\n```" in said
    assert "- not finished: learn: method ddp; learn: method bucketed" in said


def test_one_scaling_curve(cli: Cli, tmp_path: Path) -> None:
    done = cli(
        *("scale", "--method", "all-reduce", "--workers", "2", "--weak", "--model", "mlp", "--data", "synthetic"),
        *("--batch", "8", "--steps", "5", "--set", "measure.calibration=0"),
    )
    assert done.returncode == 0, done.stderr
    assert "Scaling of all-reduce at one batch per worker (weak)" in done.stdout
    assert re.search(r"^ 1 +single ", done.stdout, re.MULTILINE), "the baseline row is in the table"
    said = ("times as many samples a second as one worker", "No answer: other programs took")
    assert any(words in done.stdout for words in said), "the machine may be busy"
    assert (tmp_path / "work" / "runs" / "scale-all-reduce-weak-1-2" / "report" / "index.html").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lab", "cs745"], "'cs745' is neither a lab nor a file"),
        (["lab", "hpml-dataparallel", "--hosts", "4"], "--hosts and --link go together"),
        (["lab", "cs744", "--loopback", "--link", "1gbit"], "--loopback contradicts --hosts and --link"),
        (["scale", "--workers", "many"], "not a list of numbers"),
        (["scale", "--method", "dpp"], "Did you mean 'ddp'?"),
        (["report", "nowhere"], "not a run folder"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(cli: Cli, tmp_path: Path, arguments: list[str], said: str) -> None:
    done = cli(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list((tmp_path / "work").iterdir()) == []


def test_labs_are_listed(cli: Cli) -> None:
    assert "cs744 " in cli("lab", "list").stdout
