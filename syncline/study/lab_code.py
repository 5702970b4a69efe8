"""A lab's own code: `answers.py` and `experiments.py` beside its `lab.toml`, loaded by their path.

A mistake in these files is reported by file and line before anything runs.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import sys
import tomllib
import traceback
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from syncline.errors import PlanError, SynclineError

if TYPE_CHECKING:
    from syncline.study.answering import Answer, Rows

LABS = Path(str(resources.files("syncline"))) / "labs"
MOVED = {
    "syncline.measure.sampler:epochs_of_samplers": "hpml-dataparallel/experiments.py:epochs_of_samplers",
    "syncline.measure.travels:travels": "hpml-dataparallel/experiments.py:travels",
}
"""Experiments under the names that older lab files and the folders of older lab runs know them by."""


def built_in_labs() -> list[str]:
    return sorted(path.parent.name for path in LABS.glob("*/lab.toml"))


def lab_titles() -> dict[str, str]:
    """Of the labs that come with Syncline, by name, without loading their code."""
    return {name: tomllib.loads((LABS / name / "lab.toml").read_text())["title"] for name in built_in_labs()}


def load_file(path: Path) -> ModuleType:
    """The file as a module under a private name. Every call runs it again: a notebook sees edits."""
    path = path.resolve()
    name = f"_syncline_lab_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise PlanError(f"cannot read {path}.", action="Create the file, or correct its name.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise PlanError(f"{error.filename}, line {error.lineno}: {error.msg}.") from error
    except Exception as error:
        raise PlanError(f"{blame(error, path)}.") from error
    return module


def blame(error: BaseException, path: Path) -> str:
    """FILE, line N: what was raised there; the last line of that file on the way to the error."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = f", line {lines[-1]}" if lines else ""
    return f"{path}{line}: {type(error).__name__}: {error}"


def _functions(module: ModuleType) -> dict[str, Any]:
    """The public functions that a file defines itself."""
    functions = {name: value for name, value in vars(module).items() if inspect.isfunction(value)}
    return {
        name: function
        for name, function in functions.items()
        if function.__module__ == module.__name__ and not name.startswith("_")
    }


def load_answers(folder: Path) -> Mapping[str, Answer]:
    """The functions of the folder's answers.py; `what_travels` answers to "what-travels" in the lab file."""
    path = folder / "answers.py"
    if not path.exists():
        return {}
    return {
        name.replace("_", "-"): _guarded(function, name, path.resolve())
        for name, function in _functions(load_file(path)).items()
    }


def _guarded(function: Answer, name: str, path: Path) -> Answer:
    """An answer that fails says in which line of the lab's file."""

    @functools.wraps(function)
    def answer(rows: Rows, others: Mapping[str, Rows]) -> str:
        try:
            text = function(rows, others)
        except Exception as error:
            action = "Finished cells are kept: correct it and run the same command again."
            raise SynclineError(f"{blame(error, path)}.", action=action) from error
        if not isinstance(text, str):
            raise SynclineError(f"{path}: {name} returned {text!r}, not a string.")
        return text

    return answer


def find_answers(wanted: set[str], own: Mapping[str, Answer]) -> dict[str, Answer]:
    """By name: a lab's own answers first, then the general ones, then those of the labs that come with Syncline."""
    from syncline.study.answering import ANSWERS  # ranks that call an experiment need none

    chosen = {name: answer for name, answer in {**ANSWERS, **own}.items() if name in wanted}
    known = [*own, *ANSWERS]
    for lab in built_in_labs() if wanted - chosen.keys() else ():
        answers = load_answers(LABS / lab)
        known += answers
        chosen |= {name: answer for name, answer in answers.items() if name in wanted - chosen.keys()}
    for name in sorted(wanted - chosen.keys()):
        problem = f"unknown answer {name!r}; choose one of {', '.join(known)}, or define it in answers.py."
        raise PlanError(problem, action="An answer in your own words is a `solution`.")
    return chosen


def resolve_call(call: str, folder: Path) -> str:
    """FILE.py:FUNCTION with the file's whole path, as ranks need it; module:FUNCTION as it is. Both must exist.

    A file that does not lie beside the lab's may be one of a built-in lab: LAB/experiments.py.
    """
    if call in MOVED:
        call, folder = MOVED[call], LABS
    file, _, name = call.rpartition(":")
    if not (folder / file).exists() and Path(file).parts[:1] and Path(file).parts[0] in built_in_labs():
        folder = LABS
    if file.endswith(".py"):
        call = f"{(folder / file).resolve()}:{name}"
    load_call(call)
    return call


def load_call(call: str) -> Callable[..., Any]:
    """The function that a stage calls on every rank: FILE.py:FUNCTION or module:FUNCTION."""
    file, _, name = call.rpartition(":")
    if file.endswith(".py"):
        module = load_file(Path(file))
    else:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # as `python script.py` would
        try:
            module = importlib.import_module(file)
        except (ImportError, ValueError) as error:
            action = "Write FILE.py:FUNCTION, or module:FUNCTION with a module in this folder or on PYTHONPATH."
            raise PlanError(f"cannot load {call!r}: {error}.", action=action) from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        there = f"It defines {', '.join(_functions(module))}." if _functions(module) else ""
        raise PlanError(f"{file} has no function {name!r}.", action=there)
    return function


def run_call(call: str, rank: Any) -> list[dict[str, Any]]:
    """A rank's part in an experiment. What rank 0 returns must be rows that a summary can hold."""
    rows: list[dict[str, Any]] = load_call(call)(rank)
    if rank.number != 0:
        return rows
    problem = "" if isinstance(rows, list) and all(isinstance(row, dict) for row in rows) else "not a list of rows"
    try:
        json.dumps(rows)
    except (TypeError, ValueError) as error:
        problem = problem or f"which cannot be stored: {error}"
    if problem:
        action = 'Return a list such as [{"point": {"size": 1}, "seconds_each": 0.1}].'
        raise SynclineError(f"{call} returned {str(rows)[:80]} on rank 0, {problem}.", action=action)
    return rows


def call_identity(call: str) -> str:
    """What a cell's result depends on: wherever the folder lies, but not on an experiment that was edited since.

    Experiments that come with Syncline go by name, so that a report can still be made of older runs.
    """
    file, _, name = call.rpartition(":")
    if not file.endswith(".py"):
        return call
    path = Path(file)
    if path.is_relative_to(LABS):
        short = f"{path.relative_to(LABS).as_posix()}:{name}"
        return next((old for old, new in MOVED.items() if new == short), short)
    return f"{hashlib.sha256(path.read_bytes()).hexdigest()}:{name}"
