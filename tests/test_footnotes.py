"""Notes of a report: each is written once, and tables have its letter where it belongs."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from test_report import MACHINE, rows

from syncline.marks import STRETCHED
from syncline.report.footnotes import with_footnotes
from syncline.report.page import facts, html, markdown
from syncline.study.file import Table, load_study
from syncline.study.notes import Note, notes_of, written_once
from syncline.study.rows import Row
from syncline.study.runner import NOT_FINISHED, study_contents
from syncline.study.tables import build_table

ACROSS = Table(title="across", stage="s", columns=["nodes"], values=["step"])
DOWN = Table(title="down", stage="s", rows=["nodes", "method"], values=["step", "throughput"])


def row(method: str, nodes: int, load: float = 0.0, **more: Any) -> Row:
    point = {"method": method, "nodes": nodes, "workers": nodes, "global_batch": 8}
    return Row("s", point, seconds=[1.0] * 5, figures={"other_load": load}, **more)


def test_letters_stand_at_the_cell_the_row_or_the_title() -> None:
    found = [row("ddp", 1, 0.2), row("ddp", 2, 0.5, marks=(STRETCHED,)), row("ring", 1, 0.3), row("ring", 2, 0.4)]
    across, down = with_footnotes([build_table(ACROSS, found), build_table(DOWN, found)])
    assert across.title == ["a"], "the load concerns every number"
    assert across.cells == [[[], [], ["b"]], [[], [], []]], "of ddp only the cell of two nodes is stretched"
    assert [(letter, note.rule) for letter, note in across.said] == [("a", "other load"), ("b", "stretched")]
    assert across.said[0][1].text.startswith("Up to 50% of the cores' time")
    assert down.cells[1] == [[], ["b"], [], []], "at the row's name, which is in its last key column"
    assert down.said == [], "they are written above"


def test_no_letter_looks_like_a_power_of_a_number() -> None:
    spec = Table(title="t", stage="s", rows=["method", "nodes"], values=["step"])
    (marked,) = with_footnotes([build_table(spec, [row("ddp", 1), row("ddp", 2, 0.5)])])
    assert marked.cells == [[[], [], []], [["a"], [], []]]


def test_a_row_that_nothing_is_doubtful_about_has_no_note() -> None:
    assert notes_of(row("ddp", 1)) == []
    table = build_table(ACROSS, [row("ddp", 1), row("ddp", 2, 0.5)])
    (marked,) = with_footnotes([table])
    assert (marked.title, marked.cells) == ([], [[[], [], ["a"]]])


def test_every_rule_has_words_that_fit_all_rows() -> None:
    doubtful = Row("s", {"method": "ddp", "workers": 2}, seconds=[3.0, 1.0, 1.0],
                   figures={"step_by_rank": [1.0, 2.0], "counted": 2, "other_load": 0.5})  # fmt: skip
    rules = {note.rule for note in notes_of(doubtful)}
    assert rules == {"too few steps", "warm-up", "ranks disagree", "denominator", "other load", "uneven steps"}


def test_more_than_perfect_scaling_is_noted_at_its_number() -> None:
    fast = [row("single", 1), replace(row("ddp", 2), seconds=[0.4] * 5)]
    spec = Table(title="t", stage="s", values=["step", "speedup", "efficiency"])
    (marked,) = with_footnotes([build_table(spec, fast)])
    assert marked.cells[1] == [[], [], ["a"], ["a"]]
    assert marked.said[0][1].text.startswith("Up to 125% efficiency is more than the workers can give")


def test_of_notes_of_one_name_the_largest_is_kept_in_its_place() -> None:
    small, large = Note("other load", "little", 0.2), Note("other load", "much", 0.6)
    other, third = Note("link", "slow"), Note("link", "slower")
    assert written_once([small, other, large, third, other]) == [large, other, third]


def test_a_report_writes_each_note_once() -> None:
    _, study = load_study("cs744")
    loaded = [replace(one, figures={**one.figures, "other_load": 0.5}) for one in rows()]
    contents = study_contents(study, loaded, MACHINE, answers=False)
    for text in (html(contents), markdown(contents)):
        assert text.count("of the cores&#39; time went to") + text.count("of the cores' time went to") == 1
        assert len(re.findall(r"<sup>", text)) > 3, "and points to it from the tables"


def test_a_partial_report_leaves_out_what_is_empty_and_says_how_to_finish() -> None:
    _, study = load_study("cs744")
    first = next(table.stage for table in study.table if table.main)
    some = [one for one in rows() if one.stage == first]
    skipped = [("train: method ddp", NOT_FINISHED), ("train: method ring", NOT_FINISHED)]
    contents = study_contents(
        study, some, MACHINE, answers=True, skipped=skipped, plans=[("weak: nodes 2", "")], repeat="syncline lab x"
    )
    assert contents.main_table is not None
    assert all(not table.is_empty for table in contents.tables)
    empty = next(table.title for table in study.table if table.kind == "losses")
    assert empty in contents.empty
    assert "Not finished: 2 of 3 cells are missing." in facts(contents)
    text = markdown(contents)
    assert f"### {empty}" not in text
    assert "## Finish it\n\n```\nsyncline lab x\n```" in text
    assert "- not finished: train: method ddp; train: method ring" in text
    assert "This command runs them and keeps the others" in html(contents)
