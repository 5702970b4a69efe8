"""A report as files: one HTML page that needs no network, Markdown, and each figure as SVG and PNG."""

from __future__ import annotations

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
from syncline.report.plots import plot, plot_timeline, write_figure
from syncline.report.terminal import describe
from syncline.study.answering import listed
from syncline.study.figures import FigureData
from syncline.study.runner import Contents
from syncline.study.tables import TableData


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
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("syncline", "report"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"csv": as_csv, "verdict": describe}
    plots: dict[str, Any] = {}
    if contents.main_figure is not None:
        plots["plot-0"] = plot(contents.main_figure)
    plots |= {f"plot-{number}": plot(figure) for number, figure in enumerate(contents.figures, start=1)}
    for number, timeline in enumerate(contents.timelines, start=1):
        plots[f"timeline-{number}"] = plot_timeline(timeline)
    return environment.get_template("page.html").render(
        contents=contents,
        facts=facts(contents),
        plotly=get_plotlyjs(),
        # A closing tag inside a text must not end the script.
        plots=json.dumps(plots).replace("</", "<\\/"),
    )


def facts(contents: Contents) -> str:
    machine = contents.machine
    memory = f", {machine['memory_bytes'] / 2**30:.0f} GiB" if "memory_bytes" in machine else ""
    words = f"{machine.get('cores', '?')} cores of {machine.get('processor', 'an unknown processor')}{memory}; "
    words += f"torch {machine.get('torch', '?')}, Syncline {machine.get('syncline', '?')}."
    data = {tomllib.loads(text).get("data", "") for _, text in contents.plans} - {""}
    words += f" Data: {listed(sorted(data))}." if data else ""
    return f"{words} Measured with --quick: a small version of the study." if contents.quick else words


def as_csv(table: TableData) -> str:
    """Plain numbers where the table shows rounded ones."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(table.columns)
    for texts, numbers in zip(table.rows, table.numbers, strict=True):
        writer.writerow([text if number is None else number for text, number in zip(texts, numbers, strict=True)])
    return out.getvalue()


def markdown(contents: Contents) -> str:
    lines = [f"# {contents.title}", "", f"*{contents.question}*", "", contents.answer, "", facts(contents), ""]
    if contents.main_table is not None:
        lines += _table_lines(contents.main_table)
    if contents.main_figure is not None:
        lines += _figure_lines(contents.main_figure)
    if contents.asks:
        lines += ["## Questions", ""]
        for text, answer in contents.asks:
            lines += [f"**{text}** {answer}", ""]
    lines += ["## Tables and figures", ""]
    for table in contents.tables:
        lines += _table_lines(table)
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
            lines.append(f"| {' | '.join([*about, *verdicts])} |")
        lines.append("")
    lines += ["## Repeat it", "", "```", contents.repeat, "```", ""]
    lines += [f"- skipped: {name}: {why}" for name, why in contents.skipped]
    return "\n".join(lines).rstrip() + "\n"


def _table_lines(table: TableData) -> list[str]:
    lines = [f"### {table.title}", "", f"| {' | '.join(table.columns)} |", f"|{'---|' * len(table.columns)}"]
    lines += [f"| {' | '.join(row)} |" for row in table.rows]
    lines += ["", *(f"> {mark}" for mark in table.marks)]
    lines += [f"> **{warning.rule}**: {warning.text}" for warning in table.warnings]
    return [*lines, *([table.note] if table.note else []), ""]


def _figure_lines(figure: FigureData) -> list[str]:
    return [f"![{figure.text}](figures/{file_name(figure.title)}.svg)", ""]


def all_figures(contents: Contents) -> list[FigureData]:
    return [*([contents.main_figure] if contents.main_figure else []), *contents.figures]


def file_name(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
