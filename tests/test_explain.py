"""`syncline explain`: run folders made by hand, whole and damaged, and a real run with a slow rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli
from event_logs import header, whole_step, write_log
from test_cli import SMALL, assert_refused, one_document

from syncline.accounting.breakdown import PARTS
from syncline.accounting.explanation import explain, explain_step
from syncline.errors import RunFolderError
from syncline.plan import Plan
from syncline.report.explained import show_explanation, show_step
from syncline.spans import FORMAT
from syncline.store import Run, create_run


def make_run(path: Path, methods: tuple[str, ...] = ("bucketed",), *, kind: str = "train", steps: int = 4) -> Run:
    """Two ranks of one host; every step takes 40 ms; `single` is rank 0 alone."""
    run = create_run(path, kind=kind, plan=Plan(model="mlp", workers=2, method="bucketed"), label="x")
    for rank in range(2):
        lines = [header(rank, 2)]
        for number in range(steps):
            for turn, method in enumerate(methods):
                if rank == 0 or not method.startswith("single"):
                    lines += whole_step(number, 100.0 * (number * len(methods) + turn), method)
        write_log(path, rank, lines)
    run.set_status("finished")
    return Run(path)


def test_parts_of_a_training_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = explain(make_run(tmp_path / "run"))
    (method,) = found.methods
    assert (method.method, method.breakdown.steps, found.warmup) == ("bucketed", 3, 1)
    expected = {"forward": 0.01, "backward": 0.019, "wire": 0.005, "pack": 0.001, "update": 0.003, "other": 0.002}
    assert method.breakdown.parts_s == pytest.approx({part: expected.get(part, 0.0) for part in PARTS})
    assert (found.problems, found.notes, found.hosts) == ([], [], 1)
    assert found.verdict == method.verdict
    document = found.as_document()
    assert json.loads(json.dumps(document))["methods"][0]["breakdown"]["parts_s"] == method.breakdown.parts_s
    show_explanation(found)
    shown = capsys.readouterr().out
    assert "train, mlp, 2 workers, bucketed" in shown
    assert [word for word in ("rank 0", "rank 1", "mean", "share", "47.5%", "12.5%") if word not in shown] == []


def test_comparison_has_every_method_and_one_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", ("single", "single, all cores", "ddp", "bucketed"), kind="compare")
    found = explain(run)
    assert [one.method for one in found.methods] == ["single", "single, all cores", "ddp", "bucketed"]
    assert [len(one.breakdown.ranks) for one in found.methods] == [1, 1, 2, 2]
    assert "no difference" in found.verdict
    assert "one worker" in found.methods[0].verdict
    show_explanation(found)
    assert "single, all cores" in capsys.readouterr().out
    assert [one.method for one in explain(run, method="ddp").methods] == ["ddp"]
    with pytest.raises(RunFolderError, match=r"no steps of method 'ring'.*single, single, all cores, ddp, bucketed"):
        explain(run, method="ring")


def test_comparison_says_where_the_difference_lies(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ("ddp", "bucketed"), kind="compare")
    for rank in range(2):
        path = run.folder.events(rank)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if line.get("method") == "ddp" and (line["kind"] == "step" or line.get("name") == "update"):
                line["end"] += 30_000_000
        write_log(run.path, rank, lines)
    text = explain(run).verdict
    assert text.startswith("bucketed is quickest, ddp slowest, 1.75 times as long step by step; ")
    assert "the largest part of that is update, 30.0 ms more" in text


def test_one_step_rank_by_rank_and_bucket_by_bucket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    found = explain_step(run, 2)
    assert [one.rank for one in found.ranks] == [0, 1]
    for one in found.ranks:
        assert sum(one.parts_s.values()) == pytest.approx(one.step_s)
        (bucket,) = one.buckets
        assert (bucket.label, bucket.ready_s, bucket.end_s) == ("bucket 0", pytest.approx(0.03), pytest.approx(0.035))
        assert bucket.wire_s == pytest.approx(0.005)
    show_step(found)
    assert "bucket 0" in capsys.readouterr().out
    with pytest.raises(RunFolderError, match=r"no finished step 9.*0 to 3"):
        explain_step(run, 9)
    with pytest.raises(RunFolderError, match=r"several methods.*with --method: ddp, bucketed"):
        explain_step(make_run(tmp_path / "other", ("ddp", "bucketed"), kind="compare"), 1)


def test_crashed_run_shows_what_it_did(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.folder.set_status("failed")
    write_log(
        run.path, 1, [header(1, 2, format=FORMAT + 1), *whole_step(0), *whole_step(1, 100), *whole_step(2, 200)[:2]]
    )
    found = explain(run)
    assert found.methods[0].breakdown.steps == 1
    assert any("failed" in note for note in found.notes)
    assert any("newer version" in problem for problem in found.problems)
    assert any("ends in step 2, after backward" in problem for problem in found.problems)
    half = explain_step(run, 3)
    assert ([one.rank for one in half.ranks], half.missing) == ([0], [1])


def test_run_with_nothing_but_warm_up_is_shown_and_said(tmp_path: Path) -> None:
    found = explain(make_run(tmp_path / "run", steps=1))
    assert found.methods[0].breakdown.steps == 1
    assert found.notes == ["All steps of bucketed are warm-up steps; they are counted anyway."]


def test_run_without_a_finished_step_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=0)
    with pytest.raises(RunFolderError, match="hold no step"):
        explain(run)


def test_hosts_with_their_own_clocks_state_the_interval(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    exchange = {"kind": "clock", "at": 0, "offset": 0, "interval": 250_000, "step": -1}
    lines = [line for number in range(4) for line in whole_step(number, 100.0 * number)]
    write_log(run.path, 1, [header(1, 2, host=1, clock="other"), exchange, *lines])
    found = explain(run)
    assert found.hosts == 2
    assert found.notes == ["Pings compared the clocks of 2 hosts to within ±250 µs."]


def test_words_of_the_command_line(cli: Cli, tmp_path: Path) -> None:
    assert_refused(cli("explain"), "there is no run")
    make_run(tmp_path / "work" / "runs" / "mine")
    create_run(tmp_path / "work" / "runs" / "probed", kind="probe", plan=Plan(), label="x")  # has no steps
    document = one_document(cli("explain", "--json"))
    assert [one["method"] for one in document["methods"]] == ["bucketed"]
    shown = cli("explain", "runs/mine")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "A step of bucketed on 2 workers takes 40.0 ms" in shown.stdout
    assert_refused(cli("explain", "--step", 17), "no finished step 17", "0 to 3")
    (tmp_path / "work" / "runs" / "mine" / "events" / "rank-0.jsonl").unlink()
    (tmp_path / "work" / "runs" / "mine" / "events" / "rank-1.jsonl").write_text("")
    assert_refused(cli("explain"), "rank-1.jsonl is empty")


@pytest.mark.xdist_group("measures")
def test_injected_delay_is_found_in_a_real_run(cli: Cli) -> None:
    """200 ms in one rank's backward, and the parts of every step add up."""
    setting = ("--set", "inject.rank=1", "--set", "inject.delay_ms=200")
    run = ("--run-dir", "slow", "--workers", 2, "--steps", 6, "--global-batch", 16, "--method", "all-reduce")
    trained = cli("train", *SMALL, *setting, *run)
    assert trained.returncode == 0, trained.stderr
    document: dict[str, Any] = one_document(cli("explain", "slow", "--json"))
    (method,) = document["methods"]
    (found,) = method["stragglers"]
    assert (found["rank"], found["phase"], found["late_steps"], found["steps"]) == (1, "backward", 5, 5)
    assert found["late_s"] == pytest.approx(0.2, rel=0.5)
    assert found["waited_share"] > 0.3
    assert "Rank 1 is late in backward" in method["verdict"]
    assert any("slows rank 1 down on purpose" in note for note in document["notes"])
    for rank in method["breakdown"]["ranks"]:
        assert sum(rank["parts_s"].values()) == pytest.approx(rank["step_s"])
