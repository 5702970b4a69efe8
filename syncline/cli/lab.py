"""syncline lab, report and scale: studies and the pages they end in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from syncline.cli import options


def lab(
    study: Annotated[
        str, typer.Argument(help="A lab (see `syncline lab list`), or a lab folder or file of your own.")
    ],
    quick: Annotated[bool, typer.Option("--quick", help="Run a small version that takes minutes.")] = False,
    hosts: Annotated[int | None, typer.Option(help="Emulate up to this many hosts, one per node.")] = None,
    link: Annotated[str | None, typer.Option(help="Rate of each emulated host's link, such as 1gbit.")] = None,
    no_answers: Annotated[
        bool, typer.Option("--no-answers", help="Leave the questions unanswered, for teaching.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the lab; default runs/lab-NAME.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard the results of earlier calls.")] = False,
    settings: options.Settings = None,
) -> None:
    """Run a lab and write its report.

    Finished cells are kept: if you stop it with Ctrl-C, rerunning it resumes where it left off.
    """
    if study == "list":
        from syncline.study.lab_code import lab_titles

        for name, title in lab_titles().items():
            print(f"{name:<20} {title}")
        return
    from syncline.studies import run_lab

    finished = run_lab(
        study, quick=quick, hosts=hosts, link=link, answers=not no_answers, out=out, fresh=fresh,
        settings=options.parse_settings(settings), show="all",
    )  # fmt: skip
    if not no_answers:
        print(finished.answer)
    print(f"report {finished.report}")


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or a lab's folder.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for the report.")] = Path("report"),
    no_answers: Annotated[bool, typer.Option("--no-answers", help="Leave the questions unanswered.")] = False,
) -> None:
    """Write a report from stored runs alone."""
    from syncline.studies import write_report

    print(f"report {write_report(runs, out, answers=not no_answers)}")


def scale(
    method: Annotated[str, typer.Option(help="Method to scale.")] = "ddp",
    workers: Annotated[str, typer.Option(help="Numbers of workers, separated by commas.")] = "1,2,4",
    strong: Annotated[
        bool, typer.Option("--strong/--weak", help="Keep the global batch, or the batch per worker.")
    ] = True,
    model: options.Model = None,
    data: options.Data = None,
    batch: Annotated[int, typer.Option(help="The global batch (strong) or the batch per worker (weak).")] = 64,
    threads: Annotated[int, typer.Option(help="Compute threads per worker.")] = 1,
    steps: Annotated[int, typer.Option(help="Timed steps.")] = 10,
    hosts: Annotated[
        bool, typer.Option("--hosts", help="Put each worker on its own emulated host; links default to 1gbit.")
    ] = False,
    link: Annotated[str | None, typer.Option(help="Rate of each emulated host's link, such as 1gbit.")] = None,
    settings: options.Settings = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the study; default runs/scale-….")] = None,
) -> None:
    """Measure one scaling curve."""
    from syncline.studies import scale as measure_curve

    curve = measure_curve(
        method=method, workers=options.numbers(workers, "--workers"), strong=strong, model=model, data=data,
        batch=batch, threads=threads, steps=steps, hosts=hosts, link=link,
        settings=options.parse_settings(settings), out=out, show="all",
    )  # fmt: skip
    print(curve.answer)
    print(f"report {curve.report}")
