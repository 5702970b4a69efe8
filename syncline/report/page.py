"""A report as files: one HTML page that needs no network, Markdown, and each figure as SVG and PNG."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import jinja2

from syncline.files import write_atomic
from syncline.report.footnotes import Marked, with_footnotes
from syncline.report.plots import plot, plot_timeline, write_figure, y_title
from syncline.report.terminal import describe
from syncline.study.answering import listed
from syncline.study.figures import FigureData
from syncline.study.runner import NOT_FINISHED, Contents
from syncline.study.tables import TableData
from syncline.units import format_bytes, printable

PLOTLY = Path(__file__).parent / "plotly" / "plotly-cartesian-4.1.1.min.js.gz"
"""The part of plotly.js that draws lines, bars and boxes (npm's plotly.js-cartesian-dist-min), packed as pages hold
it. The smaller basic one has no boxes, and draws them as points without a word."""

EMPTY = "Left out, because nothing was measured for them"


def write_report(contents: Contents, folder: Path) -> Path:
    """Write index.html, report.md and figures/ into the folder; returns the page. Old figures are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = folder / "figures"
    shutil.rmtree(figures, ignore_errors=True)
    figures.mkdir()
    files = [(figure, figures / file_name(figure.title)) for figure in all_figures(contents)]
    for figure, path in files:
        write_figure(figure, path)
    for title, drawing in contents.schedules:
        (figures / f"{file_name(title)}.svg").write_text(drawing)
    write_atomic(folder / "report.md", markdown(contents))
    page = folder / "index.html"
    write_atomic(page, html(contents))
    return page


def html(contents: Contents) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("syncline", "report"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"csv": as_csv, "verdict": describe}
    main = [contents.main_figure] if contents.main_figure is not None else []
    figures = {f"plot-{number}": figure for number, figure in enumerate(contents.figures, start=1)}
    figures |= {f"plot-{number}": figure for number, figure in enumerate(main)}
    timelines = {f"timeline-{number}": timeline for number, timeline in enumerate(contents.timelines, start=1)}
    plots = {id: plot(figure) for id, figure in figures.items()}
    plots |= {id: plot_timeline(timeline) for id, timeline in timelines.items()}
    first = [contents.main_table] if contents.main_table is not None else []
    tables = with_footnotes([*first, *contents.tables])
    return environment.get_template("page.html").render(
        contents=contents,
        empty=EMPTY,
        main_tables=tables[: len(first)],
        tables=tables[len(first) :],
        facts=facts(contents),
        machine={
            name.removesuffix("_bytes").replace("_", " "): _said(name, value)
            for name, value in contents.machine.items()
        },
        unfinished=unfinished(contents),
        skipped=by_reason(contents),
        axes={id: y_title(figure) for id, figure in figures.items()} | dict.fromkeys(timelines, ""),
        # Neither a closing tag nor the opening of a comment inside a text may end the script.
        plots=json.dumps(plots).replace("<", "\\u003c"),
        plotly=base64.b64encode(PLOTLY.read_bytes()).decode(),
        plotly_licence=(PLOTLY.parent / "LICENSE").read_text(),
    )


def facts(contents: Contents) -> str:
    machine = contents.machine
    memory = f", {machine['memory_bytes'] / 2**30:.0f} GiB" if "memory_bytes" in machine else ""
    words = f"{machine.get('cores', '?')} cores of {machine.get('processor', 'an unknown processor')}{memory}; "
    words += f"torch {machine.get('torch', '?')}, Syncline {machine.get('syncline', '?')}."
    data = {tomllib.loads(text).get("data", "") for _, text in contents.plans} - {"", "auto"}
    words += f" Data: {listed(sorted(data))}." if data else ""
    words += " Measured with --quick: a small version of the study." if contents.quick else ""
    left = len(unfinished(contents))
    return f"{words} Not finished: {left} of {left + len(contents.plans)} cells are missing." if left else words


def _said(name: str, value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return format_bytes(value) if name.endswith("_bytes") else str(value)


def unfinished(contents: Contents) -> list[str]:
    return [name for name, why in contents.skipped if why == NOT_FINISHED]


def by_reason(contents: Contents) -> dict[str, list[str]]:
    """The cells that did not run, by why they did not."""
    reasons: dict[str, list[str]] = {}
    for name, why in contents.skipped:
        reasons.setdefault(why, []).append(name)
    return reasons


def as_csv(table: TableData) -> str:
    """Plain numbers where the table shows rounded ones."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(table.columns)
    for texts, numbers in zip(table.rows, table.numbers, strict=True):
        writer.writerow([text if number is None else number for text, number in zip(texts, numbers, strict=True)])
    return out.getvalue()


def markdown(contents: Contents) -> str:
    lines = [f"# {said(contents.title)}", "", *(line for note in contents.notes for line in (f"> {said(note)}", ""))]
    lines += [f"*{said(contents.question)}*", "", said(contents.answer), "", said(facts(contents)), ""]
    first = [contents.main_table] if contents.main_table is not None else []
    tables = [_table_lines(marked) for marked in with_footnotes([*first, *contents.tables])]
    lines += [line for table in tables[: len(first)] for line in table]
    if contents.main_figure is not None:
        lines += _figure_lines(contents.main_figure)
    if contents.asks:
        lines += ["## Questions", ""]
        for text, answer in contents.asks:
            lines += [f"**{said(text)}** {said(answer)}", ""]
    lines += ["## Tables and figures", ""]
    lines += [line for table in tables[len(first) :] for line in table]
    lines += [f"{EMPTY}: {said('; '.join(contents.empty))}.", ""] if contents.empty else []
    for figure in contents.figures:
        lines += _figure_lines(figure)
    for title, _ in contents.schedules:
        lines += [f"![{title}](figures/{file_name(title)}.svg)", ""]
    if contents.certificates:
        lines += ["## Certificates", "", "| method | workers | model | same shards in turn | one worker |"]
        lines += ["|---|---|---|---|---|"]
        for certificate in contents.certificates:
            about = [str(certificate[key]) for key in ("method", "workers", "model")]
            verdicts = [describe(certificate[key]) for key in ("sequential", "one_worker")]
            lines.append(f"| {' | '.join(map(said, [*about, *verdicts]))} |")
        lines.append("")
    lines += [
        "## Finish it" if unfinished(contents) else "## Repeat it",
        "",
        "```",
        printable(contents.repeat),
        "```",
        "",
    ]
    if contents.programs:
        lines += ["Each part as a program of its own, in plain torch.distributed:", ""]
        lines += [*(f"- [{name}](scripts/{name})" for name in contents.programs), ""]
    if contents.skipped:
        lines += ["### Cells without a result", ""]
        lines += [f"- {said(why)}: {said('; '.join(names))}" for why, names in by_reason(contents).items()]
    return "\n".join(lines).rstrip() + "\n"


def _table_lines(marked: Marked) -> list[str]:
    table = marked.table
    lines = [f"### {said(table.title)}{_raised(marked.title)}", ""]
    lines += [f"| {' | '.join(map(said, table.columns))} |", f"|{'---|' * len(table.columns)}"]
    for row, letters in zip(table.rows, marked.cells, strict=True):
        cells = [f"{said(cell)}{_raised(own)}" for cell, own in zip(row, letters, strict=True)]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for letter, note in marked.said:
        lines += [f"> {_raised([letter])} **{said(note.rule)}**: {said(note.text)}", ""]
    return [*lines, *([said(table.note), ""] if table.note else [])]


def said(text: str) -> str:
    """As Markdown that shows the text and does nothing else: names in a run folder are whoever's who wrote it."""
    lines = [printable(line) for line in text.splitlines()]
    return re.sub(r"[\\\[\]|]", r"\\\g<0>", "\n".join(lines)).replace("<", "&lt;")


def _raised(letters: list[str]) -> str:
    return f"<sup>{','.join(letters)}</sup>" if letters else ""


def _figure_lines(figure: FigureData) -> list[str]:
    return [f"![{said(figure.text)}](figures/{file_name(figure.title)}.svg)", ""]


def all_figures(contents: Contents) -> list[FigureData]:
    return [*([contents.main_figure] if contents.main_figure else []), *contents.figures]


def file_name(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
