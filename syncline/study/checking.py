"""Checking a lab without running it: its keys, plans, code and answers, and what it would take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from syncline.errors import PlanError, SynclineError
from syncline.methods import BASELINE, METHODS
from syncline.study.cell_rows import FROM_PLAN
from syncline.study.cells import Cell
from syncline.study.estimate import Estimate, estimate
from syncline.study.file import Question, Stage, Study, format_points
from syncline.study.plan_keys import VIRTUAL
from syncline.units import format_bytes, format_minutes
from syncline.workload.user_code import load_callable

DRAWN_BY_KEY = ("bars", "stacked", "lines", "boxes")
"""Kinds of figures that have an axis of one key."""


def check_keys(study: Study) -> None:
    """Tables, figures and grades name keys and values that the rows of their stage have."""
    stages = {stage.name: stage for stage in study.stage}
    for table in study.table:
        keys = [*table.rows, *table.columns] if table.kind == "values" else []
        _check_place(f"table {table.title!r}", keys, table.where, stages[table.stage])
    for figure in study.figure:
        if figure.stage:
            keys = [figure.x, *figure.series] if figure.kind in DRAWN_BY_KEY else figure.series
            _check_place(f"figure {figure.title!r}", keys, figure.where, stages[figure.stage])
        elif figure.kind != "schedules":
            raise PlanError(f"figure {figure.title!r} has no stage.", action=f"Choose one of {', '.join(stages)}.")
        if figure.kind in DRAWN_BY_KEY and not figure.values:
            raise PlanError(f"figure {figure.title!r}: the kind {figure.kind} needs values.")
    for entry in study.grade:
        keys = [entry.by] if entry.kind == "order" else []
        _check_place(f"grade of {entry.value}", keys, entry.where, stages[entry.stage])


def _check_place(what: str, keys: Iterable[str], where: Mapping[str, Any], stage: Stage) -> None:
    if stage.run in ("function", "probe"):
        return  # their rows have keys of their own, known once they have run
    known = row_keys(stage)
    for key in (*keys, *where):
        if key not in known:
            action = f"Choose one of {', '.join(known)}, or put it into the stage's grid."
            raise PlanError(f"{what}: stage {stage.name} does not vary {key!r}.", action=action)
    for key, wanted in where.items():
        allowed = _values_of(key, stage)
        for value in wanted if isinstance(wanted, list) else [wanted]:
            if allowed is not None and value not in allowed and not str(value).startswith(f"{BASELINE},"):
                action = f"Choose one of {', '.join(map(str, allowed))}."
                raise PlanError(f"{what}: stage {stage.name} has no {key} {value!r}.", action=action)


def row_keys(stage: Stage) -> list[str]:
    """What the rows of a stage can be told apart by."""
    inherited = stage.best_of.keys if stage.best_of is not None else []
    plans = (stage.plan, stage.quick.plan)
    batches = [key for key in VIRTUAL if key.startswith("batch_") and any(key in plan for plan in plans)]
    variant = ["variant"] if stage.variants or stage.quick.variants else []
    return list(dict.fromkeys([*stage.grid, *stage.quick.grid, *inherited, *batches, *variant, *FROM_PLAN]))


def _values_of(key: str, stage: Stage) -> Sequence[Any] | None:
    """None if any value may turn up."""
    if key == "method":
        return [*METHODS]
    if key == "variant":
        return [*stage.variants, *stage.quick.variants]
    given = [*stage.grid.get(key, []), *stage.quick.grid.get(key, [])]
    return given or None


def check_code(cells: Iterable[Cell]) -> None:
    """Models and data of the lab's own can be loaded."""
    plans = [cell.plan for cell in cells]
    for name in dict.fromkeys(plan.model for plan in plans if ":" in plan.model):
        load_callable(name, "model")
    for name in dict.fromkeys(plan.data for plan in plans if ":" in plan.data):
        load_callable(name, "data")


def check_answers(study: Study) -> None:
    """Cells that cannot run are skipped, so every answer must be able to say that something is missing."""
    answers = study.answers()
    asked = [(ask.answer, ask.with_stages) for ask in study.asks]
    for name, others in ((study.answer, study.answer_with_stages), *asked):
        if name is not None:
            try:
                answers[name]([], {other: [] for other in others})
            except SynclineError as error:
                action = 'Cells may be skipped: return missing("what was not measured") if there are no such rows.'
                problem = f"answer {name!r} fails if nothing was measured: {error.message}"
                raise PlanError(problem, action=action) from error


@dataclass(frozen=True)
class Form:
    """What the whole lab would take here, or its quick form."""

    cells: int
    cannot: Sequence[str]
    """Of these, why each that the lab itself leaves nothing to run with is skipped."""
    too_large: int
    """Of the others, cells that need more memory than this machine has."""
    takes: Estimate

    @property
    def text(self) -> str:
        words = f"{_counted(self.cells, 'cell')}, {format_minutes(self.takes.seconds)}"
        words += f", up to {format_bytes(self.takes.memory_bytes)} of memory"
        words += f"; {self.too_large} do not fit here and are skipped" if self.too_large else ""
        why = "; ".join(dict.fromkeys(self.cannot))
        return f"{words}; {len(self.cannot)} cannot run and are skipped: {why}" if self.cannot else words


def form_of(cells: Sequence[Cell]) -> Form:
    cannot = [cell.why_not for cell in cells if cell.why_not is not None]
    guesses = [estimate(cell) for cell in cells if cell.why_not is None]
    fit = [guess for guess in guesses if guess.does_not_fit() is None]
    memory = max((guess.memory_bytes for guess in fit), default=0)
    takes = Estimate(sum(guess.seconds for guess in fit), memory)
    return Form(len(cells), cannot, len(guesses) - len(fit), takes)


@dataclass(frozen=True)
class CheckedLab:
    """A lab that can run, and what it would take."""

    title: str
    stages: int
    forms: Mapping[str, Form]
    """By name: whole, --quick."""
    tables: int
    figures: int
    questions: Sequence[Question]

    @property
    def text(self) -> str:
        lines = [f"no mistakes found: {self.title}"]
        lines += [f"  {name:<8} {form.text}" for name, form in self.forms.items()]
        shown = [_counted(self.stages, "stage"), _counted(self.tables, "table"), _counted(self.figures, "figure")]
        lines.append(f"  {', '.join(shown)}")
        if self.questions:
            kinds = [("computed", sum(ask.answer is not None for ask in self.questions))]
            kinds += [("with your own answer", sum(bool(ask.solution) for ask in self.questions))]
            kinds += [("open", sum(ask.answer is None and not ask.solution for ask in self.questions))]
            words = ", ".join(f"{number} {kind}" for kind, number in kinds if number)
            points = sum(ask.points or 0 for ask in self.questions)
            worth = f"; {format_points(points)}" if points else ""
            lines.append(f"  {_counted(len(self.questions), 'question')}: {words}{worth}")
        return "\n".join(lines)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
