"""syncline lab, report and scale: studies and the pages they end in."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from syncline.cli import options
from syncline.errors import PlanError
from syncline.store import ROOT


def lab(
    study: Annotated[
        str, typer.Argument(help="A lab (see `syncline lab list`), or a lab folder or file of your own.")
    ],
    quick: Annotated[bool, typer.Option("--quick", help="A small version that ends within minutes.")] = False,
    hosts: Annotated[int | None, typer.Option(help="Run nodes as emulated hosts, at most this many.")] = None,
    link: Annotated[str | None, typer.Option(help="Rate of each emulated host's link, such as 1gbit.")] = None,
    no_answers: Annotated[bool, typer.Option("--no-answers", help="Leave the questions open: for teaching.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the study; default runs/lab-NAME.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget the cells of an earlier call.")] = False,
    settings: options.Settings = None,
) -> None:
    """Run a study and write its report.

    Finished cells are kept: started again after a Ctrl-C, it goes on where it was.
    """
    from syncline.cli.studies import StudyRun, open_study
    from syncline.study.cells import Ground
    from syncline.study.file import load_study
    from syncline.study.lab_code import built_in_labs

    if study == "list":
        for name in built_in_labs():
            print(f"{name:<20} {load_study(name)[1].title}")
        return
    if (link is None) != (hosts is None):
        raise PlanError("--hosts and --link go together.", action="Give both, such as --hosts 4 --link 1gbit.")
    name, loaded = load_study(study)
    given = options.parse_settings(settings)
    loaded = loaded.with_settings(given)
    ground = Ground(hosts, link)
    words = [name, *(["quick"] if quick else []), *([f"{hosts}x{link}"] if hosts else [])]
    folder = out or ROOT / "-".join(["lab", *words])
    arguments = [study, *(["--quick"] if quick else [])]
    arguments += ["--hosts", str(hosts), "--link", str(link)] if hosts else []
    arguments += [word for setting in settings or () for word in ("--set", setting)]
    arguments += ["--out", str(out)] if out else []
    run = StudyRun(loaded, folder, ground, quick, f"syncline lab {shlex.join(arguments)}")
    run.check()
    open_study(folder, loaded.title, fresh=fresh, study=study, quick=quick, hosts=hosts, link=link, settings=given)
    run.run()
    page = run.report(folder / "report", answers=not no_answers)
    if not no_answers:
        print(run.answer())
    print(f"report {page}")


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or a lab's folder.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Where the report is written.")] = Path("report"),
    no_answers: Annotated[bool, typer.Option("--no-answers", help="Leave the questions open.")] = False,
) -> None:
    """Write a report from stored runs alone."""
    from syncline.cli.reports import report_runs

    print(f"report {report_runs(runs, out, answers=not no_answers)}")


def scale(
    method: Annotated[str, typer.Option(help="The method to scale.")] = "ddp",
    workers: Annotated[str, typer.Option(help="Numbers of workers, with commas between.")] = "1,2,4",
    strong: Annotated[
        bool, typer.Option("--strong/--weak", help="One global batch, or one batch per worker.")
    ] = True,
    model: options.Model = None,
    data: options.Data = None,
    batch: Annotated[int, typer.Option(help="The global batch (strong) or the batch per worker (weak).")] = 64,
    threads: Annotated[int, typer.Option(help="Compute threads per worker.")] = 1,
    steps: Annotated[int, typer.Option(help="Timed steps.")] = 10,
    hosts: Annotated[bool, typer.Option("--hosts", help="Each worker on an emulated host of its own.")] = False,
    link: Annotated[str | None, typer.Option(help="Rate of each emulated host's link, such as 1gbit.")] = None,
    settings: options.Settings = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the study; default runs/scale-….")] = None,
) -> None:
    """Measure one scaling curve."""
    from syncline.cli.scaling import scale_curve

    given = {
        **({"model": model} if model else {}),
        **({"data": data} if data else {}),
        **options.parse_settings(settings),
    }
    page = scale_curve(
        method=method, workers=workers, strong=strong, batch=batch, threads=threads, steps=steps,
        link=link if hosts or link else None, plan=given, out=out,
    )  # fmt: skip
    print(f"report {page}", file=sys.stdout)
