"""Run folders: whole or absent, versioned, listed in order, and never half-written."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from syncline import store
from syncline.errors import RunFolderError
from syncline.plan import Plan
from syncline.store import RunFolder, create_run, list_runs, open_run, write_atomic

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

    monkeypatch.setattr(store.os, "fsync", broken)
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
