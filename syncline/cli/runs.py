"""syncline runs and syncline methods: what there is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from syncline.cli import options
from syncline.plan import METHODS
from syncline.report.tables import print_table
from syncline.store import ROOT, RunFolder, list_runs


def runs(
    root: Annotated[Path, typer.Option(help="Folder that holds run folders.")] = ROOT, as_json: options.Json = False
) -> None:
    """List the runs, oldest first."""
    found = list_runs(root)
    if as_json:
        options.print_json([{"run": str(run.path), **run.info(), "plan": run.plan().model_dump()} for run in found])
    elif not found:
        print(f"no runs in {root.resolve()}; start one with: syncline train")
    else:
        columns = ["run", "kind", "started", "status", "model", "method", "workers"]
        print_table(columns, [_row(run) for run in found])
        print(f"last run {found[-1].path}; next: {_next(found[-1])}")


def _next(run: RunFolder) -> str:
    info = run.info()
    unfinished = info["kind"] == "train" and info["status"] != "finished"
    return f"syncline train --resume {run.path}" if unfinished else "syncline compare"


def _row(run: RunFolder) -> list[str]:
    info, plan = run.info(), run.plan()
    method = plan.method if info["kind"] == "train" else "-"
    return [str(run.path), info["kind"], info["created"], info["status"], plan.model, method, str(plan.workers)]


def methods(as_json: options.Json = False) -> None:
    """List the methods, one line each."""
    if as_json:
        options.print_json(METHODS)
        return
    for name, line in METHODS.items():
        print(f"{name:<16} {line}")
