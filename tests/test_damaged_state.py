"""Damaged or foreign run folders: our errors, never a traceback, and nothing that acts on a terminal or page."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from event_logs import header, whole_step, write_log
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from syncline import files, running, store
from syncline.cli import main
from syncline.errors import PlanError, RankFailed, RunFolderError, SynclineError, UsageError
from syncline.events import read_events
from syncline.measure.comparison import compare_rows, contenders
from syncline.plan import Plan, load_plan, parse_plan
from syncline.running import keeping, write_result
from syncline.store import WORDLESS, RunFolder, create_run, list_runs, load_run
from syncline.study.file import Study, load_study
from syncline.study.rows import Row
from syncline.study.values import VALUES
from syncline.units import format_count, printable
from syncline.workload.models import usual_task

PLAN = Plan(model="mlp", data="synthetic", workers=2, threads=1, steps=3, method="bucketed")
FUZZED = settings(
    max_examples=25, deadline=None, derandomize=True, report_multiple_bugs=False, phases=(Phase.generate,),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
TIMING = {"median_s": 0.1, "mean_s": 0.1, "spread_s": 0.01, "counted": 2, "warmup": 1}
SUMMARY: dict[str, Any] = {
    "link": None, "method": "bucketed", "workers": 2, "threads": 1, "compute": "real", "data": "Made.", "steps": 3,
    "train_samples": 100, "step": TIMING, "images_per_s": 20.0, "seconds": [0.1, 0.1], "marks": [], "other_load": 0.0,
    "losses": [{"step": 2, "loss": 2.0, "by_rank": [2.0, 2.0]}],
    "epochs": [{"epoch": 0, "train_loss": 2.0, "train_accuracy": 0.1, "train_per_rank": [{"loss": 2.0}]}],
}  # fmt: skip
COMPARED: dict[str, Any] = {
    "workers": 2, "global_batch": 256, "marks": [],
    "rows": [{"label": "bucketed", "method": "bucketed", "workers": 2, "threads": 1, "step": TIMING, "loss": 2.0,
              "seconds": [0.1, 0.1], "images_per_s": 9.0, "train_samples": 100, "other_load": 0.0}],
}  # fmt: skip
WEIRD = [
    None,
    True,
    -1,
    0,
    1e308,
    float("inf"),
    float("nan"),
    10**30,
    "",
    "x" * 300,
    [],
    {},
    [None],
    {"a": 1},
    "\x1b[31m",
]


def make(path: Path, kind: str = "train", summary: dict[str, Any] = SUMMARY, method: str = "bucketed") -> RunFolder:
    run = create_run(path, kind=kind, plan=PLAN, label="x")
    run.write_summary(summary)
    for rank in (0, 1):
        write_log(
            path,
            rank,
            [header(rank, 2), *(record for step in range(3) for record in whole_step(step, step * 1000, method))],
        )
    run.set_status("finished")
    return run


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Exit code of a verb. Any other end of it is a failure of the test."""
    monkeypatch.setattr(sys, "argv", ["syncline", *map(str, arguments)])
    try:
        main()
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inner:
        yield (*at, key)
        yield from places(below, (*at, key))


@st.composite
def damaged(draw: st.DrawFn, text: str, *, is_json: bool) -> bytes:
    """The text with bytes lost or changed; or, where it is JSON, with a value of another kind or none."""
    content = text.encode()
    if is_json and draw(st.booleans()):
        document = json.loads(text)
        *way, last = draw(st.sampled_from(list(places(document))))
        holder = document
        for key in way:
            holder = holder[key]
        if draw(st.booleans()):
            holder[last] = draw(st.sampled_from(WEIRD))
        else:
            del holder[last]
        return json.dumps(document).encode()
    start = draw(st.integers(0, len(content) - 1))
    stop = draw(st.sampled_from([start, start + 1, len(content)]))
    return content[:start] + draw(st.binary(max_size=6)) + content[stop:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "runs"
    make(folder / "trained")
    make(folder / "compared", "compare", COMPARED)
    return folder


@FUZZED
@given(data=st.data())
def test_damaged_run_folder_ends_no_verb_in_a_traceback_and_hides_no_other_run(
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    data: st.DataObject,
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.rmtree("runs", ignore_errors=True)
    shutil.copytree(runs, "runs")
    shutil.copytree(runs / "trained", "runs/good")
    run = Path("runs", data.draw(st.sampled_from(["trained", "compared"])))
    name = data.draw(
        st.sampled_from(["run.json", "summary.json", "machine.json", "plan.toml", "events/rank-1.jsonl"])
    )
    before = (run / name).read_text()
    if name.endswith(".jsonl"):
        lines = before.encode().splitlines()
        number = data.draw(st.integers(0, len(lines) - 1))
        lines[number] = data.draw(damaged(lines[number].decode(), is_json=True))
        (run / name).write_bytes(b"\n".join(lines))
    else:
        (run / name).write_bytes(data.draw(damaged(before, is_json=name.endswith(".json"))))
    drawn = [["report", run, "runs/good"]] if data.draw(st.integers(0, 11)) == 0 else []
    for verb in (["runs"], ["explain", run], ["trace", run], *drawn):
        assert call(monkeypatch, *verb) in (0, 1, 2)
        shown = capsys.readouterr()
        assert "\x1b[31m" not in shown.out + shown.err
        if verb == ["runs"]:
            assert "runs/good" in shown.out


def test_damaged_run_is_named_beside_the_others(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(runs, "runs")
    Path("runs/trained/plan.toml").write_text("workers = 0")
    assert call(monkeypatch, "runs") == 0
    shown = capsys.readouterr()
    assert "runs/compared" in shown.out
    assert "runs/trained" not in shown.out
    assert "left out: runs/trained/plan.toml: workers" in shown.err


def test_pipe_in_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    run = make(tmp_path / "a")
    (run.path / "summary.json").unlink()
    os.mkfifo(run.path / "summary.json")
    with pytest.raises(RunFolderError, match="not a regular file"):
        run.summary()
    (run.path / "events/rank-1.jsonl").unlink()
    os.mkfifo(run.path / "events/rank-1.jsonl")
    assert "rank-1.jsonl cannot be read: it is not a regular file" in read_events(run.path).problems
    os.mkfifo(run.path / ".lock")
    run.set_status("running")
    assert run.status() == WORDLESS


def test_text_that_acts_on_a_terminal_is_shown_as_its_code(tmp_path: Path) -> None:
    make(tmp_path / "a", summary={**SUMMARY, "data": "\x1b[2J\u202egnp", "marks": ["link: \x07slow"]})
    run = load_run(tmp_path / "a")
    assert run.summary["data"] == r"\x1b[2J\u202egnp"
    assert run.summary["marks"] == [r"link: \x07slow"]
    assert printable("Größe ±3 %") == "Größe ±3 %"
    assert printable("\ud800") == r"\ud800"


# How a run ended.


def test_run_whose_launcher_was_killed_ended_without_a_word(tmp_path: Path) -> None:
    run = create_run(tmp_path / "a", kind="train", plan=PLAN, label="x")
    with (run.path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run.status() == "running"
        assert load_run(run.path).status == "running"
    assert run.status() == WORDLESS
    with keeping(run, resumed=True):
        assert run.status() == "running"
    assert run.status() == "finished"


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_full_disk_hides_neither_which_rank_failed_nor_that_the_run_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create_run(tmp_path / "a", kind="train", plan=PLAN, label="x")
    (run.checkpoints / ".step-00000003.part").mkdir(parents=True)
    monkeypatch.setattr(store, "write_atomic", full)
    with pytest.raises(RankFailed, match="rank 1"), keeping(run):
        raise RankFailed("no space", rank=1)
    assert run.status() == "failed"
    assert not list(run.checkpoints.iterdir())


def test_status_that_cannot_be_written_at_all_is_a_warning_beside_the_real_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create_run(tmp_path / "a", kind="train", plan=PLAN, label="x")
    monkeypatch.setattr(RunFolder, "set_status", full)
    with pytest.warns(UserWarning, match="No space left"), pytest.raises(RankFailed, match="rank 1"), keeping(run):
        raise RankFailed("no space", rank=1)


def test_result_that_cannot_be_written_is_said_and_the_run_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create_run(tmp_path / "a", kind="train", plan=PLAN, label="x")
    monkeypatch.setattr(store, "write_atomic", full)
    with pytest.raises(SynclineError, match=r"No space left.*--resume") as caught, keeping(run):
        write_result(run, PLAN, {})
    assert not isinstance(caught.value, UsageError)  # which would discard the run
    assert run.status() == "failed"


@pytest.mark.parametrize("begun", [True, False])
def test_what_is_wrong_after_a_restart_costs_no_checkpoint(begun: bool, tmp_path: Path) -> None:
    run = create_run(tmp_path / "a", kind="train", plan=PLAN, label="x")
    if begun:
        (run.checkpoints / "step-00000002").mkdir(parents=True)
        (run.checkpoints / "step-00000002" / "checkpoint.json").touch()
    with pytest.raises(UsageError), keeping(run):
        raise UsageError("the cluster has no room for 2 workers.")
    assert run.path.exists() == begun
    if begun:
        assert run.status() == "failed"


def test_glance_at_a_lock_does_not_stop_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = create_run(tmp_path / "a", kind="train", plan=PLAN, label="x")
    with (run.path / ".lock").open("w") as glance:
        fcntl.flock(glance, fcntl.LOCK_SH)
        monkeypatch.setattr(store.time, "sleep", lambda _: fcntl.flock(glance, fcntl.LOCK_UN))
        with run.locked():
            assert files.is_locked(run.path / ".lock")
    assert running.keeping is keeping


# Plans and studies.

ODD_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**400), 10**400), st.floats(), st.text(max_size=300),
    st.lists(st.integers(), max_size=3), st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)  # fmt: skip
KEYS = sorted(Plan.model_fields)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(KEYS), ODD_VALUES, max_size=4))
def test_any_plan_is_taken_or_refused_with_one_of_our_errors(values: dict[str, Any]) -> None:
    try:
        plan = parse_plan(values)
    except PlanError:
        return
    assert parse_plan({"recipe": "course", **plan.model_dump(exclude_none=True)}) == plan


@settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_study_is_taken_or_refused_with_one_of_our_errors(tmp_path: Path, data: st.DataObject) -> None:
    text = (Path(sys.modules[Study.__module__].__file__ or "").parents[1] / "labs/cs744/lab.toml").read_text()
    lines = text.splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        number = data.draw(st.integers(0, len(lines) - 1))
        key, equals, _ = lines[number].partition(" = ")
        odd = data.draw(st.sampled_from(["inf", "-1", '"x"', "[]", "{}", "9" * 30, "true", '""', "nan", "1e400"]))
        lines[number] = f"{key} = {odd}" if equals and data.draw(st.booleans()) else data.draw(st.text(max_size=20))
    path = tmp_path / "lab.toml"
    path.write_bytes("\n".join(lines).encode(errors="surrogatepass"))
    with contextlib.suppress(SynclineError):
        load_study(str(path))


def test_runs_are_listed_although_one_is_a_pipe(tmp_path: Path) -> None:
    make(tmp_path / "good")
    (tmp_path / "odd").mkdir()
    os.mkfifo(tmp_path / "odd" / "run.json")
    assert [run.path.name for run in list_runs(tmp_path)] == ["good"]


def test_text_of_a_foreign_run_does_nothing_in_markdown_or_in_the_pages_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = "<script>alert(1)</script><!-- ![x](http://127.0.0.1/x.png) |"
    row = {**COMPARED["rows"][0], "label": evil}
    make(tmp_path / "a", "compare", {**COMPARED, "rows": [row], "marks": [f"link: {evil}"]}, evil)
    assert call(monkeypatch, "report", tmp_path / "a", "-o", tmp_path / "report") == 0
    page, text = ((tmp_path / "report" / name).read_text() for name in ("index.html", "report.md"))
    assert "alert(1)" in page
    assert "alert(1)" in text
    for shown in (page, text):
        assert "<script>alert" not in shown
    assert "![x](" not in text
    block = page.partition('id="plots">')[2].partition("</script>")[0]
    assert "<" not in block
    assert "alert(1)" in json.dumps(json.loads(block))


# Figures that were wrong, and values that crashed later.


def test_slow_rates_are_not_printed_as_zero() -> None:
    assert [format_count(rate) for rate in (13523.4, 10.2, 3.14, 0.042)] == ["13523", "10", "3.1", "0.042"]


def test_batch_larger_than_the_data_counts_the_data() -> None:
    rows = [
        Row("s", {"global_batch": 256, "workers": 2}, [0.5], {"train_samples": samples}) for samples in (64, 10_000)
    ]
    assert [VALUES["throughput"].read(row, rows).value for row in rows] == [128, 512]  # type: ignore[union-attr]
    plan = PLAN.replace(global_batch=256)
    (compared,) = compare_rows(
        plan, contenders(["ddp"], threads=1, cores=2), [[0.5] * 9], [1.0], usual_task("cnn"), 64
    )
    assert compared["images_per_s"] == 128


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("deadline_s", float("inf")), ("deadline_s", 1e300), ("deadline_s", float("nan")), ("workers", 10**12),
        ("global_batch", 10**400), ("steps", 10**30), ("data_dir", "x" * 300), ("model", "mine:" + "N" * 300),
        ("inject.delay_ms", float("inf")), ("optimizer.learning_rate", float("inf")), ("threads", 10**9),
        ("options.bucket_cap_mb", 1e308), ("recipe", []), ("optimizer.betas", [float("nan"), 0.9]),
    ],
)  # fmt: skip
def test_values_that_no_run_can_use_are_refused_by_the_plan(key: str, value: object) -> None:
    with pytest.raises(PlanError, match=key.replace(".", r"\.")):
        load_plan(None, {key: value})


def test_name_that_no_file_system_takes_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "explain", "x" * 300) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_second_ctrl_c_at_the_end_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)

    def interrupted_again() -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("syncline.cli.app.app", interrupted_again)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: bool(signal.raise_signal(signal.SIGINT)))
    try:
        with pytest.raises(SystemExit) as leaving:
            main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert leaving.value.code == 130
