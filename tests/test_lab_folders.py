"""A lab is a folder: its own answers and experiments, and what is said where they are wrong."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli

from syncline.errors import PlanError, SynclineError
from syncline.study.cells import Ground, expand
from syncline.study.file import load_study
from syncline.study.lab_code import LABS, built_in_labs, call_identity, load_answers, run_call
from syncline.study.rows import Row

ROOT = Path(__file__).parent.parent
DOCS = (ROOT / "docs" / "labs.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", DOCS, re.DOTALL | re.MULTILINE)


@pytest.fixture
def agree(tmp_path: Path) -> Path:
    """The lab of docs/labs.md, as a reader would copy it."""
    folder = tmp_path / "agree"
    folder.mkdir()
    (folder / "lab.toml").write_text(blocks("toml")[0])
    for name, text in zip(("answers.py", "experiments.py"), blocks("python"), strict=True):
        (folder / name).write_text(text)
    return folder


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.timeout(360)
def test_the_lab_of_the_docs_runs_as_written(agree: Path, cli: Cli) -> None:
    (command,) = re.findall(r"^Run it:\n\n    syncline (.*)$", DOCS, re.MULTILINE)
    done = cli(*command.split(), cwd=agree.parent)
    assert done.returncode == 0, done.stderr
    said = r"(Measured with .+: )?A second worker (pays off|does not pay off): \d+\.\d\d times"
    refused = r"No answer: other programs took \d+% of the cores"  # where others keep this machine busy
    assert re.search(rf"^({said}|{refused})", done.stdout, re.MULTILINE)
    report = agree.parent / "runs" / "lab-agree-quick" / "report" / "report.md"
    text = report.read_text()
    assert re.search(r"^\| 1000000 \| [\d.]+ [mµ]?s \|$", text, re.MULTILINE), "rows of the experiment"
    assert re.search(rf"% of the step of two workers\.|{refused}", text)
    page = report.with_name("index.html").read_text()
    assert "Median time of one all-reduce on rank 0." in page, "the definition of its own value"

    change(agree / "answers.py", "A second worker {verdict}", "Two workers: it {verdict}")
    again = cli("report", "runs/lab-agree-quick", "-o", "other", cwd=agree.parent)
    assert again.returncode == 0, again.stderr
    assert re.search(rf"Two workers: it|{refused}", (agree.parent / "other" / "report.md").read_text())

    change(agree / "experiments.py", "(1, 1_000_000)", "(1, 1_000)")
    rerun = cli(*command.split(), cwd=agree.parent)
    assert rerun.returncode == 0, rerun.stderr
    assert "3 cells, 2 already finished" in rerun.stdout, "only the experiment that was edited"
    assert "| 1000 |" in report.read_text()


@pytest.mark.parametrize("given", ["agree", "agree/lab.toml", "./agree/"])
def test_a_folder_goes_by_its_name(agree: Path, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(agree.parent)
    name, study = load_study(given)
    assert name == "agree"
    assert study.answers().keys() == {"pays-off", "small-agreement"}
    assert "agree_s" in study.values()
    monkeypatch.chdir(agree)
    assert load_study(".")[0] == "agree"


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (
            "answers.py",
            "def pays_off(rows, others):",
            "def pays_off(rows, others)",
            r"answers\.py, line 6: expected ':'",
        ),
        ("answers.py", "import missing, read", "import missing, raed", r"answers\.py, line 3: ImportError: .*'raed'"),
        (
            "answers.py",
            "def pays_off",
            "def pays",
            r"unknown answer 'pays-off'; choose one of pays, small-agreement, ",
        ),
        (
            "experiments.py",
            "import torch",
            "import torhc",
            r"experiments\.py, line 6: ModuleNotFoundError: .*'torhc'",
        ),
        ("experiments.py", "def agree", "def agreed", r"experiments\.py has no function 'agree'. It defines agreed"),
        ("lab.toml", "experiments.py:", "experiment.py:", r"cannot read .*experiment\.py"),
        ("lab.toml", "experiments.py:agree", "experiments:agree", r"cannot load 'experiments:agree'"),
        ("lab.toml", 'name = "agree_s"', 'name = "step"', r"Syncline already has a value 'step'"),
        ("lab.toml", 'unit = "s"', 'unit = "ms"', r"unknown value 'ms'\. .*Choose one of s, B, B/s, %, x, number\."),
    ],
)
def test_a_mistake_is_told_by_file_and_line(agree: Path, file: str, old: str, new: str, said: str) -> None:
    change(agree / file, old, new)
    with pytest.raises(PlanError, match=said):
        load_study(str(agree))


def test_a_mistake_ends_with_exit_code_2_and_leaves_no_folder(agree: Path, cli: Cli) -> None:
    change(agree / "answers.py", "def pays_off(rows, others):", "def pays_off(rows, others)")
    done = cli("lab", "agree", "--quick", cwd=agree.parent)
    assert done.returncode == 2
    assert "answers.py, line 6: expected ':'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert {path.name for path in agree.parent.iterdir()} == {"agree", "work"}, "the lab, and the folder of `cli`"


def test_an_empty_folder_is_no_lab(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"has no lab\.toml"):
        load_study(str(tmp_path))


def test_an_answer_that_fails_says_in_which_line(agree: Path) -> None:
    rows = [Row("time", {"workers": 2, "method": "ddp", "global_batch": 8}, [1.0])]
    answers = load_answers(agree)
    assert answers["small-agreement"](rows, {"agree": []}).startswith("Not answered")
    with pytest.raises(SynclineError, match=r"answers\.py, line 17: KeyError: 'agree'\. Finished cells are kept"):
        answers["small-agreement"](rows, {})
    change(agree / "answers.py", 'return missing("a step on two workers")', "return None")
    with pytest.raises(SynclineError, match=r"answers\.py: small_agreement returned .*, not a string"):
        load_answers(agree)["small-agreement"](rows, {"agree": []})


EVERYTHING = """
title = "Every kind of stage"
question = "On which hosts do ranks run?"
answer = "hosts"
answer_stage = "names"
[plan]
model = "mlp"
data = "synthetic"
threads = 1
"measure.calibration" = 0
[[stage]]
name = "proof"
run = "verify"
methods = ["all-reduce"]
plan = { nodes = 2 }
[[stage]]
name = "link"
run = "probe"
plan = { nodes = 2, steps = 1 }
[[stage]]
name = "names"
run = "function"
call = "experiments.py:names"
plan = { nodes = 2 }
[[table]]
title = "Link"
stage = "link"
rows = ["backend", "operation"]
values = ["link_rate"]
"""


@pytest.mark.timeout(360)
@pytest.mark.xdist_group("measures")
def test_every_kind_of_stage_runs_on_emulated_hosts(tmp_path: Path, cli: Cli) -> None:
    folder = tmp_path / "all"
    folder.mkdir()
    (folder / "lab.toml").write_text(EVERYTHING)
    (folder / "answers.py").write_text(
        "def hosts(rows, others):\n    return f\"Hosts {rows[0].figures['hosts']}.\"\n"
    )
    (folder / "experiments.py").write_text(
        "import torch\n\n\n"
        "def names(rank):\n"
        "    hosts = rank.communicator.all_gather(torch.tensor(rank.communicator.host_index))\n"
        "    return [{'point': {}, 'hosts': [int(host) for host in hosts]}]\n"
    )
    done = cli("lab", "all", "--hosts", "2", "--link", "1gbit", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Hosts [0, 1]." in done.stdout.splitlines()
    assert "skipped" not in done.stdout
    report = (tmp_path / "runs" / "lab-all-2x1gbit" / "report" / "report.md").read_text()
    assert "| gloo | send_receive |" in report
    assert "all-reduce" in report, "its certificate"


class Alone:
    number = 0


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return None", "returned None on rank 0, not a list of rows"),
        ("return {'agree_s': 1}", "not a list of rows"),
        ("return [{'agree_s': object()}]", "which cannot be stored: Object of type object"),
    ],
)
def test_what_an_experiment_returns_must_be_rows(tmp_path: Path, body: str, said: str) -> None:
    path = tmp_path / "experiments.py"
    path.write_text(f"def agree(rank):\n    {body}\n")
    with pytest.raises(SynclineError, match=said):
        run_call(f"{path}:agree", Alone())
    path.write_text("def agree(rank):\n    return [{'agree_s': 1.5}]\n")
    assert run_call(f"{path}:agree", Alone()) == [{"agree_s": 1.5}]


def test_a_cell_follows_its_experiment_and_not_the_folder(agree: Path) -> None:
    def names(folder: Path) -> set[str]:
        _, study = load_study(str(folder))
        return {cell.name for stage in study.stage for cell in expand(study, stage, Ground(), quick=True)}

    before = names(agree)
    moved = shutil.copytree(agree, agree.parent / "moved" / "agree")
    assert names(moved) == before
    change(moved / "experiments.py", "(1, 1_000_000)", "(1, 1_000)")
    assert {name.partition("-")[0] for name in names(moved) - before} == {"agree"}


def test_a_single_file_takes_no_answers_beside_it_but_borrows_those_of_the_labs(agree: Path) -> None:
    single = agree / "single.toml"
    single.write_text((agree / "lab.toml").read_text().replace("pays-off", "bucketing"))
    with pytest.raises(PlanError, match="unknown answer 'small-agreement'"):
        load_study(str(single))
    change(single, "small-agreement", "what-travels")
    change(single, 'values = ["agree_s"]', 'values = ["agree_s", "means_apart"]')
    name, study = load_study(str(single))
    assert name == "single"
    assert study.answers().keys() == {"bucketing", "what-travels"}
    assert study.values()["means_apart"].label == "running means apart"


# What comes with Syncline.


def test_every_answer_of_a_lab_is_one_that_it_uses() -> None:
    for name in built_in_labs():
        _, study = load_study(name)
        assert load_answers(LABS / name).keys() <= study.answer_names, name


def test_every_file_of_a_lab_is_in_the_package() -> None:
    globs = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["syncline"]
    packed = {path for glob in globs for path in (ROOT / "syncline").glob(glob)}
    assert {path for path in LABS.rglob("*") if path.is_file() and path.suffix != ".pyc"} <= packed


@pytest.mark.parametrize(
    ("stage", "names"),
    [
        ("memory", ["memory-round=1-5a3c6a4d"]),
        ("epochs", ["epochs-batch_per_worker=4-method=data-parallel-round=1-0e30e5b4"]),
        ("weak", ["weak-batch_per_worker=4-workers=2-round=1-b19b3028"]),
        ("order", ["order-round=1-e0dc4c0f"]),
        ("travels", ["travels-round=1-fb57148a"]),
    ],
)
def test_cells_of_earlier_versions_are_found(tmp_path: Path, stage: str, names: list[str]) -> None:
    """Names as they were before labs were folders and thread-replicas had its name."""
    for name in names:
        (tmp_path / name).mkdir()
    _, study = load_study("hpml-dataparallel")
    (spec,) = [one for one in study.stage if one.name == stage]
    folders = {cell.folder_in(tmp_path).name for cell in expand(study, spec, Ground(), quick=True)}
    assert set(names) <= folders


def test_experiments_under_their_old_names_are_the_same(tmp_path: Path) -> None:
    text = blocks("toml")[0].replace("experiments.py:agree", "syncline.measure.travels:travels")
    (tmp_path / "old.toml").write_text(text.replace("pays-off", "fastest").replace("small-agreement", "scaling"))
    _, study = load_study(str(tmp_path / "old.toml"))
    call: Any = study.stage[1].call
    assert call == f"{LABS / 'hpml-dataparallel' / 'experiments.py'}:travels"
    assert call_identity(call) == "syncline.measure.travels:travels"
