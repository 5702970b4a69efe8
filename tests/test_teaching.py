"""A teacher's lab: open questions and own answers, the file to start from, checking without running,
sheets and grades."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import nbformat
import pytest
from conftest import Cli

from syncline.errors import PlanError
from syncline.study.file import parse_study
from syncline.study.grading import Graded, grade
from syncline.study.lab_code import LABS, built_in_labs, call_identity
from syncline.study.reference import SECTIONS, reference
from syncline.study.rows import Row
from syncline.study.runner import OPEN, main_answer, study_contents
from syncline.study.sheet import study_text
from syncline.teaching import check_lab, write_sheet

LAB = """
title = "Two workers"
question = "What do two workers give?"
[plan]
model = "mlp"
data = "synthetic"
threads = 1
evaluate = false
[[stage]]
name = "time"
methods = ["single", "ddp"]
grid = { nodes = [1, 2] }
plan = { batch_per_worker = 8, steps = 4 }
[stage.quick]
grid = { nodes = [1] }
[[table]]
title = "Step time"
stage = "time"
columns = ["nodes"]
values = ["step", "speedup"]
main = true
[[ask]]
text = "Name two things that a step consists of."
points = 2
[[ask]]
text = "Why is ddp faster?"
points = 1.5
solution = "It sends while backward runs."
[[ask]]
text = "What is fastest?"
answer = "fastest"
solution = "As the lecture said."
stage = "time"
"""


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    path = tmp_path / "two.toml"
    path.write_text(LAB)
    return path


# Questions.


def test_questions_are_open_computed_or_answered_in_words() -> None:
    study = parse_study(LAB, "two.toml")
    contents = study_contents(study, [], {}, answers=True)
    assert contents.answer == main_answer(study, []) == OPEN
    assert contents.asks == [
        ("Name two things that a step consists of. (2 points)", OPEN),
        ("Why is ddp faster? (1.5 points)", "It sends while backward runs."),
        ("What is fastest?", "Not answered: a method on several workers was not measured.\nAs the lecture said."),
    ]
    assert {answer for _, answer in study_contents(study, [], {}, answers=False).asks} == {OPEN}


def test_the_main_question_may_have_an_answer_in_words() -> None:
    study = parse_study(LAB.replace("[plan]", 'solution = "Not much."\n[plan]'), "x")
    assert main_answer(study, [Row("time", {"method": "ddp"})]) == "Not much."


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('title = "Two workers"', "", r"^two\.toml: missing key 'title'\.$"),
        ('name = "time"', "", r"^two\.toml, \[\[stage\]\] number 1: missing key 'name'\.$"),
        ('stage = "time"\ncol', "col", r"^two\.toml, \[\[table\]\] number 1 \('Step time'\): missing key 'stage'\.$"),
        ('text = "Why is ddp faster?"', "", r"^two\.toml, \[\[ask\]\] number 2: missing key 'text'\.$"),
        ("[stage.quick]", "best_of = { keys = ['x'] }\n[stage.quick]", r"number 1, best_of: missing key 'stage'\.$"),
        (
            'lecture said."\nstage = "time"',
            'lecture said."',
            r"question 'What is fastest\?': .* needs a stage to read",
        ),
        ("[plan]", 'answer = "fastest"\n[plan]', r"^answer = 'fastest' needs an answer_stage; choose one of time\.$"),
        ("points = 2", "points = -1", r"ask\.0\.points: should be greater than or equal to 0, not -1"),
        (
            "solution = ",
            "solutoin = ",
            r"unknown key 'ask\.1\.solutoin' in two\.toml\. Did you mean 'ask",
        ),
    ],
)
def test_a_missing_or_wrong_key_is_one_line_that_says_where(old: str, new: str, said: str) -> None:
    assert old in LAB
    with pytest.raises(PlanError, match=said) as caught:
        parse_study(LAB.replace(old, new, 1), "two.toml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "[plan]",
            "global_batch = 8\n[plan]",
            r"^global_batch is a plan key: write it as plan = \{ g",
        ),
        ('name = "time"', 'name = "time"\nsteps = 3', r"^stage\.0: steps is a plan key"),
        ("[stage.quick]", "[stage.quick]\nbatch_per_worker = 3", r"^stage\.0\.quick: batch_per_worker is a plan key"),
    ],
)
def test_a_plan_key_in_the_wrong_place_is_told_where_it_belongs(old: str, new: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        parse_study(LAB.replace(old, new, 1), "two.toml")


def test_dotted_keys_of_a_grid_need_no_quotes() -> None:
    text = LAB.replace("nodes = [1, 2] }", "nodes = [1, 2], options.bucket_cap_mb = [1, 5] }")
    (stage,) = parse_study(text, "two.toml").stage
    assert stage.grid == {"nodes": [1, 2], "options.bucket_cap_mb": [1, 5]}


# The file to start from.


@pytest.mark.parametrize("name", built_in_labs())
def test_a_printed_lab_can_be_saved_anywhere_and_is_the_same_lab(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(study_text(name))
    (tmp_path / "handout.toml").write_text(study_text(name, answers=False))
    mine, handout, lab = (check_lab(path) for path in (tmp_path / "mine.toml", tmp_path / "handout.toml", name))
    assert (mine.title, mine.stages, mine.questions) == (lab.title, lab.stages, lab.questions)
    assert [form.cells for form in mine.forms.values()] == [form.cells for form in lab.forms.values()]
    assert [(ask.text, ask.answer, ask.solution) for ask in handout.questions] == [
        (ask.text, None, "") for ask in lab.questions
    ]


def test_an_experiment_of_a_built_in_lab_can_be_called_from_anywhere(tmp_path: Path) -> None:
    call = f"{LABS / 'hpml-dataparallel' / 'experiments.py'}:travels"
    text = LAB.replace(
        'methods = ["single", "ddp"]', 'run = "function"\ncall = "hpml-dataparallel/experiments.py:travels"'
    )
    (stage,) = parse_study(text, "x", tmp_path).stage
    assert stage.call == call
    assert call_identity(call) == "syncline.measure.travels:travels"


def test_what_is_handed_out_has_no_answers(lab: Path) -> None:
    handout = tomllib.loads(study_text(str(lab), answers=False))
    assert "solution" not in str(handout)
    assert [ask.get("points") for ask in handout["ask"]] == [2, 1.5, None]
    assert study_text(str(lab)) == LAB


# Checking.


def test_a_checked_lab_says_what_it_would_take(lab: Path) -> None:
    checked = check_lab(lab)
    first, whole, quick, shown, asked = checked.text.splitlines()
    assert first == "no mistakes found: Two workers"
    assert whole.startswith("  whole    2 cells, about ")
    assert quick.startswith("  --quick  1 cell, about ")
    assert shown == "  1 stage, 1 table, 0 figures"
    assert asked == "  3 questions: 1 computed, 2 with your own answer, 1 open; 3.5 points"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('columns = ["nodes"]', 'columns = ["nodez"]', r"table 'Step time': stage time does not vary 'nodez'\."),
        ('columns = ["nodes"]', "where = { nodes = 4 }", r"table 'Step time': stage time has no nodes 4\."),
        ('columns = ["nodes"]', 'where = { method = "dpp" }', r"has no method 'dpp'\."),
        ('"single", "ddp"', '"single", "dpp"', r"dpp"),
        ("steps = 4", "stepz = 4", r"stage time: unknown key 'stepz'"),
        ("nodes = [1] }", "nodes = [0] }", r"stage time: workers: should be greater than or equal to 1"),
        ('model = "mlp"', 'model = "nowhere:Net"', r"cannot load model 'nowhere:Net'"),
        ('data = "synthetic"', 'data = "nowhere:flowers"', r"cannot load data 'nowhere:flowers'"),
        (
            "[[ask]]",
            '[[figure]]\ntitle = "F"\nkind = "lines"\nstage = "time"\n[[ask]]',
            r"'F': .* needs values",
        ),
        ("[[ask]]", '[[figure]]\ntitle = "F"\nkind = "loss"\n[[ask]]', r"figure 'F' has no stage"),
    ],
)
def test_what_is_wrong_is_found_without_running(lab: Path, old: str, new: str, said: str) -> None:
    assert old in LAB
    lab.write_text(LAB.replace(old, new, 1))
    with pytest.raises(PlanError, match=said):
        check_lab(lab)


def test_an_answer_must_bear_that_nothing_was_measured(tmp_path: Path) -> None:
    (tmp_path / "lab.toml").write_text(LAB.replace('"fastest"', '"first"'))
    (tmp_path / "answers.py").write_text("def first(rows, others):\n    return rows[0].method\n")
    with pytest.raises(PlanError, match=r"answer 'first' fails if .* measured: .*answers\.py, line 2: Index"):
        check_lab(tmp_path)


def test_the_main_answer_gets_its_further_stages(tmp_path: Path) -> None:
    top = 'answer = "both"\nanswer_stage = "time"\nanswer_with_stages = ["time"]\n[plan]'
    (tmp_path / "lab.toml").write_text(LAB.replace("[plan]", top, 1))
    (tmp_path / "answers.py").write_text("def both(rows, others):\n    return f\"{len(others['time'])} rows.\"\n")
    assert check_lab(tmp_path).title == "Two workers"


def test_what_was_not_recorded_is_found_without_running(lab: Path) -> None:
    far = '[[stage]]\nname = "far"\nmethods = ["ddp"]\nreplay = "time"\ngrid = { nodes = [2, 4] }\n'
    lab.write_text(f"{LAB}{far}plan = {{ batch_per_worker = 16, steps = 4 }}\n")
    whole = check_lab(lab).forms["whole"]
    assert (whole.cells, len(whole.cannot)) == (4, 2)
    assert "2 cannot run and are skipped: stage time recorded no mlp at 16 samples per worker" in whole.text


def test_print_and_check_write_nothing(cli: Cli, lab: Path) -> None:
    for arguments in (["--check", "two.toml"], ["two.toml", "--print"]):
        done = cli("lab", *arguments, cwd=lab.parent)
        assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == LAB
    lab.write_text(LAB.replace('title = "Step time"', ""))
    done = cli("lab", "--check", "two.toml", cwd=lab.parent)
    assert done.returncode == 2
    assert done.stderr == "syncline: two.toml, [[table]] number 1: missing key 'title'.\n"
    assert {path.name for path in lab.parent.iterdir()} == {"two.toml", "work"}


# The sheet.


def test_a_sheet_has_the_questions_points_and_room_but_no_answers(lab: Path, cli: Cli) -> None:
    done = cli("lab", "two.toml", "--sheet", "--out", "out", cwd=lab.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "sheet out/two-sheet.md\nsheet out/two-sheet.ipynb\n"
    text = (lab.parent / "out" / "two-sheet.md").read_text()
    assert "## Questions (3.5 points)" in text
    assert "### 1. Name two things that a step consists of. (2 points)\n\n<br>\n" in text
    assert "### 3. What is fastest?\n\nLook at: Step time.\n\n<br>\n" in text
    assert "    syncline lab two.toml --no-answers\n" in text
    assert "backward runs" not in text
    notebook = nbformat.read(lab.parent / "out" / "two-sheet.ipynb", as_version=4)
    nbformat.validate(notebook)
    (code,) = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    compile(code, "sheet", "exec")
    assert [cell.source for cell in notebook.cells].count("*Your answer*") == 4, "three questions and the main one"
    assert "backward runs" not in str(notebook)


def test_a_lab_without_questions_has_no_sheet(tmp_path: Path) -> None:
    (tmp_path / "none.toml").write_text(LAB[: LAB.index("[[ask]]")])
    with pytest.raises(PlanError, match="has no questions"):
        write_sheet(tmp_path / "none.toml", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Grading.


def times(method: str, nodes: int, seconds: float, **figures: float) -> Row:
    batch = 8 * nodes
    point = {"method": method, "nodes": nodes, "workers": nodes, "global_batch": batch, "batch_per_worker": 8}
    return Row("time", point, seconds=[seconds] * 3, figures=figures)


REFERENCE = [
    times("single", 1, 0.10),
    times("ddp", 1, 0.105),
    times("ddp", 2, 0.125, loss=2.0),
    times("all-reduce", 2, 0.2, loss=2.0),
]


def verdicts(grades: list[Graded], what: str) -> dict[str, str]:
    return {one.where: one.verdict for one in grades if one.what == what}


def graded(entry: str, *found: Row) -> list[Graded]:
    return grade(parse_study(f"{LAB}\n[[grade]]\nstage = 'time'\n{entry}", "x"), REFERENCE, found)


def test_ratios_are_compared_and_times_are_not() -> None:
    """A machine that is half as fast, and gains as much by two workers."""
    slow = [times(row.method, row.point["nodes"], 2 * row.seconds[0]) for row in REFERENCE]
    entry = "value = 'speedup'\nwhere = { nodes = 2 }"
    assert verdicts(graded(entry, *slow), "speed-up") == {
        "ddp, nodes 2": "inside",
        "all-reduce, nodes 2": "inside",
    }
    off = [times("single", 1, 0.1), times("ddp", 2, 0.165)]  # 1.21 where the reference has 1.6
    assert [(one.reference, one.found, one.tolerance, one.verdict) for one in graded(entry, *off)] == [
        ("1.60", "1.21", "±25% of it", "inside"),
        ("1.00", "-", "±25% of it", "missing"),
    ]
    assert [one.verdict for one in graded(f"{entry}\ntolerance = 0.1", *off)] == ["outside", "missing"]


def test_losses_have_a_narrow_tolerance_and_shares_an_absolute_one() -> None:
    near, far = times("ddp", 2, 0.1, loss=2.09), times("all-reduce", 2, 0.1, loss=2.11)
    assert [one.verdict for one in graded("value = 'loss'", near, far)] == ["inside", "outside"]
    assert [one.verdict for one in graded("value = 'loss'", times("ddp", 2, 0.1, loss=float("nan")))] == [
        "outside",
        "missing",
    ]
    found = [times("single", 1, 0.1), times("ddp", 1, 0.1), times("ddp", 2, 0.139), times("all-reduce", 2, 0.29)]
    told = graded("value = 'efficiency'\nwhere = { nodes = 2 }", *found)
    assert [(one.reference, one.found, one.tolerance, one.verdict) for one in told] == [
        ("80.0%", "71.9%", "±10%", "inside"),
        ("50.0%", "34.5%", "±10%", "outside"),
    ]


def test_an_order_counts_only_what_is_apart_in_the_reference() -> None:
    entry = "value = 'step'\nkind = 'order'"
    same = graded(entry, times("single", 1, 2), times("ddp", 1, 1), times("ddp", 2, 3), times("all-reduce", 2, 4))
    assert [(one.where, one.reference, one.found, one.verdict) for one in same] == [
        ("nodes 2", "ddp < all-reduce", "ddp < all-reduce", "inside")
    ], "on one node nothing is apart"
    turned = graded(entry, times("ddp", 2, 4), times("all-reduce", 2, 3))
    assert [(one.found, one.verdict) for one in turned] == [("all-reduce < ddp", "outside")]
    assert [one.verdict for one in graded(entry, times("ddp", 2, 4))] == ["missing"]
    fine = graded(f"{entry}\ntolerance = 0.01", *REFERENCE)
    assert [one.reference for one in fine] == ["single < ddp", "ddp < all-reduce"]
    assert {one.verdict for one in fine} == {"inside"}


def test_without_entries_ratios_and_orders_of_the_tables_are_graded() -> None:
    grades = grade(parse_study(LAB, "x"), REFERENCE, REFERENCE)
    assert {one.what for one in grades} == {"speed-up", "order of step"}
    assert {one.verdict for one in grades} == {"inside"}


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("value = 'step'", r"grade of step: times and rates differ between machines; grade a ratio"),
        ("value = 'stepp'", r"unknown value 'stepp'"),
        ("value = 'speedup'\ntolerance = -1", r"grade\.0\.tolerance"),
    ],
)
def test_a_grade_that_cannot_be_is_refused(entry: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        graded(entry)


def test_a_best_setting_that_another_machine_chose_is_the_same_row() -> None:
    """Stage two takes the best number of threads of stage one, which is another one on another machine."""
    more = '[[stage]]\nname = "two"\nmethods = ["ddp"]\nbest_of = { stage = "time", keys = ["threads"] }\n'
    study = parse_study(f"{LAB}{more}[[grade]]\nstage = 'two'\nvalue = 'loss'\n", "x")
    ours, theirs = (
        Row("two", {"method": "ddp", "workers": 2, "threads": threads}, figures={"loss": 2.0}) for threads in (1, 4)
    )
    assert [(one.where, one.verdict) for one in grade(study, [ours], [theirs])] == [("ddp", "inside")]


@pytest.mark.timeout(360)
def test_a_folder_is_graded_against_ones_own_run(lab: Path, cli: Cli) -> None:
    here = lab.parent
    none = cli("lab", "two.toml", "--grade", "alice", cwd=here)
    assert (none.returncode, none.stderr.count("\n")) == (2, 1)
    assert "alice is not a lab's folder" in none.stderr
    assert cli("lab", "two.toml", "--quick", "--out", "alice", cwd=here).returncode == 0
    none = cli("lab", "two.toml", "--grade", "alice", cwd=here)
    assert none.returncode == 2
    assert "no reference run in runs/lab-two-quick. Run `syncline lab two.toml --quick` once" in none.stderr
    shutil.copytree(here / "alice", here / "runs" / "lab-two-quick")
    shutil.move(here / "alice", here / "elsewhere")
    same = cli("lab", "two.toml", "--grade", "elsewhere", cwd=here)
    assert same.returncode == 0, same.stderr
    assert re.search(r"^(\d+) inside, 0 outside, 0 missing, of \1$", same.stdout, re.MULTILINE)
    for cell in (here / "elsewhere" / "cells").iterdir():
        shutil.rmtree(cell)
    gone = cli("lab", "two.toml", "--grade", "elsewhere", cwd=here)
    assert re.search(r"^0 inside, 0 outside, (\d+) missing, of \1$", gone.stdout, re.MULTILINE)
    lab.write_text(LAB.replace("Two workers", "Another lab"))
    other = cli("lab", "two.toml", "--grade", "elsewhere", cwd=here)
    assert other.returncode == 2
    assert "elsewhere is a run of 'Two workers', not of 'Another lab'" in other.stderr


def test_one_thing_at_a_time(cli: Cli, lab: Path) -> None:
    for arguments in (["--print", "--check"], ["--reference", "x"]):
        done = cli("lab", "two.toml", *arguments, cwd=lab.parent)
        assert done.returncode == 2
        assert "use only one of --print, --check, --sheet, --grade" in done.stderr


# The reference of lab files.


def test_the_reference_of_lab_files_is_up_to_date() -> None:
    page = Path(__file__).parent.parent / "docs" / "study_reference.md"
    assert page.read_text() == reference(), "run scripts/reference"


def test_every_key_of_a_lab_file_is_described() -> None:
    for title, _, section in SECTIONS:
        for name, field in section.model_fields.items():
            assert field.description, f"{title} {name}"
