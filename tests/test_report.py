"""Reports: the files that are written, and what a browser makes of the page."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from syncline.report.page import as_csv, facts, html, markdown, write_report
from syncline.report.plots import colours_of, plot, plot_timeline
from syncline.study.cells import Ground, expand
from syncline.study.figures import Bar, FigureData, Series, Timeline
from syncline.study.file import Study, built_in_labs, load_study
from syncline.study.rows import Row
from syncline.study.runner import Contents, study_contents

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
MACHINE = {"processor": "P <1>", "cores": 2, "memory_bytes": 2**34, "torch": "2", "syncline": "0"}
PARTS = {"data": 0.01, "forward": 0.1, "backward": 0.2, "wire": 0.1, "wait": 0.05, "update": 0.02, "hidden": 0.1}


def rows() -> list[Row]:
    found = []
    for stage, key in (("weak", "batch_per_worker"), ("nodes", "global_batch")):
        for nodes in (1, 2, 4):
            for number, method in enumerate(("single", "gather-scatter", "all-reduce", "ddp", "bucketed")):
                if method != "single" or nodes == 1:
                    batch = 16 * nodes if stage == "weak" else 16
                    point = {"nodes": nodes, "workers": nodes, "method": method, "global_batch": batch, key: 16}
                    seconds = [0.4 + 0.05 * number * nodes + 0.001 * i for i in range(5)]
                    found.append(Row(stage, point, seconds=seconds, figures={"loss": 2.0}, parts=PARTS))
    losses = [{"step": step, "loss": loss, "by_rank": [loss, loss]} for step, loss in ((20, 2.3), (40, 2.1))]
    for method in ("ddp", "all-reduce"):
        figures = {"losses": losses, "epochs": [{"train_loss": 2.0, "test_loss": 2.1, "test_accuracy": 0.2}]}
        found.append(
            Row("train", {"method": method, "workers": 2, "global_batch": 32}, seconds=[0.4], figures=figures)
        )
    exact = {"status": "bitwise"}
    certificate = {"method": "ddp", "workers": 2, "model": "cnn", "sequential": exact, "one_worker": exact}
    found.append(Row("certificates", {"method": "ddp"}, figures={"passed": True, **certificate}))
    return found


@pytest.fixture
def contents() -> Contents:
    _, study = load_study("cs744")
    bars = [
        Bar("rank 0 compute", "forward", 0.0, 10.0, "forward 10 ms"),
        Bar("rank 0 communication", "bucket 0", 5.0, 3.0, "x"),
    ]
    timeline = Timeline("One step of ddp", ["rank 0 compute", "rank 0 communication"], bars)
    return study_contents(
        study, rows(), MACHINE, answers=True, timelines=[timeline],
        schedules=[("ring", "<svg><title>ring</title></svg>")],
        skipped=[("cell x", "needs 99 GiB")], repeat="syncline lab cs744",
        plans=[("one", 'model = "</script>"\ndata = "synthetic"')],
    )  # fmt: skip


class Counter(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_holds_every_table_and_figure_and_needs_no_network(contents: Contents) -> None:
    text = html(contents)
    counter = Counter()
    counter.feed(text)
    tables = [tag for tag, _ in counter.tags if tag == "table"]
    assert len(tables) == len(contents.tables) + 1 + 1, "all tables, the main one, the certificates"
    plots = [given for tag, given in counter.tags if tag == "div" and given.get("class") == "plot"]
    assert len(plots) == len(contents.figures) + 1 + 1
    assert all(given["aria-label"] for given in plots), "a text for those who cannot see the picture"
    assert not [given for _, given in counter.tags if str(given.get("src", "")).startswith("http")]
    assert not [
        given for tag, given in counter.tags if tag == "link" and str(given.get("href", "")).startswith("http")
    ]


def test_what_users_write_cannot_break_the_page(contents: Contents) -> None:
    text = html(contents)
    assert "P &lt;1&gt;" in text
    assert "model = &#34;&lt;/script&gt;&#34;" in text


def test_markdown_has_the_same_tables_and_pictures(contents: Contents, tmp_path: Path) -> None:
    page = write_report(contents, tmp_path / "report")
    text = (tmp_path / "report" / "report.md").read_text()
    assert page == tmp_path / "report" / "index.html"
    pictures = re.findall(r"\]\((figures/[^)]+)\)", text)
    assert len(pictures) == len(contents.figures) + 2
    assert all((tmp_path / "report" / name).stat().st_size > 0 for name in pictures)
    assert (tmp_path / "report" / "figures" / "step-time-by-method.png").read_bytes().startswith(b"\x89PNG")
    assert contents.answer in text
    assert "| single | 403 ±1 ms |" in text or "| single | 402" in text
    assert "- needs 99 GiB: cell x" in text


def test_the_first_screen_says_which_data(contents: Contents) -> None:
    """The title speaks of the study's data, for which made-up data may have stood in."""
    assert "Data: synthetic." in facts(contents)
    assert "Data" not in facts(replace(contents, plans=[]))


def test_csv_has_plain_numbers(contents: Contents) -> None:
    assert contents.main_table is not None
    lines = as_csv(contents.main_table).splitlines()
    assert lines[0].startswith('method,"step, 1 node","step, 2 nodes","step, 4 nodes","time/ddp, 1 node"')
    assert float(lines[1].split(",")[1]) == pytest.approx(0.402)


def test_answers_can_be_left_open() -> None:
    _, study = load_study("cs744")
    text = markdown(study_contents(study, rows(), MACHINE, answers=False))
    assert "(left open)" in text
    assert "fastest" not in text


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [1200, 390])
def test_a_browser_draws_everything_without_an_error(contents: Contents, tmp_path: Path, width: int) -> None:
    page = write_report(contents, tmp_path / "report")
    drawn, errors = open_in_browser(page, width, tmp_path)
    assert errors == []
    assert drawn.count('class="main-svg"') >= len(contents.figures) + 2
    assert drawn.count("<table") == len(contents.tables) + 2


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_boxes_are_drawn_as_boxes(contents: Contents, tmp_path: Path) -> None:
    """A smaller bundle of plotly draws them as points, without an error."""
    series = [Series(name, [0.1, 25], [2.0, 3.0], samples=[[1.0, 2.0, 4.0], [2.0, 3.0, 5.0]]) for name in ("a", "b")]
    boxes = FigureData("Spread of a step", "boxes", "bucket MB", "step", "s", series)
    page = write_report(replace(contents, main_figure=None, figures=[boxes], timelines=[]), tmp_path / "report")
    drawn, errors = open_in_browser(page, 1280, tmp_path)
    assert errors == []
    assert drawn.count('<path class="box"') == 4
    legend = re.search(r'<div class="legend".*?</div>', drawn, flags=re.S)
    assert legend is not None
    assert re.findall(r"</i>(\w+)</button>", legend.group()) == ["a", "b"]


def test_a_page_with_everything_is_small_and_says_whose_the_library_is(contents: Contents) -> None:
    text = html(contents)
    assert len(text.encode()) < 1_500_000
    assert "Plotly Technologies Inc" in text
    assert "MIT License" in text


def test_lines_that_hide_each_other_are_dashed() -> None:
    lines = [
        Series(name, [1, 2], values) for name, values in (("a", [2.0, 1.0]), ("b", [2.0, 1.001]), ("c", [3.0, 1.0]))
    ]
    figure = FigureData("Loss", "lines", "step", "loss", "", lines)
    assert [trace["line"].get("dash") for trace in plot(figure)["data"]] == [None, "dash", None]


def test_a_timeline_has_short_names_and_ends_where_its_bars_do() -> None:
    bars = [Bar("rank 0 compute", "forward", 0.0, 10.0, ""), Bar("rank 0 communication", "transfer", 5.0, 15.0, "")]
    drawn = plot_timeline(Timeline("t", ["rank 0 compute", "rank 0 communication"], bars))
    assert drawn["layout"]["yaxis"]["ticktext"] == ["rank 0", "transfers"]
    assert drawn["layout"]["xaxis"]["range"] == [0.0, pytest.approx(20, rel=0.02)]


def made_up_results(study: Study) -> list[Row]:
    """A row for every method of every cell, with something in all that a table or figure may ask for."""
    found = []
    for stage in study.stage:
        # An experiment of a lab's own gives its rows points of its own: those that the lab's tables ask for.
        asked = [table.where for table in study.table if table.stage == stage.name and stage.run == "function"]
        own = {key: value for where in asked for key, value in where.items()}
        for number, cell in enumerate(expand(study, stage, Ground(), quick=True)):
            plan = cell.plan.model_dump()
            for method in cell.methods or (cell.plan.method,):
                point = {key: plan[key] for key in ("model", "workers", "threads", "global_batch", "compute")}
                losses = [{"step": step, "loss": 2.0, "by_rank": [1.9, 2.1]} for step in (10, 20)]
                epochs = [{"train_loss": 2.0, "train_accuracy": 0.2, "test_loss": 2.1, "test_accuracy": 0.2}]
                figures = {"loss": 2.0, "losses": losses, "epochs": epochs, "train_samples": 1000}
                figures |= {"other_load": 0.3 * (number % 2)}
                seconds = [0.4 + 0.01 * number + 0.001 * i for i in range(5)]
                found.append(
                    Row(stage.name, {**point, **cell.point, **own, "method": method}, seconds, figures, PARTS)
                )
    return found


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("lab", built_in_labs())
def test_a_browser_draws_the_report_of_every_lab(lab: str, tmp_path: Path) -> None:
    _, study = load_study(lab)
    contents = study_contents(study, made_up_results(study), MACHINE, answers=True)
    drawn, errors = open_in_browser(write_report(contents, tmp_path / "report"), 390, tmp_path)
    assert errors == []
    tables, figures = [contents.main_table, *contents.tables], [contents.main_figure, *contents.figures]
    for one in (*tables, *figures):
        assert one is not None, "a lab has a main table and a main figure"
        assert escape(one.title, quote=False) in drawn
    assert all(table.rows for table in tables if table is not None)
    assert drawn.count('class="main-svg"') >= len(figures)
    assert drawn.count("<table") == len(tables)
    assert all(escape(text, quote=False) in drawn for text, _ in contents.asks)


OVERFLOW = """<script>setTimeout(() => {
  const page = document.documentElement;
  document.body.dataset.over = Math.max(0, page.scrollWidth - page.clientWidth);
}, 5000)</script>"""


def open_in_browser(page: Path, width: int, scratch: Path) -> tuple[str, list[str]]:
    """The page's document after its scripts ran, and what it complained of. Nothing may be wider than the window."""
    assert BROWSER is not None
    page.write_text(page.read_text() + OVERFLOW)
    result = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            f"--user-data-dir={scratch / 'profile'}", f"--window-size={width},900", "--enable-logging=stderr",
            "--virtual-time-budget=10000", "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    errors = [line for line in result.stderr.splitlines() if "CONSOLE" in line]
    assert re.findall(r'data-over="(\d+)"', result.stdout) == ["0"], "only tables and drawings scroll sideways"
    return result.stdout, errors


def test_no_two_series_of_a_drawing_share_a_colour() -> None:
    names = ["forward", "backward", "communication", "update", "other"]
    figure = FigureData("parts", "stacked", "overlap", "time", "s", [Series(name, ["yes"], [1.0]) for name in names])
    assert len(set(colours_of(figure).values())) == len(names)
