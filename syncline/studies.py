"""Composition: studies, from a file or flags to a report. Each cell is a use case of jobs.py."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from syncline import jobs
from syncline.accounting.breakdown import PARTS
from syncline.collectives.patterns import PATTERNS, make_schedule
from syncline.errors import PlanError, RunFolderError
from syncline.forms import checked
from syncline.launcher.doctor import examine_emulation
from syncline.launcher.engines.place import Engine
from syncline.methods import BASELINE, current_name
from syncline.readiness import make_ready
from syncline.remote import fetched, is_url, shown
from syncline.report import page
from syncline.report.schedules import schedule_svg
from syncline.report.terminal import print_paragraph, print_table
from syncline.results import Lab
from syncline.store import ROOT, open_run
from syncline.study.cell_rows import run_rows
from syncline.study.cells import Cell, Ground, most_nodes
from syncline.study.file import Study, load_study
from syncline.study.runner import StudyRun, open_study, study_contents
from syncline.study.tables import build_table
from syncline.voice import Show, Voice
from syncline.workload.user_code import searching

DEFAULT_LINK = "1gbit"
ON_LOOPBACK = (
    "Nodes are processes that exchange gradients over this machine's loopback, so no result here is about a network"
)


def run_lab(
    lab: str | Path, *, quick: bool = False, hosts: int | None = None, link: str | None = None,
    loopback: bool = False, answers: bool = True, out: Path | str | None = None, fresh: bool = False,
    settings: Mapping[str, Any] | None = None, place: Engine | None = None, when_busy: str = "go",
    show: Show = "nothing",
) -> Lab:  # fmt: skip
    """Run a lab by name, or a study file or lab folder of your own, and write its report.

    Finished cells are kept: called again after an interruption, it resumes where it left off. Nodes are emulated
    hosts where the lab has a link of its own or with `hosts` and `link`; with `loopback`, processes of this machine;
    with `place`, workers of an engine.
    `when_busy`: what to do if other programs keep the machine busy, "go", "wait" (before each cell) or "refuse".
    """
    name, study = load_study(str(lab))
    given = dict(settings or {})
    study = study.with_settings(given)
    ground = study_ground(study, quick=quick, hosts=hosts, link=link, loopback=loopback, place=place)
    where = place.name if place is not None else ""
    usual = lab_folder(name, study, ground, quick=quick, asked=bool(hosts or link), engine=where)
    folder = Path(out) if out is not None else usual
    arguments = [str(lab), *(["--quick"] if quick else [])]
    arguments += ["--hosts", str(hosts)] if hosts else []
    arguments += ["--link", link] if link else []
    arguments += ["--loopback"] if loopback else []
    arguments += place.flags if place is not None else []
    arguments += [word for key, value in given.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    arguments += ["--out", str(out)] if out else []
    run = StudyRun(study, folder, ground, quick, f"syncline lab {shlex.join(arguments)}", Voice(show))
    about = {"study": str(lab), "quick": quick, "hosts": hosts, "link": link, "settings": given}
    about["ground"] = {"hosts": ground.hosts, "link": ground.link, "note": ground.note}
    beside = Path(lab) if Path(lab).is_dir() else Path(lab).parent
    with searching(beside):
        _refuse_what_is_not_installed(run.check())
        open_study(folder, study.title, fresh=fresh, command=run.command, **about)
        with place.opened() if place is not None else nullcontext():
            return _finished(run, folder / "report", answers=answers, when_busy=when_busy, place=place)


def _refuse_what_is_not_installed(cells: Sequence[Cell]) -> None:
    """Where every cell lacks it. Where some can run, the others are skipped with the reason."""
    errors = []
    for cell in cells:
        try:
            jobs.check_needed(cell.methods or [cell.plan.method])
        except PlanError as error:
            errors.append(error)
    if errors and len(errors) == len(cells):
        raise errors[0]


def study_ground(
    study: Study, *, quick: bool, hosts: int | None = None, link: str | None = None, loopback: bool = False,
    place: Engine | None = None,
) -> Ground:  # fmt: skip
    """Where its nodes are: as asked for, else as the study says, as far as this machine allows emulated hosts."""
    if place is not None:
        if loopback or hosts or link:
            raise PlanError("--engine contradicts --hosts, --link and --loopback.", action="Give only one of them.")
        return Ground(note=f"Workers are placed by {place.name}, and talk over the links between its nodes.")
    if loopback and (hosts or link):
        raise PlanError("--loopback contradicts --hosts and --link.", action="Give only one of them.")
    if study.link is None and (link is None) != (hosts is None):
        raise PlanError("--hosts and --link go together.", action="Give both, such as --hosts 4 --link 1gbit.")
    largest = most_nodes(study, quick=quick)
    if hosts or link or (study.link is None and not loopback):
        return Ground(hosts or (largest if link else None), link or (study.link if hosts else None))
    if loopback:
        return Ground(note=f"{ON_LOOPBACK} (--loopback)." if study.link is not None else "")
    found = examine_emulation()
    if found.status == "ok":
        return Ground(largest, study.link)
    return Ground(note=f"{ON_LOOPBACK}, because hosts cannot be emulated here: {found.found}")


def lab_folder(name: str, study: Study, ground: Ground, *, quick: bool, asked: bool, engine: str = "") -> Path:
    """Where a lab of this name goes without --out; `asked` if somebody asked for these hosts."""
    words = [name, *(["quick"] if quick else []), *([f"{ground.hosts}x{ground.link}"] if asked else [])]
    elsewhere = "loopback" if study.link is not None and ground.link is None else ""
    words += filter(None, [engine or elsewhere])
    return ROOT / "-".join(["lab", *words])


def scale(
    *, method: str = "ddp", workers: Sequence[int] = (1, 2, 4), strong: bool = True, model: str | None = None,
    data: str | None = None, batch: int = 64, threads: int = 1, steps: int = 10, hosts: bool = False,
    link: str | None = None, settings: Mapping[str, Any] | None = None, out: Path | str | None = None,
    when_busy: str = "go", show: Show = "nothing",
) -> Lab:  # fmt: skip
    """Measure one scaling curve. With `hosts`, each worker is on an emulated host of its own."""
    method, sizes = current_name(method, typed=True), with_one(workers)
    link = link or (DEFAULT_LINK if hosts else None)
    kind = "strong" if strong else "weak"
    named = {key: value for key, value in (("model", model), ("data", data)) if value is not None}
    plan = {**named, **(settings or {})}
    study = scaling_study(method, sizes, strong=strong, batch=batch, threads=threads, steps=steps, plan=plan)
    ground = Ground(max(sizes), link) if link else Ground()
    words = ["scale", method, kind, *map(str, sizes), *([link] if link else [])]
    folder = Path(out) if out is not None else ROOT / "-".join(words)
    arguments = ["--method", method, "--workers", ",".join(map(str, sizes)), f"--{kind}", "--batch", str(batch)]
    arguments += ["--threads", str(threads), "--steps", str(steps), *(["--hosts", "--link", link] if link else [])]
    run = StudyRun(study, folder, ground, False, f"syncline scale {shlex.join(arguments)}", Voice(show))
    run.check()
    open_study(folder, study.title)
    lab = _finished(run, folder / "report", answers=True, when_busy=when_busy)
    if show == "all":
        for spec in study.table:
            table = build_table(spec, run.rows)
            print_table(table.columns, table.rows, title=table.title)
            for text in filter(
                None, [table.note, *(f"{warning.rule}: {warning.text}" for warning in table.warnings)]
            ):
                print_paragraph(text)
    return lab


def write_report(runs: Sequence[Path | str], out: Path | str = "report", *, answers: bool = True) -> Path:
    """Write a report from stored runs alone: a lab's folder as the lab, other runs side by side. Returns the page."""
    paths = [fetched(str(run)) if is_url(run) else Path(run) for run in runs]
    labs = [path for path in paths if (path / "lab.json").exists()]
    if labs and len(paths) > 1:
        raise RunFolderError("a lab's folder cannot be combined with other runs.", action=f"Give only {labs[0]}.")
    return (
        _report_lab(labs[0], Path(out), answers=answers) if labs else _report_runs(paths, Path(out), answers=answers)
    )


def _finished(run: StudyRun, out: Path, *, answers: bool, when_busy: str, place: Engine | None = None) -> Lab:
    if run.has_work():
        make_ready(when_busy, run.voice)
    run_cell = partial(jobs.run_cell, voice=run.voice.without_words, place=place)

    def run_when_idle(cell: Cell, path: Path) -> None:
        make_ready("wait", run.voice)
        run_cell(cell, path)

    run.run(run_when_idle if when_busy == "wait" else run_cell)
    measured = [
        {
            "stage": row.stage, **row.point, "step_s": step.value if (step := row.step()) else None,
            "mean_step_s": row.mean_step_s(), **row.parts,
        }
        for row in run.rows
    ]  # fmt: skip
    return Lab(run.folder, _write(run, out, answers=answers), run.answer(), measured, run.skipped)


def _write(run: StudyRun, folder: Path, *, answers: bool) -> Path:
    drawings = [(f"{name} on 4 ranks", schedule_svg(make_schedule(name, 4))) for name in PATTERNS]
    programs = run.write_programs(folder / "scripts")
    contents = replace(run.contents(answers=answers, schedules=drawings), programs=programs)
    return page.write_report(contents, folder)


def _report_lab(folder: Path, out: Path, *, answers: bool) -> Path:
    about = stored_lab(folder)
    run = collected(folder, load_study(about["study"])[1], about)
    return _write(run, out, answers=answers)


def stored_lab(folder: Path) -> dict[str, Any]:
    """What a lab's folder says of how it was run."""
    try:
        about: dict[str, Any] = json.loads((folder / "lab.json").read_text())
    except FileNotFoundError:
        action = "Give the folder that `syncline lab` wrote, such as runs/lab-NAME."
        raise RunFolderError(f"{folder} is not a lab's folder.", action=action) from None
    if "study" not in about:
        raise RunFolderError(f"{folder} is a curve of `syncline scale`.", action=f"Open {folder / 'report'}.")
    return about


def stored_ground(about: Mapping[str, Any]) -> Ground:
    """Where its nodes were."""
    return Ground(**about.get("ground", {"hosts": about["hosts"], "link": about["link"]}))


def collected(folder: Path, study: Study, about: Mapping[str, Any], *, cores: int | None = None) -> StudyRun:
    """The study with the rows of the folder's finished cells; `cores` of the machine that it ran on, if not these."""
    study = study.with_settings(about.get("settings", {}))
    ground = stored_ground(about) if cores is None else replace(stored_ground(about), cores=cores)
    run = StudyRun(study, folder, ground, about["quick"], about.get("command") or _command(about, folder))
    run.collect()
    return run


def _command(about: Mapping[str, Any], folder: Path) -> str:
    """What finishes a lab whose folder does not say how it was started, as older ones do not."""
    words = [about["study"], *(["--quick"] if about["quick"] else [])]
    words += ["--hosts", str(about["hosts"]), "--link", about["link"]] if about["hosts"] else []
    words += [
        word for key, value in about.get("settings", {}).items() for word in ("--set", f"{key}={json.dumps(value)}")
    ]
    return f"syncline lab {shlex.join([*words, '--out', str(folder)])}"


def _report_runs(paths: Sequence[Path], out: Path, *, answers: bool) -> Path:
    runs = [open_run(path) for path in paths]
    rows = [row for run in runs for row in run_rows(run.path, "runs")]
    if len(runs) > 1:
        rows = [replace(row, point={"run": row.runs[0].name, **row.point}) for row in rows]
    if not rows:
        raise RunFolderError("none of these runs has a result yet.", action="`syncline runs` shows their state.")
    contents = study_contents(
        side_by_side([run.path.name for run in runs]),
        rows,
        runs[0].machine(),
        answers=answers,
        repeat=f"syncline report {shlex.join(shown(run.path) for run in runs)}",
        plans=[(run.path.name, run.plan().to_toml()) for run in runs],
    )
    return page.write_report(contents, out)


# Studies without a file: a scaling curve, and stored runs side by side.


def side_by_side(names: Sequence[str]) -> Study:
    """Runs of these names in one table."""
    methods = {"title": "Runs side by side", "stage": "runs"}
    return checked(
        Study,
        {
            "title": "Runs side by side" if len(names) > 1 else f"Run {names[0]}",
            "question": "What did these runs cost, and what did they achieve?",
            "answer": "fastest",
            "answer_stage": "runs",
            "stage": [{"name": "runs"}],
            "table": [
                {**methods, "rows": ["method", "workers"], "values": ["step", "throughput", "loss"], "main": True},
                {
                    **methods, "title": "Where the step goes", "rows": ["method", "workers"],
                    "values": [*PARTS, "overlap"],
                },
                {
                    **methods, "title": "Loss and accuracy", "rows": ["method", "workers"],
                    "values": ["train_loss", "train_accuracy", "test_loss", "test_accuracy"],
                },
            ],
            "figure": [
                {
                    "title": "Where the step goes", "stage": "runs", "kind": "stacked", "x": "method", "main": True,
                    "values": list(PARTS),
                },
                {"title": "Loss against iteration", "stage": "runs", "kind": "loss"},
            ],
        },
        "the report",
    )  # fmt: skip


def scaling_study(
    method: str, sizes: list[int], *, strong: bool, batch: int, threads: int, steps: int, plan: dict[str, Any]
) -> Study:
    """`single` takes turns with the method in every cell: the baseline is measured under the same load."""
    kind = "one global batch (strong)" if strong else "one batch per worker (weak)"
    methods = list(dict.fromkeys((BASELINE, method)))
    stage = {
        "name": "scale",
        "methods": methods,
        "grid": {"nodes": sizes},
        "plan": {"global_batch" if strong else "batch_per_worker": batch},
    }
    title = f"Scaling of {method} at {kind}"
    values: dict[str, Any] = {
        "title": title,
        "question": f"What do {', '.join(map(str, sizes))} workers give with {method}, at {kind}?",
        "answer": "scaling",
        "answer_stage": "scale",
        "plan": {"threads": threads, "steps": steps, "evaluate": False, **plan},
        "stage": [stage],
        "table": [
            {
                "title": title, "stage": "scale", "rows": ["workers", "method"], "main": True,
                "values": ["step", "throughput", "speedup", "efficiency"],
            },
            {
                "title": "Communication", "stage": "scale", "rows": ["workers", "method"],
                "where": {"method": method}, "values": ["communication_share", "overlap"],
            },
        ],
        "figure": [
            {
                "title": "Speed-up", "stage": "scale", "kind": "lines", "x": "workers", "values": ["speedup"],
                "where": {"method": method}, "main": True,
            },
            {
                "title": "Where the step goes", "stage": "scale", "kind": "stacked", "x": "workers",
                "where": {"method": method},
                "values": list(PARTS),
            },
        ],
    }  # fmt: skip
    return checked(Study, values, "the scaling study")


def with_one(workers: Sequence[int]) -> list[int]:
    """The world sizes in order, with one worker: it is the baseline of every speed-up."""
    sizes = sorted(set(workers))
    if not sizes or sizes[0] < 1:
        raise PlanError(f"cannot run {sizes[0] if sizes else 'no'} workers.", action="Use at least 1 worker.")
    return sizes if 1 in sizes else [1, *sizes]
