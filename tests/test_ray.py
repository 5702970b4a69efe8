"""Ranks on a real Ray: one cluster of two nodes for all tests, and a Ray of Syncline's own where its end matters."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import MARK, SYNCLINE, cli_environment, killed_at_end, marked_processes, wait_until

import syncline
from syncline.store import RunFolder

ray = pytest.importorskip("ray", reason="ray is not installed")
import ray_programs  # noqa: E402

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(900)]

PROGRAMS = Path(__file__).with_name("ray_programs.py")
PLAN = (
    *("--model", "troubled:Net", "--data", "synthetic", "--workers", "2", "--threads", "1", "--global-batch", "20"),
    *("--steps", "12", "--set", "checkpoint.every=4", "--set", "evaluate=false", "--set", "log_every=1"),
)
MODEL = '''
"""A user's model that meets with what files of the current folder say: KIND-RANK-CALL."""
import os, signal, time
from pathlib import Path
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))
        self.calls = 0

    def forward(self, images):
        self.calls += 1
        kill, fail, wait = (
            Path(f"{kind}-{os.environ.get('RANK', 0)}-{self.calls}") for kind in ("kill", "raise", "wait")
        )
        if kill.exists():
            kill.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if fail.exists():
            fail.unlink()
            raise ArithmeticError("my own mistake")
        while wait.exists():
            Path("waits").touch()
            time.sleep(0.05)
        return super().forward(images)
'''
Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    (folder / "troubled.py").write_text(MODEL)
    return folder


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    """Ray on loopback, with its files in a folder that goes; what people have at home plays no part."""
    loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "disabled"}
    with tempfile.TemporaryDirectory(prefix="r") as folder:
        yield cli_environment(**loopback, RAY_TMPDIR=folder, RAY_USAGE_STATS_ENABLED="0")


@pytest.fixture(scope="module")
def address(environment: dict[str, str]) -> Iterator[str]:
    """Two nodes of two CPUs each."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", str(PROGRAMS), "cluster"], env=environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with killed_at_end(process):
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
        process.communicate(timeout=60)


@pytest.fixture(scope="module")
def run(workplace: Path, environment: dict[str, str]) -> Command:
    """The real program: Ray reads its environment when it is loaded."""
    return lambda *arguments: syncline_in(workplace, environment, *arguments)


def syncline_in(folder: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Waits longer than Syncline itself waits for an engine's processes: on a busy machine, its own error tells more
    than a time limit here; should that be missing too, Ray's own last words do."""
    command = [str(SYNCLINE), *arguments]
    try:
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=270)
    except subprocess.TimeoutExpired:
        for log in Path(environment.get("RAY_TMPDIR", os.devnull)).glob("ray/session_latest/logs/*.out"):
            if log.name.startswith(("raylet", "gcs_server")):
                print(log.name, *log.read_text(errors="replace").splitlines()[-60:], sep="\n")
        raise


@pytest.fixture(scope="module")
def at_home(run: Command, workplace: Path) -> list[object]:
    done = run("train", *PLAN, "--run-dir", "home")
    assert done.returncode == 0, done.stderr
    return learnt(workplace / "home")


def learnt(folder: Path) -> list[object]:
    """Every loss, and the weights at the end."""
    summary = RunFolder(folder).summary()
    assert summary is not None
    assert len(summary["losses"]) == summary["steps"] == 12
    return [summary["losses"], summary["weights_sha256"]]


def test_two_nodes_learn_the_same_to_the_bit(
    run: Command, workplace: Path, address: str, at_home: list[object]
) -> None:
    done = run("train", *PLAN, "--engine", "ray", "--address", address, "--hosts", "2", "--run-dir", "two-nodes")
    assert done.returncode == 0, done.stderr
    assert "ray" not in done.stderr.lower(), "what Ray says to those who start it is not for Syncline's users"
    assert learnt(workplace / "two-nodes") == at_home
    assert RunFolder(workplace / "two-nodes").plan().hosts == 2


def test_a_rank_killed_another_raising_and_all_goes_on_to_the_same_weights(
    run: Command, workplace: Path, address: str, at_home: list[object]
) -> None:
    """The kill costs a restart from the checkpoint of step 4, the exception the run, after the one of step 8."""
    for trouble in ("kill-1-6", "raise-0-7"):
        (workplace / trouble).touch()
    engine = ("--engine", "ray", "--address", address)
    done = run("train", *PLAN, *engine, "--hosts", "2", "--max-restarts", "1", "--run-dir", "troubled")
    assert done.returncode == 1
    first, *traceback, last = done.stderr.splitlines()
    node = r"host \S+/[0-9a-f]{8}"
    assert re.match(rf"syncline: \[rank 1 on {node}\] its process died: .*restart 1 of 1\.$", first), done.stderr
    assert re.match(rf"syncline: \[rank 0 on {node}\] ArithmeticError: my own mistake", last), done.stderr
    assert any("troubled.py" in line for line in traceback)
    assert not any("syncline/launcher" in line for line in traceback)
    assert "raylet" not in done.stdout
    assert RunFolder(workplace / "troubled").info()["status"] == "failed"

    done = run("train", "--resume", "troubled", *engine)
    assert done.returncode == 0, done.stderr
    assert learnt(workplace / "troubled") == at_home


def test_no_room_and_no_cluster(run: Command, workplace: Path, address: str) -> None:
    done = run("train", *PLAN, "--workers", "8", "--engine", "ray", "--address", address, "--run-dir", "refused")
    assert done.returncode == 2
    assert "no room for 8 workers of 1 CPU each: its nodes have 2 and 2 CPUs free." in done.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
    gone = run("train", *PLAN, "--engine", "ray", "--address", nobody, "--run-dir", "refused")
    assert gone.returncode == 1
    assert f"there is no Ray cluster at {nobody}: Connection refused. Start one" in gone.stderr
    assert [len(each.stderr.splitlines()) for each in (done, gone)] == [1, 1]
    assert not (workplace / "refused").exists()


def test_results_come_by_rank(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has warnings as errors, and is not left in Ray."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", False)  # stay on loopback
    results = syncline.launch(ray_programs.who, workers=4, threads=1, engine="ray", address=address)
    assert results == [(rank, rank // 2, 1, 6) for rank in range(4)]
    assert not ray.is_initialized()


def test_inside_of_a_program_that_uses_ray(address: str, environment: dict[str, str], tmp_path: Path) -> None:
    """Its connection stays; and in Ray Train, DataParallel takes the group that is there."""
    command = [sys.executable, str(PROGRAMS), "inside", address, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"ranks": [[0, 0, 1, 1], [1, 0, 1, 1]], "stays": True, "gradients": [1.5, 1.5]}


def test_ctrl_c_ends_a_ray_of_its_own_and_the_run_goes_on_elsewhere(
    run: Command, workplace: Path, address: str, environment: dict[str, str], at_home: list[object], tmp_path: Path
) -> None:
    (workplace / "wait-1-7").touch()
    mark = uuid.uuid4().hex
    own = {name: text for name, text in environment.items() if not name.startswith("RAY_")}
    process = subprocess.Popen(
        [str(SYNCLINE), "train", *PLAN, "--engine", "ray", "--run-dir", "stopped"],
        env={**own, MARK: mark, "HOME": str(tmp_path)}, cwd=workplace, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with killed_at_end(process):
        wait_until(lambda: (workplace / "waits").exists() or process.poll() is not None, 240, "step 7")
        assert process.poll() is None, process.communicate()[1]
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, errors = process.communicate(timeout=60)
    wait_until(lambda: not marked_processes(mark), 60, "every process gone")
    assert process.returncode == 130
    assert errors.splitlines()[0].startswith("syncline: Stopped by Ctrl-C; every rank has ended."), errors
    assert "--resume stopped --engine ray" in errors
    assert RunFolder(workplace / "stopped").info()["status"] == "stopped"
    assert not list(Path(tempfile.gettempdir()).glob("ray-*"))
    assert not list(tmp_path.iterdir()), "Ray must write nothing into the user's home folder"

    (workplace / "wait-1-7").unlink()
    done = run("train", "--resume", "stopped", "--engine", "ray", "--address", address)
    assert done.returncode == 0, done.stderr
    assert learnt(workplace / "stopped") == at_home


def test_compare_on_a_ray_of_its_own(workplace: Path, environment: dict[str, str]) -> None:
    own = {name: text for name, text in environment.items() if not name.startswith("RAY_")}
    command = ("compare", "--model", "mlp", "--data", "synthetic", "--workers", "2", "--threads", "1")
    few = ("--methods", "ring,ddp", "--steps", "2", "--warmup", "1", "--engine", "ray", "--json")
    done = syncline_in(workplace, own, *command, *few)
    assert done.returncode == 0, done.stderr
    assert "ray" not in done.stderr.lower(), "what Ray says to those who start it is not for Syncline's users"
    assert {row["method"] for row in json.loads(done.stdout)["rows"]} == {"ring", "ddp"}
    assert not list(Path(tempfile.gettempdir()).glob("ray-*"))
