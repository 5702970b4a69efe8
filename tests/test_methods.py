"""The table of methods, and the names that earlier versions gave some of them."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from conftest import Cli

from syncline.methods import BASELINE, CONTROL, IN_MEMORY, METHODS, OLD_NAMES, ON_LINKS, method_of
from syncline.plan import Plan, load_plan, parse_plan, stored_plan
from syncline.spans import read_log
from syncline.study.file import parse_study

OLD, NEW = "data-parallel", "thread-replicas"


def test_rows_of_roles_are_what_the_roles_need() -> None:
    assert METHODS[BASELINE].world == "worker"
    assert METHODS[IN_MEMORY].in_memory
    assert METHODS[ON_LINKS].overlaps({})
    assert not METHODS[ON_LINKS].one_host
    assert METHODS[CONTROL].takes_turns
    assert set(OLD_NAMES.values()) <= set(METHODS)
    assert not set(OLD_NAMES) & set(METHODS)


@pytest.mark.parametrize(
    ("name", "options", "overlaps"),
    [
        ("bucketed", {}, True),
        ("bucketed", {"overlap": False}, False),
        ("ddp", {}, True),
        ("mpi", {}, False),
        ("mpi", {"overlap": True}, True),
        ("all-reduce", {}, False),
        ("shared-memory", {}, False),
    ],
)
def test_row_says_whether_it_sends_during_backward(name: str, options: dict[str, bool], overlaps: bool) -> None:
    assert METHODS[name].overlaps(options) is overlaps


def test_labels_of_logs_lead_to_their_row() -> None:
    assert method_of("single, all cores") is METHODS["single"]
    assert method_of(OLD) is METHODS[NEW]
    assert method_of("somebody's own").name == "somebody's own"
    assert not method_of("somebody's own").alone


def test_table_is_read_without_torch() -> None:
    code = "import sys, syncline.methods, syncline.plan; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_old_name_works_and_says_so_where_it_is_typed(tmp_path: Path) -> None:
    plan_file = tmp_path / "plan.toml"
    plan_file.write_text(f'method = "{OLD}"\n')
    study = 'title = "t"\nquestion = "q"\nanswer = "fastest"\nanswer_stage = "a"\n'
    study += f'[[stage]]\nname = "a"\nmethods = ["ddp", "{OLD}"]\n[[table]]\ntitle = "x"\nstage = "a"\n'
    study += f'values = ["step"]\nwhere = {{ method = ["{OLD}"] }}\n'
    with pytest.warns(FutureWarning, match=f"method {OLD} is now called {NEW}; the old name still works"):
        assert load_plan(plan_file, {}).method == NEW
    with pytest.warns(FutureWarning, match=NEW):
        assert load_plan(None, {"method": OLD}).num_ranks == 1
    with pytest.warns(FutureWarning, match=NEW):
        read = parse_study(study, "lab.toml")
    assert read.stage[0].methods == ["ddp", NEW]
    assert read.table[0].where == {"method": [NEW]}


def test_what_earlier_versions_stored_is_read_in_silence(tmp_path: Path) -> None:
    plan_file, log = tmp_path / "plan.toml", tmp_path / "rank-0.jsonl"
    plan_file.write_text(f'method = "{OLD}"\nworkers = 3\n')
    records = [{"kind": "header"}, {"kind": "step", "step": 0, "method": OLD}, {"kind": "step", "method": "ddp"}]
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert stored_plan(plan_file) == Plan(method=NEW, workers=3, recipe="course"), "the recipe of those versions"
        assert parse_plan({"method": OLD, "workers": 3}) == Plan(method=NEW, workers=3)
        assert [record.get("method") for record in read_log(log)] == [None, NEW, "ddp"]


def test_command_line_says_in_one_line_that_a_name_is_old(cli: Cli) -> None:
    done = cli("train", "--model", "mlp", "--data", "synthetic", "--method", OLD, "--print-plan")
    assert done.returncode == 0, done.stderr
    assert f'method = "{NEW}"' in done.stdout
    assert done.stderr.splitlines() == [f"syncline: method {OLD} is now called {NEW}; the old name still works."]
