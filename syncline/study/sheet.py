"""What is handed out of a lab: its file, and a sheet of its questions with points and room for answers."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

import tomli_w

from syncline.study.file import Question, Study, find_study, format_points
from syncline.study.lab_code import built_in_labs

ROOM = "<br>\n\n<br>\n\n<br>\n"
"""Below each question on the Markdown sheet."""


def study_text(name: str, *, answers: bool = True) -> str:
    """The lab's file, to start one's own from. A built-in lab's calls name the lab, so that the text can be saved
    anywhere. Without answers, to hand out: neither computed answers nor solutions, and no comments."""
    text = find_study(name)[0].read_text()
    if name in built_in_labs():
        text = re.sub(r'^call = "(\w+\.py:)', rf'call = "{name}/\1', text, flags=re.MULTILINE)
    if answers:
        return text
    values = tomllib.loads(text)
    for section in (values, *values.get("ask", [])):
        for key in ("answer", "solution"):
            section.pop(key, None)
    return tomli_w.dumps(values)


def sheet_parts(lab: str, study: Study) -> list[tuple[str, str]]:
    """("text" or "code" or "room", what it says) from top to bottom: what both forms of the sheet are made of."""
    points = sum(ask.points or 0 for ask in study.asks)
    worth = f" ({format_points(points)})" if points else ""
    about = f"\n\n{study.about.strip()}" if study.about.strip() else ""
    run = f"syncline lab {lab} --no-answers"
    call = f'lab = syncline.run_lab("{lab}", quick=True, answers=False, show="all")'
    parts = [
        ("text", f"# {study.title}\n\nName: \n\n*{study.question}*{about}"),
        ("text", f"## Run it\n\n    {run}\n\nAdd `--quick` for a small version.{_shown(study)}"),
        ("code", f"import syncline\n\n{call}\nlab.table()"),
        ("text", f"## Questions{worth}"),
    ]
    for number, ask in enumerate(study.asks, start=1):
        parts += [("text", f"### {number}. {ask.heading}{_look(ask, study)}"), ("room", "")]
    last = f"## In short\n\n{study.question}"
    return [*parts, ("text", last), ("room", "")]


def _shown(study: Study) -> str:
    lines = [f"- table: {table.title}" for table in study.table]
    lines += [f"- figure: {figure.title}" for figure in study.figure]
    return "\n".join([" It ends with the path of the report, a page with", "", *lines]) if lines else ""


def _look(ask: Question, study: Study) -> str:
    """Which tables show the stages that a question is about."""
    stages = (ask.stage, *ask.with_stages)
    titles = [table.title for table in study.table if table.stage in stages]
    return f"\n\nLook at: {'; '.join(titles)}." if titles else ""


def as_markdown(parts: list[tuple[str, str]]) -> str:
    """For paper or an editor: room is empty lines, and code is left out."""
    return (
        "\n".join(ROOM if kind == "room" else f"{text}\n" for kind, text in parts if kind != "code").rstrip() + "\n"
    )


def as_notebook(parts: list[tuple[str, str]]) -> str:
    """For Jupyter: room is an empty cell."""
    cells: list[dict[str, Any]] = []
    for number, (kind, text) in enumerate(parts):
        cell: dict[str, Any] = {"id": f"part-{number}", "metadata": {}, "source": text or "*Your answer*"}
        if kind == "code":
            cell |= {"cell_type": "code", "execution_count": None, "outputs": []}
        else:
            cell |= {"cell_type": "markdown"}
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1) + "\n"
