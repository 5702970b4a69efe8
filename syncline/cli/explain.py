"""syncline explain: where the time of a run went, and what would help most."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from syncline import jobs
from syncline.cli import options
from syncline.store import run_with_steps


def explain(
    run: Annotated[Path | None, typer.Argument(help="A run folder; default the newest below runs/.")] = None,
    step: Annotated[int | None, typer.Option(help="One step, rank by rank and bucket by bucket.")] = None,
    method: Annotated[str | None, typer.Option(help="One method of a comparison.")] = None,
    probe: Annotated[
        Path | None, typer.Option(help="A probe run, for utilisation; default the newest that fits.")
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
