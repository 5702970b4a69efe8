"""Composition: what a teacher does with a lab besides running it: check it, hand it out, grade what comes back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from syncline.accounting.sanity import check_rows
from syncline.errors import PlanError, RunFolderError
from syncline.files import write_atomic
from syncline.studies import collected, lab_folder, stored_ground, stored_lab, study_ground
from syncline.study.checking import CheckedLab, Form, check_answers, check_code, form_of
from syncline.study.file import Study, load_study
from syncline.study.grading import Grades, grade
from syncline.study.runner import StudyRun
from syncline.study.sheet import as_markdown, as_notebook, sheet_parts
from syncline.workload.user_code import searching

ANY_CORES = 1_000_000
"""A stage that leaves out what is too much for a machine left out other cells on somebody else's."""


def check_lab(lab: str | Path) -> CheckedLab:
    """Everything but running: the file, its code, every plan of the whole and the quick form, and the answers."""
    _, study = load_study(str(lab))
    beside = Path(lab) if Path(lab).is_dir() else Path(lab).parent
    with searching(beside):
        forms = {name: _form(study, quick=name == "--quick") for name in ("whole", "--quick")}
        check_answers(study)
    return CheckedLab(study.title, len(study.stage), forms, len(study.table), len(study.figure), study.asks)


def _form(study: Study, *, quick: bool) -> Form:
    ground = study_ground(study, quick=quick)
    cells = StudyRun(study, Path(), ground, quick, "").check()
    check_code(cells)
    return form_of(cells)


def write_sheet(lab: str | Path, out: Path | str = ".") -> tuple[Path, Path]:
    """The questions with points and room for answers, as NAME-sheet.md and NAME-sheet.ipynb in the folder `out`."""
    name, study = load_study(str(lab))
    if not study.asks:
        raise PlanError(f"{lab} has no questions to put on a sheet.", action="Add [[ask]] entries with a text.")
    parts = sheet_parts(str(lab), study)
    folder = Path(out)
    paths = folder / f"{name}-sheet.md", folder / f"{name}-sheet.ipynb"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(paths[0], as_markdown(parts))
        write_atomic(paths[1], as_notebook(parts))
    except OSError as error:
        raise RunFolderError(f"cannot write {folder}: {error.strerror}.", action="Choose another --out.") from error
    return paths


def grade_lab(lab: str | Path, folder: Path | str, reference: Path | str | None = None) -> Grades:
    """The numbers of somebody's lab folder against a reference folder's: ratios, orders and losses, not times.

    The reference is by default your own run of the lab, in the folder where `run_lab` puts it.
    """
    name, study = load_study(str(lab))
    theirs = _run_of(study, Path(folder))
    form = _form_of(theirs)
    asked = bool(theirs["hosts"] or theirs["link"])
    usual = lab_folder(name, study, stored_ground(theirs), quick=theirs["quick"], asked=asked)
    own = Path(reference) if reference is not None else usual
    if reference is None and not own.exists():
        action = f"Run `{_command(str(lab), form)}` once, or give --reference FOLDER."
        raise RunFolderError(f"there is no reference run in {own}.", action=action)
    ours = _run_of(study, own)
    if form != _form_of(ours):
        runs = [_command(str(lab), about) for about in (theirs, ours)]
        raise RunFolderError(
            f"{folder} was run as `{runs[0]}` and {own} as `{runs[1]}`.", action="Compare runs of the same form."
        )
    beside = Path(lab) if Path(lab).is_dir() else Path(lab).parent
    with searching(beside):
        found = collected(Path(folder), study, theirs, cores=ANY_CORES)
        wanted = collected(own, study, ours, cores=ANY_CORES)
    if not wanted.rows:
        raise RunFolderError(f"{own} has no finished cells of this lab.", action=f"Run `{_command(str(lab), ours)}`.")
    notes = [f"{who}: {note}" for who, run in (("found", found), ("reference", wanted)) for note in _notes(run)]
    changed = [f"found: run with --set {key}={value}" for key, value in theirs.get("settings", {}).items()]
    return Grades(Path(folder), own, grade(study, wanted.rows, found.rows), [*changed, *notes])


def _run_of(study: Study, folder: Path) -> dict[str, Any]:
    about = stored_lab(folder)
    if about["title"] != study.title:
        raise RunFolderError(f"{folder} is a run of {about['title']!r}, not of {study.title!r}.")
    return about


def _notes(run: StudyRun) -> list[str]:
    busy = [warning.text for warning in check_rows(run.rows) if warning.rule == "other load"]
    return list(dict.fromkeys([*(mark.text for row in run.rows for mark in row.marks), *busy]))


def _form_of(about: Mapping[str, Any]) -> dict[str, Any]:
    ground = stored_ground(about)
    return {"quick": about["quick"], "hosts": ground.hosts, "link": ground.link}


def _command(lab: str, about: Mapping[str, Any]) -> str:
    words = ["syncline lab", lab, *(["--quick"] if about["quick"] else [])]
    words += ["--hosts", str(about["hosts"])] if about["hosts"] else []
    return " ".join([*words, *(["--link", about["link"]] if about["link"] else [])])
