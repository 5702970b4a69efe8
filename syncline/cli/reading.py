"""syncline runs, explain and trace: what stored runs say."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from syncline import jobs
from syncline.cli import options
from syncline.errors import PlanError
from syncline.files import write_atomic
from syncline.methods import METHODS, current_name, method_of
from syncline.store import ROOT, RunFolder, list_runs, run_with_steps
from syncline.units import printable


def runs(
    root: Annotated[Path, typer.Option(help="Folder with the run folders.")] = ROOT, as_json: options.Json = False
) -> None:
    """List the runs, oldest first."""
    problems: list[str] = []
    found = list_runs(root, problems)
    for problem in problems:
        print(f"note: left out: {problem}", file=sys.stderr)
    if as_json:
        about = [{**run.info(), "status": run.status(), "plan": run.plan().model_dump()} for run in found]
        options.print_json([{"run": str(run.path), **own} for run, own in zip(found, about, strict=True)])
    elif not found:
        print(f"no runs in {root.resolve()}; start one with: syncline train")
    else:
        _print_aligned([_row(run) for run in found])
        print(f"last run {found[-1].path}; next: {_next(found[-1])}")


def _next(run: RunFolder) -> str:
    info = run.info()
    unfinished = info["kind"] == "train" and run.status() not in ("finished", "running")
    return f"syncline train --resume {run.path}" if unfinished else "syncline compare"


def _row(run: RunFolder) -> list[str]:
    info, plan = run.info(), run.plan()
    method = plan.method if info["kind"] == "train" else "-"
    workers = "1 worker" if plan.workers == 1 else f"{plan.workers} workers"
    minute = f"{datetime.fromisoformat(info['created']):%Y-%m-%d %H:%M}"
    return [printable(str(run.path)), run.status(), minute, info["kind"], plan.model, method, workers]


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


def explain(
    run: Annotated[str | None, typer.Argument(help="A run's folder or URL; default the newest in runs/.")] = None,
    step: Annotated[int | None, typer.Option(help="Explain one step, rank by rank and bucket by bucket.")] = None,
    method: Annotated[str | None, typer.Option(help="Explain one method of a comparison.")] = None,
    probe: Annotated[
        str | None, typer.Option(help="A probe run to compute utilisation from; default the newest that fits.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Say where the time of a run went, in a table and in words.

    The parts of a step add up to it; waiting is charged to the rank that was last.
    """
    if step is None:
        explanation = jobs.explain(run, method=method, probe=probe)
        from syncline.report.explained import show_explanation

        options.print_json(explanation.as_document()) if as_json else show_explanation(explanation)
        return
    # Here, because the schedules that bytes are reckoned from load torch.
    from syncline.accounting.explanation import explain_step
    from syncline.report.explained import show_step

    explained = explain_step(run_with_steps(run), step, method=method)
    options.print_json(explained.as_document()) if as_json else show_step(explained)


def trace(
    run: Annotated[str | None, typer.Argument(help="A run's folder or URL; default the newest in runs/.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="File for the trace.")] = Path("trace.json"),
    method: Annotated[
        str | None, typer.Option(help="Method of a comparison; default the first that communicates.")
    ] = None,
    steps: Annotated[str | None, typer.Option(help="Steps to show: FIRST:LAST or one number; default all.")] = None,
) -> None:
    """Write a timeline for Perfetto or chrome://tracing.

    One track per rank for compute, one for communication, with waits and bytes.
    """
    from syncline.report.chrome_trace import chrome_trace

    first, last = _steps(steps)
    folder = run_with_steps(run)
    events = folder.events
    for problem in events.problems:
        print(f"note: {problem}", file=sys.stderr)
    document = chrome_trace(events, _method(method, list(events.steps), str(folder.path)), first=first, last=last)
    shown = {event["args"]["step"] for event in document["traceEvents"] if event.get("cat") == "step"}
    if not shown:
        raise PlanError(f"{folder.path} has no finished step to show.", action="Choose other --steps or another run.")
    try:
        write_atomic(output, json.dumps(document) + "\n")
    except OSError as error:
        raise PlanError(f"cannot write {output}: {error.strerror}.", action="Choose another --output.") from error
    name, count = document["otherData"]["method"], "1 step" if len(shown) == 1 else f"{len(shown)} steps"
    print(f"{count} of {name} in {output}; open it in ui.perfetto.dev or chrome://tracing")


def _steps(text: str | None) -> tuple[int, int | None]:
    if text is None:
        return 0, None
    first, colon, last = text.partition(":")
    try:
        numbers = int(first or 0), (int(last) if last else None) if colon else int(first)
    except ValueError:
        raise PlanError(f"--steps {text!r} names no steps.", action="Write it as 10:20 or 17.") from None
    if numbers[1] is not None and numbers[1] < numbers[0]:
        raise PlanError(f"--steps {text!r} ends before it begins.", action="Write it as 10:20.")
    return numbers


def _method(asked: str | None, there: list[str], run: str) -> str:
    asked = asked and current_name(asked, typed=True)
    if asked is not None and asked not in there:
        raise PlanError(f"{run} has no steps of {asked!r}.", action=f"It has {', '.join(there) or 'none'}.")
    sending = [name for name in there if not method_of(name).alone]
    return asked if asked is not None else next(iter([*sending, *there]), "")
