"""`syncline explain`: run folders made by hand, whole and damaged, and a real run with a slow rank."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli
from event_logs import Line, header, phase, span, transfer, whole_step, write_log
from test_cli import SMALL, assert_refused, one_document

from syncline.accounting import selection
from syncline.accounting.breakdown import PARTS
from syncline.accounting.explanation import explain, explain_step
from syncline.block_file import BlockFile
from syncline.errors import RunFolderError
from syncline.plan import Plan, parse_plan
from syncline.report.explained import show_explanation, show_step
from syncline.report.terminal import prediction_text
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
    assert found.verdict == f"Measured with only 3 timed steps: {method.verdict}"
    document = found.as_document()
    assert json.loads(json.dumps(document))["methods"][0]["breakdown"]["parts_s"] == method.breakdown.parts_s
    show_explanation(found)
    shown = capsys.readouterr().out
    assert "train, mlp, 2 workers, bucketed" in shown
    assert [word for word in ("rank 0", "rank 1", "mean", "share", "47.5%", "12.5%") if word not in shown] == []


def test_what_a_method_predicted_is_shown_beside_what_later_steps_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", steps=8)
    for rank in range(2):
        with (run.path / "events" / f"rank-{rank}.jsonl").open("a") as file:
            for step, planned_s in ((3, 0.010), (5, 0.032)):
                times = {"step_s": planned_s, "ahead_s": planned_s, "barrier_s": 0.06, "bound_s": 0.03}
                about = {"kind": "prediction", "step": step, "method": "bucketed", "waits": False}
                file.write(json.dumps({**about, **times}) + "\n")
    found = explain(Run(run.path))
    assert found.methods[0].predicted is not None
    assert found.methods[0].predicted["measured_s"] == pytest.approx(0.040)
    show_explanation(found)
    shown = " ".join(capsys.readouterr().out.split())
    assert "bucketed: predicted 32.0 ms a step, measured 40.0 ms (+25%); 60.0 ms if it waited" in shown
    assert "at least 30.0 ms" in shown


def test_prediction_says_why_it_waits_and_what_was_not_measured() -> None:
    times = {"step_s": 0.24, "ahead_s": 0.238, "barrier_s": 0.24, "bound_s": 0.23}
    assert prediction_text({**times, "waits": True, "measured_s": None}) == (
        "predicted 240 ms a step; it waits at the end of each backward, since going on gains too little (238 ms)."
    )


def test_comparison_has_every_method_and_one_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", ("single", "single, all cores", "ddp", "bucketed"), kind="compare")
    found = explain(run)
    assert [one.method for one in found.methods] == ["single", "single, all cores", "ddp", "bucketed"]
    assert [len(one.breakdown.ranks) for one in found.methods] == [1, 1, 2, 2]
    assert "No difference between ddp and bucketed" in found.verdict
    assert "one worker" in found.methods[0].verdict
    show_explanation(found)
    shown = capsys.readouterr().out
    assert "single, all cores" in shown
    shares = next(lines[1] for lines in pairwise(shown.splitlines()) if lines[0].startswith(" ddp "))
    assert shares.split() == ["100%", "25%", "48%", "2%", "12%", "8%", "5%", "(0%)"]
    assert [one.method for one in explain(run, method="ddp").methods] == ["ddp"]
    with pytest.raises(RunFolderError, match=r"no steps of method 'ring'.*single, single, all cores, ddp, bucketed"):
        explain(run, method="ring")


def test_comparison_says_where_the_difference_lies(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ("ddp", "bucketed"), kind="compare")
    for rank in range(2):
        path = run.path / "events" / f"rank-{rank}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if line.get("method") == "ddp" and (line["kind"] == "step" or line.get("name") == "update"):
                line["end"] += 30_000_000
        write_log(run.path, rank, lines)
    text = explain(run).verdict
    said = "bucketed is fastest; ddp takes 1.75 ±0.00 times as long as bucketed; "
    assert text.startswith(f"Measured with only 3 timed steps: {said}")
    assert "the largest part of that is update, 30.0 ms more" in text


def test_an_overloaded_comparison_is_not_judged(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ("ddp", "bucketed"), kind="compare", steps=8)
    rows = [{"label": name, "seconds": [1.0] * 7, "other_load": 0.8} for name in ("ddp", "bucketed")]
    run.folder.write_summary({"rows": rows, "marks": []})
    assert explain(run).verdict.startswith("No answer: other programs took 80% of the cores' time")
    one = explain(run, method="ddp").verdict
    assert one.startswith(
        "Measured with other programs on 80% of the cores: A step of ddp on 2 workers takes 40.0 ms"
    )


def test_who_is_fastest_is_decided_by_what_the_comparison_noted(tmp_path: Path) -> None:
    """A turn of several steps is not its steps added up."""
    run = make_run(tmp_path / "run", ("ddp", "bucketed"), kind="compare", steps=8)
    rows = [{"label": "ddp", "seconds": [2.0] * 7}, {"label": "bucketed", "seconds": [1.0] * 7}]
    run.folder.write_summary({"rows": rows, "marks": []})
    assert explain(run).verdict.startswith("bucketed is fastest; ddp takes 2.00 ±0.00 times as long as bucketed")


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


def made_records(rank: int, steps: int) -> list[Line]:
    """Steps with three buckets, some noise, an outlier, counters and losses; rank 1 has another clock."""
    rng, now, lines = random.Random(rank), 0.0, []
    for number in range(steps):
        start = now
        lines.append(phase("forward", number, now + rng.random(), now + 10))
        for bucket in range(3):
            ready = now + 12 + 6 * bucket + rng.random()
            lines.append(span("pack", number, ready - 0.2, ready, label=f"bucket {bucket}", busy=150_000))
            lines.append(transfer(f"bucket {bucket}", number, ready, ready + 0.1, ready + 5 + 4 * rng.random()))
        lines.append(phase("backward", number, now + 10, now + 30))
        lines.append(phase("sync", number, now + 30, now + 36))
        now += 40 + 300 * (number == 7) + rng.random()
        lines.append(phase("update", number, start + 36, now - 1))
        counted = {"sent": 10_000 + number, "received": 9_000, "interface_sent": 1, "interface_received": 2}
        lines.append({"kind": "counter", **counted, "step": number, "method": "bucketed"})
        lines.append(span("step", number, start, now))
        lines.append({"kind": "loss", "value": 1 / (number + 1), "samples": 32, "step": number, "method": "bucketed"})
    return lines


def made_run(path: Path, steps: int, *, as_lines: bool) -> Run:
    plan = parse_plan({"method": "bucketed", "workers": 2, "model": "mlp", "measure": {"warmup": 1}})
    folder = create_run(path, kind="train", plan=plan, label="x")
    folder.write_summary({})
    folder.set_status("finished")
    for rank in range(2):
        clock = {"kind": "clock", "at": 0, "offset": 2_000_000, "interval": 5, "step": -1}
        lines = [header(rank, 2, clock=str(rank)), *([clock] if rank else []), *made_records(rank, steps)]
        if as_lines:
            write_log(path, rank, lines)
        else:
            file = BlockFile(folder.events(rank))
            for first in range(0, len(lines), 70):  # some blocks, and a tail
                file.write(lines[first : first + 70])
    return Run(path)


def test_a_log_of_an_earlier_version_gives_the_same_numbers(tmp_path: Path) -> None:
    old, new = (made_run(tmp_path / str(as_lines), 300, as_lines=as_lines) for as_lines in (True, False))
    documents = [explain(run).as_document() for run in (old, new)]
    for document in documents:
        assert document.pop("run")
    assert documents[0] == documents[1]
    (method,) = documents[0]["methods"]
    assert (method["breakdown"]["steps"], method["outliers"][0]["steps"]) == (298, [7])
    assert explain_step(old, 9).ranks == explain_step(new, 9).ranks
    assert old.table().equals(new.table())
    assert old.losses().equals(new.losses())


def test_of_a_long_run_stretches_are_taken_apart_and_every_outlier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made_run(tmp_path / "run", 300, as_lines=False)
    (whole,) = explain(run).methods
    monkeypatch.setattr(selection, "MOST", 80)
    monkeypatch.setattr(selection, "STRETCH", 20)
    found = explain(Run(run.path))
    (part,) = found.methods
    assert part.breakdown.steps in (79, 80)
    assert part.outliers == whole.outliers
    assert part.breakdown.parts_s == pytest.approx(whole.breakdown.parts_s, rel=0.1, abs=6e-4)
    assert found.notes[0].startswith("Of 299 steps, which took 41.")
    assert "80 are taken apart: stretches of 20, spread over the run." in found.notes[0]
