"""Training on image files from the command line: same weights with any number of loaders, none left behind, words."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import SYNCLINE, Cli, cli_environment, command_line, session_members, wait_until
from image_folders import COUNTS, class_folder, imdb_wiki_folder, odd_photos

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def caches(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


def weights(cli: Cli, caches: dict[str, str], *arguments: object) -> dict[str, Any]:
    done = cli("train", *arguments, "--threads", 1, "--set", "measure.calibration=0", "--json", **caches)
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def test_faces_give_the_same_weights_with_and_without_loaders(
    cli: Cli, caches: dict[str, str], tmp_path: Path
) -> None:
    """36 training images in batches of 35: the second batch has one, which does not reach rank 1."""
    folder = imdb_wiki_folder(tmp_path / "faces")
    plan = ("--data", "imdb-wiki", "--data-dir", folder, "--model", "cnn", "--global-batch", 35, "--epochs", 2)
    many = weights(cli, caches, *plan, "--workers", 2, "--method", "all-reduce", "--set", "loaders=2")
    none = weights(cli, caches, *plan, "--workers", 2, "--method", "all-reduce", "--set", "loaders=0")
    assert many["weights_sha256"] == none["weights_sha256"]
    assert (many["loading"]["loaders"], none["loading"]["loaders"]) == (2, 0)
    assert many["loading"]["samples_per_s"] > 0
    assert many["task"] == "age"
    assert "36 training and 4 test images" in many["data"]
    assert many["epochs"][-1]["test_absolute_error"] == none["epochs"][-1]["test_absolute_error"] > 0


def test_images_in_memory_give_the_same_weights_with_and_without_loaders(cli: Cli, caches: dict[str, str]) -> None:
    plan = ("--data", "synthetic", "--model", "mlp", "--steps", 6, "--global-batch", 30, "--method", "single")
    one = weights(cli, caches, *plan, "--set", "loaders=1", "--set", "evaluate=false")
    none = weights(cli, caches, *plan, "--set", "evaluate=false")
    assert one["weights_sha256"] == none["weights_sha256"]
    assert (one["loading"]["loaders"], none["loading"]) == (1, None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_loaders_end_with_the_launcher(
    number: signal.Signals, caches: dict[str, str], user_folder: Path, tmp_path: Path
) -> None:
    folder = class_folder(tmp_path / "set", {"train": {"a": 9, "b": 9}, "val": {"a": 1, "b": 1}})
    command = [str(SYNCLINE), "train", "--model", "user_model:Net", "--data", "folder", "--data-dir", str(folder)]
    command += ["--workers", "2", "--threads", "1", "--global-batch", "6", "--steps", "100"]
    command += ["--set", "loaders=2", "--set", "image_size=32", "--set", "measure.calibration=0"]
    environment = cli_environment(SLOW="0.2", PIDS=str(tmp_path), **caches)
    with subprocess.Popen(
        command, env=environment, cwd=user_folder, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            models = [tmp_path / str(rank) for rank in range(2)]  # made after the loaders
            wait_until(lambda: all(one.exists() for one in models) or process.poll() is not None, 60, "two ranks")
            # Launcher, resource tracker, fork server, two ranks and two loaders of each.
            members = session_members(process.pid)
            assert len(members) >= 8, [command_line(pid) for pid in members]
            process.send_signal(number)
            process.wait(60)
            wait_until(lambda: not session_members(process.pid), 60, "every process gone")
        finally:
            process.kill()


def test_data_describes_a_folder_and_says_what_comes_next(cli: Cli, caches: dict[str, str], tmp_path: Path) -> None:
    folder = imdb_wiki_folder(tmp_path / "faces", odd_photos(20))
    done = cli("data", "imdb-wiki", "--data-dir", folder, **caches)
    assert (done.returncode, done.stderr) == (0, "")
    for reason, count in COUNTS.items():
        assert f"{count} {reason}" in done.stdout
    assert "18 training and 2 test images" in done.stdout
    assert "ages " in done.stdout
    assert "images/s" in done.stdout
    assert f"next: syncline train --data imdb-wiki --data-dir {folder}" in done.stdout


def test_data_describes_class_folders(cli: Cli, caches: dict[str, str], tmp_path: Path) -> None:
    folder = class_folder(tmp_path / "set", {"train": {"cat": 3, "dog": 2}, "val": {"cat": 1}})
    done = cli("data", "folder", "--data-dir", folder, **caches)
    assert "Images of 2 classes" in done.stdout
    assert "2 (dog) to 3 (cat)" in done.stdout


@pytest.mark.parametrize("verb", ["train", "data"])
def test_wrong_folder_is_refused_in_one_line(verb: str, cli: Cli, caches: dict[str, str], tmp_path: Path) -> None:
    named = ["--data"] if verb == "train" else []
    done = cli(verb, *named, "imdb-wiki", "--data-dir", tmp_path, **caches)
    assert done.returncode == 2
    assert done.stderr.startswith("syncline: ")
    assert done.stderr.count("\n") == 1
    assert "neither wiki.mat nor imdb.mat" in done.stderr
    assert not (tmp_path / "work" / "runs").exists()
