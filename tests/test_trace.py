"""The Chrome trace keeps to the format: keys, times, names, and slices that lie inside each other or apart."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli

from syncline.accounting.explanation import explain
from syncline.cli.reading import trace
from syncline.errors import PlanError
from syncline.events import Events, Phase, RankInfo, RankStep, Step, Steps, Transfer
from syncline.report.chrome_trace import chrome_trace
from syncline.report.explained import show_explanation
from syncline.store import Run, RunFolder

REQUIRED = {"X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}, "M": {"name", "ph", "pid", "tid", "args"}}
METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def assert_valid(document: dict[str, Any]) -> None:
    """The rules of the Trace Event Format for the events that we write."""
    assert json.loads(json.dumps(document)) == document
    named, tracks = set(), defaultdict(list)
    for event in document["traceEvents"]:
        assert event["ph"] in REQUIRED
        assert set(event) == REQUIRED[event["ph"]]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in METADATA
            named.add((event["name"], event["pid"], event["tid"]))
        else:
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert isinstance(event["ts"], int), "fractions do not add up, and slices would reach out of others"
            assert isinstance(event["dur"], int)
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for (rank, track), spans in tracks.items():
        assert ("process_name", rank, 0) in named
        assert ("thread_name", rank, track) in named
        assert_nested(spans)


def assert_nested(spans: list[tuple[int, int]]) -> None:
    open_until: list[int] = []
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_until and open_until[-1] <= start:
            open_until.pop()
        assert not open_until or end <= open_until[-1], "a slice reaches out of the one that it is in"
        open_until.append(end)


def test_the_check_of_nesting_can_fail() -> None:
    assert_nested([(0, 10), (0, 5), (5, 10), (12, 13)])
    with pytest.raises(AssertionError, match="reaches out"):
        assert_nested([(0, 10), (5, 11)])


def logged() -> Events:
    """Rank 1 is ready 2 µs late for bucket 0; bucket 1 starts while bucket 0 is still in flight."""
    steps = []
    for number in range(3):
        ranks = {}
        for rank in range(2):
            start = 100_000 * number + 50_000
            phases = (Phase("forward", start, start + 3000), Phase("backward", start + 3000, start + 9000))
            ready = start + 4000 + 2000 * rank
            first = Transfer("all_reduce", "bucket 0", 400, ready, ready + 1000, start + 9000)
            second = Transfer("all_reduce", "bucket 1", 800, start + 7000, start + 7000, start + 10_000)
            ranks[rank] = RankStep(rank, start, start + 12_000, phases, (first, second))
        steps.append(Step(number, 0, ranks))
    return Events(2, {0: RankInfo(0), 1: RankInfo(1)}, {"bucketed": Steps.of(steps)}, {}, {}, [])


def slices(document: dict[str, Any], rank: int, category: str) -> list[tuple[str, float, float, int]]:
    return [
        (event["name"], event["ts"], event["dur"], event["tid"])
        for event in document["traceEvents"]
        if event["ph"] == "X" and event["pid"] == rank and event["cat"] == category
    ]


def test_compute_and_communication_have_tracks_and_waits_are_seen() -> None:
    document = chrome_trace(logged(), "bucketed")
    assert_valid(document)
    assert slices(document, 0, "step") == [("step 0", 0, 12, 0), ("step 1", 100, 12, 0), ("step 2", 200, 12, 0)]
    assert slices(document, 0, "phase")[:2] == [("forward", 0, 3, 0), ("backward", 3, 6, 0)]
    assert slices(document, 0, "operation")[:2] == [
        ("all_reduce bucket 0", 5, 4, 1),
        ("all_reduce bucket 1", 7, 3, 2),
    ]
    assert slices(document, 0, "wait")[:1] == [("wait for rank 1", 5, 1, 1)]
    assert slices(document, 0, "wire")[:1] == [("wire", 6, 3, 1)]
    assert slices(document, 1, "wait") == []
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in document["traceEvents"]
             if event["name"] == "thread_name"}  # fmt: skip
    assert [names[0, track] for track in range(3)] == ["compute", "communication", "communication 2"]
    args = next(event["args"] for event in document["traceEvents"] if event.get("cat") == "operation")
    assert (args["bytes"], args["label"], args["waits_for_rank"]) == (400, "bucket 0", 1)


def test_only_the_steps_that_were_asked_for() -> None:
    document = chrome_trace(logged(), "bucketed", first=1, last=1)
    assert_valid(document)
    assert slices(document, 1, "step") == [("step 1", 0, 12, 0)]
    assert chrome_trace(logged(), "ddp")["traceEvents"] == []


def crossing() -> Events:
    """Bucket 1 of a step travels on until 6 µs into the next one, whose forward waits for it from 4 µs on."""
    steps = []
    for number in range(2):
        start = 20_000 * number
        sent = Transfer("all_reduce", "bucket 1", 800, start + 12_000, start + 15_000, start + 26_000)
        before = (replace(sent, start=start - 5000, end=start + 6000),) if number else ()
        stalls = (Phase("bucket 1", start + 4000, start + 6000),) if number else ()
        phases = (Phase("forward", start, start + 9000), Phase("backward", start + 9000, start + 19_000))
        own = RankStep(0, start, start + 20_000, phases, (sent,), carried=before, stalls=stalls)
        steps.append(Step(number, 0, {0: own}))
    return Events(1, {0: RankInfo(0)}, {"ahead": Steps.of(steps)}, {}, {}, [])


def test_transfer_that_crosses_the_end_of_its_step_is_drawn_once_and_whole() -> None:
    document = chrome_trace(crossing(), "ahead")
    assert_valid(document)
    assert slices(document, 0, "operation") == [
        ("all_reduce bucket 1", 15, 11, 1),
        ("all_reduce bucket 1", 35, 11, 1),
    ]
    assert slices(document, 0, "stall") == [("wait for bucket 1", 24, 2, 0)]


def test_what_came_over_from_a_step_that_is_not_shown_is_drawn_from_the_first_that_is() -> None:
    document = chrome_trace(crossing(), "ahead", first=1)
    assert_valid(document)
    assert slices(document, 0, "operation") == [("all_reduce bucket 1", 0, 6, 1), ("all_reduce bucket 1", 15, 11, 1)]
    of_step = [event["args"]["step"] for event in document["traceEvents"] if event.get("cat") == "operation"]
    assert of_step == [0, 1]


@pytest.mark.parametrize("method", ["point-to-point", "shared-memory"])
def test_trace_and_resources_of_a_real_run(
    method: str, cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--model", "mlp", "--data", "synthetic", "--steps", 3, "--set", "evaluate=false", "--method", method)
    assert cli("train", *arguments, "--run-dir", "run").returncode == 0
    run, written = RunFolder(tmp_path / "work" / "run"), tmp_path / "mine.json"
    trace(run.path, written, None, "1:2")
    assert capsys.readouterr().out.startswith(f"2 steps of {method} in {written}")
    document = json.loads(written.read_text())
    assert_valid(document)
    for rank in range(2):
        assert [name for name, *_ in slices(document, rank, "step")] == ["step 1", "step 2"]
        assert {"forward", "backward", "sync", "update"} <= {name for name, *_ in slices(document, rank, "phase")}
        assert slices(document, rank, "wire")
    with pytest.raises(PlanError, match="no finished step"):
        trace(run.path, tmp_path / "other.json", None, "7")
    with pytest.raises(PlanError, match="no steps of 'ring'"):
        trace(run.path, tmp_path / "other.json", "ring", None)
    assert not (tmp_path / "other.json").exists()

    found = explain(Run(run.path))
    assert found.methods[0].bandwidth is not None
    assert [one.agrees for one in found.methods[0].bandwidth.ranks] == [True, True]
    assert [one.peak_resident_bytes > 0 for one in found.methods[0].memory] == [True, True]
    show_explanation(found)
    shown = capsys.readouterr().out
    assert [word for word in ("bytes a step", "of the link", "peak resident") if word not in shown] == []
    assert "WARNING" not in shown
