"""syncline runs and syncline methods: what there is."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from syncline.cli import options
from syncline.methods import METHODS
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
        _print_aligned([_row(run) for run in found])
        print(f"last run {found[-1].path}; next: {_next(found[-1])}")


def _next(run: RunFolder) -> str:
    info = run.info()
    unfinished = info["kind"] == "train" and info["status"] != "finished"
    return f"syncline train --resume {run.path}" if unfinished else "syncline compare"


def _row(run: RunFolder) -> list[str]:
    info, plan = run.info(), run.plan()
    method = plan.method if info["kind"] == "train" else "-"
    workers = "1 worker" if plan.workers == 1 else f"{plan.workers} workers"
    return [str(run.path), info["status"], _minute(info["created"]), info["kind"], plan.model, method, workers]


def _minute(created: str) -> str:
    return f"{datetime.fromisoformat(created):%Y-%m-%d %H:%M}"


def _print_aligned(rows: list[list[str]]) -> None:
    """Plain lines: a path that a table had cut to fit could not be copied."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def methods(as_json: options.Json = False) -> None:
    """List the methods, one line each."""
    if as_json:
        options.print_json({name: row.about for name, row in METHODS.items()})
        return
    for name, row in METHODS.items():
        print(f"{name:<16} {row.about}")
