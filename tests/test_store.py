"""Run folders: whole or absent, versioned, listed in order, and never half-written."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
from event_logs import header, phase, transfer, whole_step, write_log

from syncline import store
from syncline.errors import RunFolderError
from syncline.events import COLUMNS
from syncline.files import write_atomic
from syncline.marks import ON_LOOPBACK, STRETCHED
from syncline.plan import Plan
from syncline.store import RunFolder, create_run, list_runs, load_run, open_run

PLAN = Plan(workers=2, steps=3)


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make(path: str | None, label: str = "ddp-2") -> RunFolder:
    return create_run(Path(path) if path else None, kind="train", plan=PLAN, label=label)


def names(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def change_info(run: RunFolder, **changes: object) -> None:
    (run.path / "run.json").write_text(json.dumps({**run.info(), **changes}))


def test_new_run_holds_plan_machine_and_status_and_nothing_lies_beside_it() -> None:
    run = make("deep/a")
    assert names("deep") == ["a"]
    assert names("deep/a") == ["machine.json", "plan.toml", "run.json"]
    assert run.plan() == PLAN
    assert run.info()["status"] == "running"
    assert run.info()["format"] == store.FORMAT
    assert run.summary() is None
    machine = json.loads((run.path / "machine.json").read_text())
    assert {"processor", "cores", "torch", "python"} <= machine.keys()


def test_empty_folder_is_taken() -> None:
    Path("a").mkdir()
    assert make("a").info()["kind"] == "train"


def test_folder_that_is_not_empty_is_refused_and_left_alone() -> None:
    Path("a").mkdir()
    Path("a/mine.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="not empty"):
        make("a")
    assert (names("."), names("a")) == (["a"], ["mine.txt"])


@pytest.mark.parametrize("path", ["file/a", "file/deep/a", "file"])
def test_path_that_cannot_be_written_is_refused_and_nothing_is_left(path: str) -> None:
    Path("file").write_text("mine")  # we may be root, whom no permission stops
    with pytest.raises(RunFolderError, match="cannot write the run folder"):
        make(path)
    assert names(".") == ["file"]
    assert Path("file").read_text() == "mine"


def test_run_that_fails_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space() -> dict[str, object]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "machine", no_space)
    with pytest.raises(RunFolderError, match="No space left"):
        make("runs/a")
    assert names("runs") == []


def test_status_and_summary_are_replaced_whole() -> None:
    run = make("a")
    run.set_status("finished")
    run.write_summary({"loss": 1.0})
    run.write_summary({"loss": 2.0})
    assert run.info()["status"] == "finished"
    assert run.info()["kind"] == "train"
    assert run.summary() == {"loss": 2.0}
    assert names("a") == ["machine.json", "plan.toml", "run.json", "summary.json"]


def test_atomic_write_keeps_the_old_file_when_the_new_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("file")
    write_atomic(path, "old")

    def broken(_: int) -> None:
        raise OSError("disk")

    monkeypatch.setattr("os.fsync", broken)
    with pytest.raises(OSError, match="disk"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert names(".") == ["file"]


def test_runs_are_listed_oldest_first_whatever_their_names() -> None:
    for name, created in [("b", "2024-01-01"), ("a", "2024-01-03"), ("c", "2024-01-02")]:
        change_info(make(f"runs/{name}"), created=created)
    Path("runs/not-a-run").mkdir()
    assert [run.path.name for run in list_runs(Path("runs"))] == ["b", "c", "a"]
    assert list_runs(Path("elsewhere")) == []


def test_last_run_is_the_default() -> None:
    with pytest.raises(RunFolderError, match="no run in"):
        open_run(None)
    for name, created in [("b", "2024-01-01"), ("a", "2024-01-03"), ("c", "2024-01-02")]:
        change_info(make(f"runs/{name}"), created=created)
    assert open_run(None).path == Path("runs/a")
    assert open_run(Path("runs/c")).path == Path("runs/c")


def test_two_runs_in_one_second_get_two_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:
            return datetime(2024, 5, 6, 7, 8, 9)

    monkeypatch.setattr(store, "datetime", Stopped)
    first, second, third = make(None), make(None), make(None)
    assert first.path == Path("runs/20240506-070809-train-ddp-2")
    assert len({first.path, second.path, third.path}) == 3
    assert [run.path for run in list_runs()] == [first.path, second.path, third.path]
    assert open_run(None).path == third.path


@pytest.mark.parametrize("by_path", [True, False])
def test_newer_format_is_refused(by_path: bool) -> None:
    run = make("runs/a")
    change_info(run, format=store.FORMAT + 1)
    with pytest.raises(RunFolderError, match=f"format {store.FORMAT + 1}"):
        open_run(run.path if by_path else None)


@pytest.mark.parametrize("path", ["missing", "empty"])
def test_folder_without_a_run_is_refused(path: str) -> None:
    Path("empty").mkdir()
    with pytest.raises(RunFolderError, match="is not a run folder"):
        open_run(Path(path))


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '{"format": 1', "\x00"])
def test_damaged_run_json_is_named(content: str) -> None:
    run = make("a")
    (run.path / "run.json").write_text(content)
    with pytest.raises(RunFolderError, match=r"run\.json.*damaged"):
        open_run(run.path)


# A run, read.


def loss(step: int, value: float, samples: int) -> dict[str, object]:
    return {"kind": "loss", "value": value, "samples": samples, "step": step, "method": "bucketed"}


def logged(path: str = "a") -> RunFolder:
    """Two ranks, two steps; rank 1 has lost the loss of the second one."""
    run = make(path)
    memory = {"kind": "memory", "peak_resident_bytes": 7, "gradients_in_buffers": True, "step": 1}
    first = [*whole_step(0), loss(0, 2.0, 3), *whole_step(1, 50), loss(1, 1.0, 3), memory]
    write_log(run.path, 0, [header(0, 2), *first])
    write_log(run.path, 1, [header(1, 2, host=1), *whole_step(0), loss(0, 4.0, 1), *whole_step(1, 50)])
    return run


def test_run_is_read_with_its_plan_status_and_result() -> None:
    folder = logged()
    run = load_run("a")
    assert (run.plan, run.kind, run.status, run.summary) == (PLAN, "train", "ended without a word", {})
    folder.write_summary({"steps": 2})
    folder.set_status("finished")
    assert (load_run("a").status, load_run("a").summary) == ("finished", {"steps": 2})
    with pytest.raises(RunFolderError, match="not a run folder"):
        load_run("elsewhere")


def test_table_has_one_row_for_each_record_on_one_clock() -> None:
    logged()
    table = load_run("a").table()
    assert table.columns == list(COLUMNS)
    backward = table.filter(kind="phase", name="backward", rank=1)
    assert backward.select("host", "step", "method", "start_ns", "seconds").rows() == [
        (1, 0, "bucketed", 11_000_000, 0.02),
        (1, 1, "bucketed", 61_000_000, 0.02),
    ]
    (bucket,) = table.filter(kind="collective", rank=0, step=0).to_dicts()
    assert (bucket["label"], bucket["bytes"], bucket["ready_ns"]) == ("bucket 0", 1000, 30_000_000)
    assert table.filter(kind="memory").select("name", "value").rows() == [
        ("peak_resident_bytes", 7.0),
        ("gradients_in_buffers", 1.0),
    ]


def test_table_is_made_once() -> None:
    logged()
    run = load_run("a")
    table = run.table()
    (run.path / "events" / "rank-0.jsonl").unlink()
    assert run.table() is table


def test_losses_are_means_over_the_global_batch_of_whole_steps() -> None:
    logged()
    assert load_run("a").losses().rows() == [(0, 2.5, 4)]


def test_step_that_was_repeated_counts_once() -> None:
    run = make("a")
    resumed = header(0, 1, wall_ns=2 * 10**18)
    lines = [header(0, 1), *whole_step(0), loss(0, 9.0, 1), resumed, *whole_step(0, 7), loss(0, 3.0, 1)]
    write_log(run.path, 0, lines)
    read = load_run("a")
    assert read.losses().rows() == [(0, 3.0, 1)]
    assert read.table().filter(kind="step")["session"].to_list() == [0, 1]


def test_crashed_run_gives_what_it_has() -> None:
    run = make("a")
    assert load_run("a").table().is_empty()
    assert load_run("a").losses().is_empty()
    path = write_log(run.path, 0, [header(0, 1), phase("forward", 0, 1, 2), transfer("bucket 0", 0, 2, 2, 3)])
    path.write_bytes(path.read_bytes()[:-20])
    assert load_run("a").table()["name"].to_list() == ["forward"]


def test_run_carries_its_marks_whatever_its_summary_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "machine", lambda: {"cores": 2})
    many = PLAN.replace(workers=8, threads=1)
    run = create_run(Path("a"), kind="compare", plan=many, label="8")
    assert load_run("a").marks == [STRETCHED]
    run.write_summary({"rows": [], "marks": ["stretched: compute shares cores", "link: slow"]})
    assert [mark.kind for mark in load_run("a").marks] == ["stretched", "link"]
    run = create_run(Path("b"), kind="compare", plan=many.replace(compute="replay:x"), label="8")
    run.write_summary({"rows": [], "marks": []})
    assert load_run("b").marks == [ON_LOOPBACK]
    run = create_run(Path("c"), kind="train", plan=many.replace(workers=4), label="4")
    for rank in range(4):
        write_log(run.path, rank, [header(rank, 4, host=rank // 2)])
    assert load_run("c").marks == [], "another launcher put two ranks on each of two machines"


def test_run_shows_itself_in_a_notebook() -> None:
    create_run(Path("a"), kind="train", plan=PLAN.replace(model="mine:<Net>"), label="x")
    page = load_run("a")._repr_html_()
    assert "<td>mine:&lt;Net&gt;</td>" in page
    assert "<td>ended without a word</td>" in page
