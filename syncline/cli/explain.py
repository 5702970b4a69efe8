"""syncline explain: where the time of a run went, and what would help most."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from syncline.cli import options
from syncline.errors import RunFolderError
from syncline.store import Run, load_run


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
    found = Run(options.run_with_steps(run).path)
    # Here, because the schedules that bytes are reckoned from load torch.
    from syncline.measure.explain import explain as explain_run
    from syncline.measure.explain import explain_step
    from syncline.report.explain import show_explanation, show_step

    if step is None:
        whole = explain_run(found, method=method, probe=_probe(probe))
        options.print_json(whole.as_document()) if as_json else show_explanation(whole)
    else:
        one = explain_step(found, step, method=method)
        options.print_json(one.as_document()) if as_json else show_step(one)


def _probe(path: Path | None) -> Run | None:
    if path is None:
        return None
    run = load_run(path)
    if run.kind != "probe":
        raise RunFolderError(f"{path} is no probe run.", action="Make one with `syncline probe`.")
    return run
