"""Running a study cell by cell, keeping finished cells; and what its report says: all computed, nothing drawn."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from syncline.errors import Interrupted, RunFolderError, UsageError
from syncline.files import write_atomic
from syncline.plan import Plan
from syncline.store import Run, machine
from syncline.study.answering import answered
from syncline.study.cell_rows import best_points, is_finished, rows_of, with_links
from syncline.study.cells import Cell, Chosen, Ground, expand, share_of, unrecorded
from syncline.study.checking import check_keys
from syncline.study.estimate import Estimate, does_not_fit, estimate
from syncline.study.figures import FigureData, Timeline, build_figure, distinct_names, timeline_of
from syncline.study.file import Question, Stage, Study
from syncline.study.programs import write_programs
from syncline.study.quick_form import differences, title
from syncline.study.rows import Row, key_label, matching, pooled
from syncline.study.tables import TableData, build_table, yes_or_no
from syncline.units import format_bytes, format_minutes
from syncline.voice import Voice

FORMAT = 1
OPEN = "(left open)"
NOT_FINISHED = "not finished"


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
    _titles: dict[str, str] = field(default_factory=dict)
    """What a reader calls the cells that were skipped."""

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

    def has_work(self) -> bool:
        """Whether a cell is left to run, as far as can be planned."""
        planned = (cell for stage in self.stages() for cell in self._cells(stage))
        return any(not is_finished(cell.folder_in(self.cell_folder)) for cell in planned)

    def _cells(self, stage: Stage, best: Chosen | None = None) -> list[Cell]:
        recorded = None
        if stage.replay is not None and self.rows:
            there = [row for row in self.rows if row.stage == stage.replay]
            recorded = {
                (row.point["model"], row.point["global_batch"] // row.workers): str(row.runs[0]) for row in there
            }
        return expand(self.study, stage, self.ground, quick=self.quick, best=best, recorded=recorded)

    def check(self) -> list[Cell]:
        """Expand everything once, so that a wrong file is refused before anything is written."""
        expanded: dict[str, list[Cell]] = {}
        for stage in self.study.stage:
            cells = self._cells(stage)
            if stage.replay is not None:
                recorded = [share_of(cell) for cell in expanded[stage.replay]]
                cells = [replace(cell, why_not=cell.why_not or unrecorded(stage, cell, recorded)) for cell in cells]
            expanded[stage.name] = cells
        check_keys(self.study)  # after the plans, which say better what is wrong with a method
        return [cell for stage in self.stages() for cell in expanded[stage.name]]

    def collect(self) -> None:
        """The rows of all finished cells, without running any."""
        for stage in self.stages():
            for cell in self._cells(stage, self._best(stage)):
                if is_finished(cell.folder_in(self.cell_folder)):
                    self._add_rows(cell)
                else:
                    self._skip(cell, NOT_FINISHED)
        self.rows = with_links(pooled(self.rows))

    def answer(self) -> str:
        return main_answer(self.study, self.rows)

    def _timelines(self) -> list[Timeline]:
        """One typical step of each method that a timeline figure names."""
        timelines = []
        runs: dict[Path, Run] = {}
        for spec in self.study.figure:
            if spec.kind == "timeline":
                rows = matching(self.rows, spec.stage, spec.where)
                for row, name in zip(rows, distinct_names(rows), strict=True):
                    run = runs.setdefault(row.runs[0], Run(row.runs[0]))
                    drawn = timeline_of(run.events, row.method, warmup=1, name=name)
                    timelines += [drawn] if drawn is not None else []
        return timelines

    def write_programs(self, folder: Path) -> list[str]:
        """The study's programs, with the settings of its own run. Returns their names; none where it has none."""
        cells = [cell for cell in self.cells if cell.stage == self.study.scripts and cell.run != "function"]
        if self.study.folder is None or not cells:
            return []
        largest = max(cells, key=lambda cell: cell.plan.workers)
        return write_programs(self.study.folder, self._plan(largest), folder)

    def contents(self, *, answers: bool, schedules: list[tuple[str, str]]) -> Contents:
        """What the report says. `schedules` are drawings of collectives, where a figure asks for them."""
        is_drawn = any(spec.kind == "schedules" for spec in self.study.figure)
        return study_contents(
            self.study,
            self.rows,
            machine(),
            answers=answers,
            skipped=[(self._titles.get(name, name), why) for name, why in self.skipped.items()],
            repeat=self.command,
            plans=[(describe_cell(cell), self._plan(cell).to_toml()) for cell in self.cells],
            quick=self.quick,
            notes=self._notes(),
            timelines=self._timelines(),
            schedules=schedules if is_drawn else [],
        )

    def _plan(self, cell: Cell) -> Plan:
        """As it ran, with nothing left to choose; a replayed run's own plan does not know which data was recorded."""
        ran = Run(cell.folder_in(self.cell_folder)).plan
        return cell.plan if ran.replayed else ran

    def _notes(self) -> list[str]:
        """What a reader must know before anything else."""
        notes = [self.ground.note] if self.ground.note else []
        if made_up(self.rows):
            notes.append("CIFAR-10 was neither here nor could it be fetched: these are synthetic images.")
        changed = differences(self.study) if self.quick else []
        if changed:
            notes.append(f"This is the quick form. It differs from the whole lab in: {'; '.join(changed)}.")
        return notes

    def _announce(self, planned: Sequence[Cell], guesses: dict[str, Estimate]) -> None:
        left = [cell for cell in planned if not is_finished(cell.folder_in(self.cell_folder))]
        seconds = sum(guesses[cell.name].seconds for cell in left)
        memory = max((guesses[cell.name].memory_bytes for cell in left), default=0)
        finished = f", {len(planned) - len(left)} already finished" if len(left) < len(planned) else ""
        self.voice.say(f"{self.study.title}\n{len(planned)} cells{finished}; {self.folder}")
        if left:
            self.voice.say(f"estimate: {format_minutes(seconds)}, up to {format_bytes(memory)} of memory")

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
                self._skip(cell, why)
                self.voice.say(f"  skipped {describe_cell(cell)}: {why}")
                clock.finish(cell, None)
                return
        clock.finish(cell, None)
        self._add_rows(cell)

    def _skip(self, cell: Cell, why: str) -> None:
        self.skipped[cell.name] = why
        self._titles[cell.name] = describe_cell(cell)

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
        return f"{format_minutes(sum(self._left.values()) * factor)} left" if self._left else "done"


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
    """As a reader calls it: its stage, its place in the grid, and which round it is where there are several."""
    where = [f"{key_label(key)} {yes_or_no(value)}" for key, value in cell.point.items()]
    where += [f"round {cell.round}"] if cell.round > 1 else []
    return f"{cell.stage}{': ' if where else ''}{', '.join(where)}"


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
    empty: list[str] = field(default_factory=list)
    """Titles of tables that are left out, since nothing was measured for them."""
    repeat: str = ""
    plans: list[tuple[str, str]] = field(default_factory=list)
    """Names and TOML texts of what was run."""
    quick: bool = False
    programs: list[str] = field(default_factory=list)
    """Names of the programs in scripts/ beside the report."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know before anything else: how this differs from the whole study."""


def made_up(rows: Sequence[Row]) -> bool:
    """Whether CIFAR-10 was asked for and synthetic images had to do."""
    return any("CIFAR-10 is not here" in str(row.figures.get("data", "")) for row in rows)


def study_contents(
    study: Study, rows: Sequence[Row], machine: Mapping[str, Any], *, answers: bool, **rest: Any
) -> Contents:
    """Without answers, for teaching: conclusions and their figures are left to the reader."""
    values = study.values()
    built = [(spec, build_table(spec, rows, values)) for spec in study.table]
    tables, empty = (
        [pair for pair in built if not pair[1].is_empty],
        [table.title for _, table in built if table.is_empty],
    )
    # Timelines and schedules are pictures of other things than rows: the caller adds them.
    specs = [spec for spec in study.figure if spec.kind not in ("timeline", "schedules")]
    figures = [(spec, figure) for spec in specs if (figure := build_figure(spec, rows, values)) is not None]
    heading = title(study, quick=rest.get("quick", False))
    return Contents(
        title=f"{heading}, on synthetic data" if made_up(rows) else heading,
        question=study.question,
        answer=main_answer(study, rows) if answers else OPEN,
        about=study.about.strip(),
        machine=machine,
        main_table=next((table for spec, table in tables if spec.main), None),
        main_figure=next((figure for spec, figure in figures if spec.main), None),
        tables=[table for spec, table in tables if not spec.main],
        empty=empty,
        figures=[figure for spec, figure in figures if not spec.main],
        asks=[
            (ask.heading, _answer(study, ask, ask.stage, ask.with_stages, rows) if answers else OPEN)
            for ask in study.asks
        ],
        certificates=[dict(row.figures) for row in rows if "passed" in row.figures],
        **rest,
    )


def main_answer(study: Study, rows: Sequence[Row]) -> str:
    return _answer(study, study, study.answer_stage, study.answer_with_stages, rows)


def _answer(study: Study, asked: Study | Question, stage: str, others: Sequence[str], rows: Sequence[Row]) -> str:
    """What is computed, then what the lab's author wrote; open where there is neither."""
    computed, solution = "", asked.solution.strip()
    if asked.answer is not None:
        further = {other: matching(rows, other) for other in others}
        computed = answered(study.answers()[asked.answer], matching(rows, stage), further)
    return "\n".join(filter(None, [computed, solution])) or OPEN
