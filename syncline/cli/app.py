"""The table from verb to function."""

from __future__ import annotations

from typing import Annotated

import typer

import syncline
from syncline.cli.cluster import cluster
from syncline.cli.doctor import doctor
from syncline.cli.lab import lab, report, scale
from syncline.cli.listing import data, models, schedule
from syncline.cli.measuring import compare, probe, verify
from syncline.cli.reading import explain, methods, runs, trace
from syncline.cli.scripts import launch
from syncline.cli.train import train

app = typer.Typer(
    name="syncline",
    help="Data-parallel training you can see through.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
VERBS = (
    train, compare, verify, explain, probe, trace, lab, scale, report, launch, methods, models, schedule, runs, data,
    doctor,
)  # fmt: skip
for verb in VERBS:
    app.command()(verb)
app.add_typer(cluster, name="cluster")


@app.callback(invoke_without_command=True)
def version(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        print(syncline.__version__)
        raise typer.Exit
