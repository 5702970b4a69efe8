"""syncline launch: run any script on many ranks."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from syncline.cli import options
from syncline.errors import PlanError


def launch(
    script: Annotated[Path, typer.Argument(help="A Python script, for example one with syncline.DataParallel.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    workers: Annotated[int, typer.Option(help="Number of ranks.")] = 2,
    threads: options.Threads = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for the output of ranks other than 0; default: a temporary one, which is printed."),
    ] = None,
    port: options.Port = 0,
) -> None:
    """Run a script on every rank, as torchrun would.

    Options of the script come after `--`.
    """
    from syncline.launcher.here import run_for_user

    if not script.is_file():
        raise PlanError(f"there is no script {script}.")
    call = (script.resolve(), arguments or [])
    run_for_user(_run_script, call, workers=workers, log_dir=log_dir, threads=threads, port=port)


def _run_script(script: Path, arguments: list[str]) -> None:
    """As `python script.py ...` would: with its folder on the path and its name as __main__."""
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
