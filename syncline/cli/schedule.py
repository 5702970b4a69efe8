"""syncline schedule: how an all-reduce travels, round by round."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from syncline.errors import PlanError


def schedule(
    pattern: Annotated[str, typer.Argument(help="root, tree, ring, halving-doubling or direct.")],
    workers: Annotated[int, typer.Option(help="Number of ranks.")] = 4,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The drawing; default PATTERN-WORKERS.svg.")
    ] = None,
) -> None:
    """Print and draw the rounds of an all-reduce."""
    from syncline.collectives.patterns import PATTERNS, make_schedule
    from syncline.report.schedules import schedule_svg, schedule_text

    if pattern not in PATTERNS:
        raise PlanError(f"{pattern!r} is not a pattern.", action=f"Take one of {', '.join(PATTERNS)}.")
    if not 1 <= workers <= 64:
        raise PlanError(f"--workers {workers} cannot be drawn.", action="Take 1 to 64.")
    made = make_schedule(pattern, workers)
    target = output or Path(f"{pattern}-{workers}.svg")
    try:
        target.write_text(schedule_svg(made))
    except OSError as error:
        raise PlanError(f"cannot write {target}: {error.strerror}.", action="Choose another --output.") from error
    print(schedule_text(made))
    print(f"drawn in {target}; next: syncline compare --methods ddp,bucketed,ring,tree,halving-doubling")
