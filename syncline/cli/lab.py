"""syncline lab, report and scale: studies and the pages they end in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from syncline.cli import options
from syncline.errors import UsageError


def lab(
    study: Annotated[
        str, typer.Argument(help="A lab (see `syncline lab list`), or a lab folder or file of your own.")
    ],
    quick: Annotated[bool, typer.Option("--quick", help="Run a small version that takes minutes.")] = False,
    hosts: Annotated[
        int | None, typer.Option(help="Emulate up to this many hosts, one per node; default: as the lab says.")
    ] = None,
    link: Annotated[str | None, typer.Option(help="Rate of each emulated host's link, such as 1gbit.")] = None,
    loopback: Annotated[
        bool, typer.Option("--loopback", help="Run nodes as processes of this machine instead of emulated hosts.")
    ] = False,
    no_answers: Annotated[
        bool, typer.Option("--no-answers", help="Leave the questions unanswered, for teaching.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the lab; default runs/lab-NAME.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard the results of earlier calls.")] = False,
    settings: options.Settings = None,
    engine: options.Engine = None,
    address: options.Address = None,
    master: options.Master = None,
    when_busy: options.WhenBusy = "go",
    print_file: Annotated[
        bool, typer.Option("--print", help="Print the lab's file, to start your own from, and end.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Check the lab without running it, and end.")] = False,
    sheet: Annotated[
        bool, typer.Option("--sheet", help="Write the questions with room for answers, as Markdown and notebook.")
    ] = False,
    grade: Annotated[
        Path | None, typer.Option(help="Compare somebody's lab folder with a reference run.", metavar="FOLDER")
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="For --grade: the reference; default your own run.", metavar="FOLDER")
    ] = None,
) -> None:
    """Run a lab and write its report.

    Finished cells are kept: if you stop it with Ctrl-C, rerunning it resumes where it left off.
    """
    if study == "list":
        from syncline.study.lab_code import lab_titles

        for name, title in lab_titles().items():
            print(f"{name:<20} {title}")
        return
    asked = {"--print": print_file, "--check": check, "--sheet": sheet, "--grade": grade is not None}
    chosen = [flag for flag, given in asked.items() if given]
    if len(chosen) > 1 or (reference is not None and grade is None):
        raise UsageError(f"{' and '.join(chosen) or '--reference'}: use only one of {', '.join(asked)}.")
    if print_file:
        _print_file(study, answers=not no_answers)
    elif check:
        _check(study)
    elif sheet:
        _write_sheet(study, out)
    elif grade is not None:
        _grade(study, grade, reference)
    if chosen:
        return
    from syncline.report.terminal import print_paragraph
    from syncline.studies import run_lab
    from syncline.study.runner import OPEN

    flags = options.engine_flags(engine, address, master)
    finished = run_lab(
        study, quick=quick, hosts=hosts, link=link, loopback=loopback, answers=not no_answers, out=out, fresh=fresh,
        settings=options.parse_settings(settings), place=flags.place() if flags else None, when_busy=when_busy,
        show="all",
    )  # fmt: skip
    if not no_answers and finished.answer != OPEN:
        print_paragraph(finished.answer)
    print(f"report {finished.report}")


def _print_file(study: str, *, answers: bool) -> None:
    from syncline.study.sheet import study_text

    print(study_text(study, answers=answers), end="")


def _check(study: str) -> None:
    from syncline.teaching import check_lab

    print(check_lab(study).text)


def _write_sheet(study: str, out: Path | None) -> None:
    from syncline.teaching import write_sheet

    for path in write_sheet(study, out or "."):
        print(f"sheet {path}")


def _grade(study: str, folder: Path, reference: Path | None) -> None:
    from syncline.report.terminal import print_table
    from syncline.teaching import grade_lab

    grades = grade_lab(study, folder, reference)
    columns = ["stage", "what", "where", "reference", "found", "tolerance", "verdict"]
    rows = [[str(row[column]) for column in columns] for row in grades.rows]
    print_table(columns, rows, title=f"{grades.folder} against {grades.reference}")
    for note in grades.notes:
        print(note)
    print(grades.summary)


def report(
    runs: Annotated[list[str], typer.Argument(help="Folders or URLs of runs, or a lab's folder.")],
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
    when_busy: options.WhenBusy = "go",
) -> None:
    """Measure one scaling curve."""
    from syncline.report.terminal import print_paragraph
    from syncline.studies import scale as measure_curve

    curve = measure_curve(
        method=method, workers=options.numbers(workers, "--workers"), strong=strong, model=model, data=data,
        batch=batch, threads=threads, steps=steps, hosts=hosts, link=link,
        settings=options.parse_settings(settings), out=out, when_busy=when_busy, show="all",
    )  # fmt: skip
    print_paragraph(curve.answer)
    print(f"report {curve.report}")
