"""What a report says, in the order in which it says it: everything computed, nothing drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from syncline.study import file
from syncline.study.figures import FigureData, build_figure
from syncline.study.rows import Row, matching
from syncline.study.tables import TableData, build_table
from syncline.study.values import Value

OPEN = "(left open)"


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
    study: file.Study, rows: Sequence[Row], machine: Mapping[str, Any], *, answers: bool, **rest: Any
) -> Contents:
    """Without answers, for teaching: conclusions and their figures are left to the reader."""
    values = study.values()
    tables = [(spec, build_table(spec, rows, values)) for spec in study.table]
    figures = [(spec, figure) for spec in study.figure if (figure := build_if_drawn(spec, rows, values)) is not None]
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


def build_if_drawn(spec: file.Figure, rows: Sequence[Row], values: Mapping[str, Value]) -> FigureData | None:
    """Timelines and schedules are pictures of other things than numbers: they are added by the caller."""
    return None if spec.kind in ("timeline", "schedules") else build_figure(spec, rows, values)


def main_answer(study: file.Study, rows: Sequence[Row]) -> str:
    return _answer(study, study.answer, study.answer_stage, [], rows)


def _answer(study: file.Study, name: str, stage: str, others: Sequence[str], rows: Sequence[Row]) -> str:
    return study.answers()[name](matching(rows, stage), {other: matching(rows, other) for other in others})
