"""Reports from stored runs alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from syncline.cli.studies import StudyRun
from syncline.errors import RunFolderError
from syncline.forms import checked
from syncline.report.page import write_report
from syncline.store import open_run
from syncline.study.cells import Ground
from syncline.study.contents import study_contents
from syncline.study.file import Study, load_study
from syncline.study.results import run_rows


def report_runs(paths: Sequence[Path], out: Path, *, answers: bool) -> Path:
    """A lab's folder is reported as the lab; other runs side by side, in one table."""
    labs = [path for path in paths if (path / "lab.json").exists()]
    if labs and len(paths) > 1:
        raise RunFolderError("a lab's folder is reported alone.", action=f"Give only {labs[0]}.")
    return _report_lab(labs[0], out, answers=answers) if labs else _report_runs(paths, out, answers=answers)


def _report_lab(folder: Path, out: Path, *, answers: bool) -> Path:
    told = json.loads((folder / "lab.json").read_text())
    if "study" not in told:
        raise RunFolderError(f"{folder} holds a curve of `syncline scale`.", action="Its report is beside it.")
    _, study = load_study(told["study"])
    study = study.with_settings(told.get("settings", {}))
    run = StudyRun(study, folder, Ground(told["hosts"], told["link"]), told["quick"], f"syncline report {folder}")
    run.collect()
    return run.report(out, answers=answers)


def _report_runs(paths: Sequence[Path], out: Path, *, answers: bool) -> Path:
    runs = [open_run(path) for path in paths]
    rows = [row for run in runs for row in run_rows(run.path, "runs")]
    if not rows:
        raise RunFolderError("none of these runs has a result yet.", action="`syncline runs` shows their state.")
    methods = {"title": "Runs side by side", "stage": "runs"}
    study = checked(
        Study,
        {
            "title": "Runs side by side" if len(runs) > 1 else f"Run {runs[0].path.name}",
            "question": "What did these runs cost, and what did they reach?",
            "answer": "fastest",
            "answer_stage": "runs",
            "stage": [{"name": "runs"}],
            "table": [
                {**methods, "rows": ["method", "workers"], "values": ["step", "throughput", "loss"], "main": True},
                {
                    **methods, "title": "Where the step goes", "rows": ["method", "workers"],
                    "values": ["data", "forward", "backward", "pack", "wait", "wire", "update", "other", "overlap"],
                },
                {
                    **methods, "title": "Loss and accuracy", "rows": ["method", "workers"],
                    "values": ["train_loss", "train_accuracy", "test_loss", "test_accuracy"],
                },
            ],
            "figure": [
                {
                    "title": "Where the step goes", "stage": "runs", "kind": "stacked", "x": "method", "main": True,
                    "values": ["data", "forward", "backward", "pack", "wait", "wire", "update", "other"],
                },
                {"title": "Loss against iteration", "stage": "runs", "kind": "loss"},
            ],
        },
        "the report",
    )  # fmt: skip
    contents = study_contents(
        study,
        rows,
        json.loads((runs[0].path / "machine.json").read_text()),
        answers=answers,
        repeat="\n".join(f"syncline report {run.path}" for run in runs),
        plans=[(run.path.name, run.plan().to_toml()) for run in runs],
    )
    return write_report(contents, out)
