"""Running a study cell by cell, keeping finished cells; and what its report says: all computed, nothing drawn."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from syncline.errors import Interrupted, RunFolderError, UsageError
from syncline.files import write_atomic
from syncline.store import Run, machine
from syncline.study.cell_rows import best_points, is_finished, rows_of, with_links
from syncline.study.cells import Cell, Chosen, Ground, expand
from syncline.study.estimate import Estimate, does_not_fit, estimate
from syncline.study.figures import FigureData, Timeline, build_figure, timeline_of
from syncline.study.file import Stage, Study
from syncline.study.rows import Row, matching, pooled
from syncline.study.tables import TableData, build_table
from syncline.units import format_bytes
from syncline.voice import Voice

FORMAT = 1
OPEN = "(left open)"


@dataclass
class StudyRun:
    """A study in a folder: cells/ holds one run folder for each finished cell."""

    study: Study
    folder: Path
    ground: Ground
    quick: bool
    command: str
    """What a reader types to get the same."""
    voice: Voice = field(default_factory=Voice)
    skipped: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)

    @property
    def cell_folder(self) -> Path:
        return self.folder / "cells"

    def stages(self) -> list[Stage]:
        return [stage for stage in self.study.stage if not (self.quick and stage.quick.skip)]

    def run(self, run_cell: Callable[[Cell, Path], None]) -> None:
        """All cells that are not finished yet, each into its own folder by `run_cell`, which raises UsageError where
        it cannot run here: that is noted with its reason."""
        planned = [cell for stage in self.stages() for cell in self._cells(stage)]
        guesses = {cell.name: estimate(cell) for cell in planned}
        self._announce(planned, guesses)
        clock = _Clock(planned, guesses)
        try:
            for stage in self.stages():
                cells = self._cells(stage, self._best(stage))
                clock.settle(stage.name, cells)
                for cell in cells:
                    self._visit(cell, clock, run_cell)
        except (Interrupted, KeyboardInterrupt) as error:
            message = error.message if isinstance(error, Interrupted) else "Stopped by Ctrl-C."
            action = f"Finished cells are kept; continue with: {self.command}"
            raise Interrupted(message, action=action) from None
        for stage in self.study.stage:
            if self.quick and stage.quick.skip:
                self.skipped[stage.name] = stage.quick.skip
        self.rows = with_links(pooled(self.rows))

    def _cells(self, stage: Stage, best: Chosen | None = None) -> list[Cell]:
        recorded = None
        if stage.replay is not None and self.rows:
            there = [row for row in self.rows if row.stage == stage.replay]
            recorded = {
                (row.point["model"], row.point["global_batch"] // row.workers): str(row.runs[0]) for row in there
            }
        return expand(self.study, stage, self.ground, quick=self.quick, best=best, recorded=recorded)

    def check(self) -> None:
        """Expand everything once, so that a wrong file is refused before anything is written."""
        for stage in self.study.stage:
            self._cells(stage)

    def collect(self) -> None:
        """The rows of all finished cells, without running any."""
        for stage in self.stages():
            for cell in self._cells(stage, self._best(stage)):
                if is_finished(cell.folder_in(self.cell_folder)):
                    self._add_rows(cell)
                else:
                    self.skipped[cell.name] = "not finished"
        self.rows = with_links(pooled(self.rows))

    def answer(self) -> str:
        return main_answer(self.study, self.rows)

    def _timelines(self) -> list[Timeline]:
        """One typical step of each method that a timeline figure names."""
        timelines = []
        runs: dict[Path, Run] = {}
        for spec in self.study.figure:
            if spec.kind == "timeline":
                for row in matching(self.rows, spec.stage, spec.where):
                    run = runs.setdefault(row.runs[0], Run(row.runs[0]))
                    drawn = timeline_of(run.events, row.method, warmup=1)
                    timelines += [drawn] if drawn is not None else []
        return timelines

    def contents(self, *, answers: bool, schedules: list[tuple[str, str]]) -> Contents:
        """What the report says. `schedules` are drawings of collectives, where a figure asks for them."""
        is_drawn = any(spec.kind == "schedules" for spec in self.study.figure)
        return study_contents(
            self.study,
            self.rows,
            machine(),
            answers=answers,
            skipped=list(self.skipped.items()),
            repeat=self.command,
            plans=[(cell.name, cell.plan.to_toml()) for cell in self.cells],
            quick=self.quick,
            timelines=self._timelines(),
            schedules=schedules if is_drawn else [],
        )

    def _announce(self, planned: Sequence[Cell], guesses: dict[str, Estimate]) -> None:
        left = [cell for cell in planned if not is_finished(cell.folder_in(self.cell_folder))]
        seconds = sum(guesses[cell.name].seconds for cell in left)
        memory = max((guesses[cell.name].memory_bytes for cell in left), default=0)
        finished = f", {len(planned) - len(left)} already finished" if len(left) < len(planned) else ""
        self.voice.say(f"{self.study.title}\n{len(planned)} cells{finished}; {self.folder}")
        if left:
            self.voice.say(f"estimate: {_minutes(seconds)}, up to {format_bytes(memory)} of memory")

    def _best(self, stage: Stage) -> Chosen | None:
        if stage.best_of is None:
            return None
        return best_points(stage, pooled([row for row in self.rows if row.stage == stage.best_of.stage]))

    def _visit(self, cell: Cell, clock: _Clock, run_cell: Callable[[Cell, Path], None]) -> None:
        path = cell.folder_in(self.cell_folder)
        if not is_finished(path):
            why = cell.why_not or self._too_large(cell) or estimate(cell).does_not_fit()
            if why is None:
                why = self._run_cell(cell, path, clock, run_cell)
            if why is not None:
                self.skipped[cell.name] = why
                self.voice.say(f"  skipped {cell.name}: {why}")
                clock.finish(cell, None)
                return
        clock.finish(cell, None)
        self._add_rows(cell)

    def _too_large(self, cell: Cell) -> str | None:
        """Why it does not fit into memory, where its stage asks an earlier one; None otherwise."""
        earlier = next(stage.fits for stage in self.study.stage if stage.name == cell.stage)
        return does_not_fit(cell, matching(self.rows, earlier)) if earlier is not None else None

    def _add_rows(self, cell: Cell) -> None:
        self.cells.append(cell)
        self.rows += rows_of(cell, cell.folder_in(self.cell_folder))

    def _run_cell(self, cell: Cell, path: Path, clock: _Clock, run_cell: Callable[[Cell, Path], None]) -> str | None:
        """Run it; the reason if it cannot run here."""
        shutil.rmtree(path, ignore_errors=True)  # what a Ctrl-C left of it
        self.voice.say(f"[{clock.position(cell)}] {describe_cell(cell)} ...")
        start = time.monotonic()
        try:
            run_cell(cell, path)
        except UsageError as error:
            shutil.rmtree(path, ignore_errors=True)
            return error.message
        took = time.monotonic() - start
        clock.finish(cell, took)
        self.voice.say(f"    {took:.0f} s; {clock.left()}")
        return None


class _Clock:
    """How far the study is and how long the rest will take: the estimate, corrected by what was measured."""

    def __init__(self, cells: Sequence[Cell], guesses: dict[str, Estimate]) -> None:
        self._names = [cell.name for cell in cells]
        self._stages = [cell.stage for cell in cells]
        self._guess = {name: guess.seconds for name, guess in guesses.items()}
        self._left = dict(self._guess)
        self._measured: dict[str, float] = {}

    def position(self, cell: Cell) -> str:
        place = self._names.index(cell.name) + 1 if cell.name in self._names else len(self._names)
        return f"{place}/{len(self._names)}"

    def settle(self, stage: str, cells: Sequence[Cell]) -> None:
        """A stage that takes the best of an earlier one has other cells than were planned, once that has run."""
        at = [number for number, name in enumerate(self._stages) if name == stage]
        for number, cell in zip(at, cells, strict=False):
            before = self._names[number]
            if cell.name != before:
                self._names[number] = cell.name
                self._left.pop(before, None)
                self._guess[cell.name] = self._left[cell.name] = estimate(cell).seconds

    def finish(self, cell: Cell, seconds: float | None) -> None:
        self._left.pop(cell.name, None)
        if seconds is not None and cell.name in self._guess:
            self._measured[cell.name] = seconds

    def left(self) -> str:
        guessed = sum(self._guess[name] for name in self._measured)
        factor = sum(self._measured.values()) / guessed if guessed else 1.0
        return f"{_minutes(sum(self._left.values()) * factor)} left" if self._left else "done"


def open_study(folder: Path, title: str, *, fresh: bool = False, **settings: Any) -> None:
    """Make the folder, or continue in the one that an earlier call left. A folder of something else is refused."""
    marker = folder / "lab.json"
    if fresh:
        if folder.exists() and not marker.exists():
            raise RunFolderError(f"{folder} is not a lab's folder.", action="Choose another --out.")
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists() and not marker.exists() and any(folder.iterdir()):
        raise RunFolderError(f"{folder} is neither empty nor a lab's folder.", action="Choose another --out.")
    if marker.exists() and json.loads(marker.read_text())["format"] > FORMAT:
        action = "Update Syncline, or start over with --fresh."
        raise RunFolderError(f"a newer version of Syncline wrote {folder}.", action=action)
    try:
        (folder / "cells").mkdir(parents=True, exist_ok=True)
        write_atomic(marker, json.dumps({"format": FORMAT, "title": title, **settings}, indent=2) + "\n")
    except OSError as error:
        raise RunFolderError(f"cannot write {folder}: {error.strerror}.", action="Choose another --out.") from error


def describe_cell(cell: Cell) -> str:
    where = ", ".join(f"{key} {value}" for key, value in cell.point.items())
    return f"{cell.stage}{': ' if where else ''}{where}"


def _minutes(seconds: float) -> str:
    return f"about {seconds / 60:.0f} min" if seconds >= 90 else f"about {max(seconds, 1):.0f} s"


# What a report says, in the order in which it says it.


@dataclass(frozen=True)
class Contents:
    title: str
    question: str
    answer: str
    about: str
    machine: Mapping[str, Any]
    main_table: TableData | None
    main_figure: FigureData | None
    tables: list[TableData]
    figures: list[FigureData]
    asks: list[tuple[str, str]]
    certificates: list[dict[str, Any]]
    timelines: list[Any] = field(default_factory=list)
    schedules: list[tuple[str, str]] = field(default_factory=list)
    """Titles and SVG pictures."""
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """Cells that did not run, and why."""
    repeat: str = ""
    plans: list[tuple[str, str]] = field(default_factory=list)
    """Names and TOML texts of what was run."""
    quick: bool = False


def study_contents(
    study: Study, rows: Sequence[Row], machine: Mapping[str, Any], *, answers: bool, **rest: Any
) -> Contents:
    """Without answers, for teaching: conclusions and their figures are left to the reader."""
    values = study.values()
    tables = [(spec, build_table(spec, rows, values)) for spec in study.table]
    # Timelines and schedules are pictures of other things than rows: the caller adds them.
    specs = [spec for spec in study.figure if spec.kind not in ("timeline", "schedules")]
    figures = [(spec, figure) for spec in specs if (figure := build_figure(spec, rows, values)) is not None]
    return Contents(
        title=study.title,
        question=study.question,
        answer=main_answer(study, rows) if answers else OPEN,
        about=study.about.strip(),
        machine=machine,
        main_table=next((table for spec, table in tables if spec.main), None),
        main_figure=next((figure for spec, figure in figures if spec.main), None),
        tables=[table for spec, table in tables if not spec.main],
        figures=[figure for spec, figure in figures if not spec.main],
        asks=[
            (ask.text, _answer(study, ask.answer, ask.stage, ask.with_stages, rows) if answers else OPEN)
            for ask in study.asks
        ],
        certificates=[dict(row.figures) for row in rows if "passed" in row.figures],
        **rest,
    )


def main_answer(study: Study, rows: Sequence[Row]) -> str:
    return _answer(study, study.answer, study.answer_stage, [], rows)


def _answer(study: Study, name: str, stage: str, others: Sequence[str], rows: Sequence[Row]) -> str:
    return study.answers()[name](matching(rows, stage), {other: matching(rows, other) for other in others})
