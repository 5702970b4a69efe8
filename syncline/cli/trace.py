"""syncline trace: the timeline of a run, to look at."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from syncline.errors import PlanError
from syncline.files import write_atomic
from syncline.methods import current_name, method_of
from syncline.store import run_with_steps


def trace(
    run: Annotated[Path | None, typer.Argument(help="A run folder; default the last run.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The trace.")] = Path("trace.json"),
    method: Annotated[
        str | None, typer.Option(help="Which method of a comparison; default the first that sends.")
    ] = None,
    steps: Annotated[str | None, typer.Option(help="Which steps, as FIRST:LAST or one number; default all.")] = None,
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
