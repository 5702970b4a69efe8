"""syncline launch: run any script on many ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from syncline.cli import options


def launch(
    script: Annotated[Path, typer.Argument(help="A Python script, for example one with syncline.DataParallel.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    workers: Annotated[int, typer.Option(help="Number of ranks.")] = 2,
    threads: options.Threads = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for the output of ranks other than 0; default: a temporary one, which is printed."),
    ] = None,
    all_ranks: Annotated[
        bool, typer.Option("--all-ranks", help="Show every rank's output, not only rank 0's.")
    ] = False,
    port: options.Port = 0,
) -> None:
    """Run a script on every rank, as torchrun would.

    Options of the script come after `--`.
    """
    from syncline.launcher.here.script import launch_script

    launch_script(
        script, arguments or [], workers=workers, threads=threads, log_dir=log_dir, port=port, all_ranks=all_ranks
    )
