"""Run folders that not all ranks see, and run folders at a URL."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import SYNCLINE, cli_environment, wait_until
from test_engines import Processes
from test_nodes import TRAIN, environment, free_port, node, workplace

import syncline
from syncline import remote
from syncline.errors import RunFolderError
from syncline.launcher.engines.place import _RanksOnEngine
from syncline.launcher.home import Address, Courier, FarFolder, Home
from syncline.launcher.places import Place, Ranks
from syncline.plan import Plan
from syncline.spans import read_log
from syncline.store import Run, RunFolder, load_run
from syncline.voice import Voice

__all__ = ["workplace"]
pytestmark = pytest.mark.timeout(180)

SETTINGS = {"checkpoint.every": 2, "evaluate": False, "measure.calibration": 0}
PLAN = {"model": "mlp", "data": "synthetic", "method": "bucketed", "workers": 2, "threads": 1, "global_batch": 16}


def trained(steps: int = 6, **more: Any) -> Run:
    return syncline.train(None, **PLAN, steps=steps, settings=SETTINGS, **more)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _as_at_the_end_of_a_process() -> Iterator[None]:
    yield
    remote.forget()
    if "s3fs" in sys.modules:
        sys.modules["s3fs"].S3FileSystem.clear_instance_cache()
        gc.collect()  # here, where its open sockets are forgiven


class Elsewhere(Place):
    """An engine whose processes do not see the run folder, as on other machines."""

    @contextmanager
    def joined(self, plan: Plan, voice: Voice) -> Iterator[Ranks]:
        engine = Processes()
        with ExitStack() as at_end:
            at_end.callback(engine.stop)
            yield Blind(engine, "", at_end)


class Blind(_RanksOnEngine):
    def home(self, path: Path, created: str) -> Address | None:
        address = super().home(path, created)
        assert address is not None
        return replace(address, created="another time")  # so the folder under that path is another run's for them


def test_ranks_of_an_engine_fill_a_folder_that_they_do_not_see_and_resume_to_the_bit(tmp_path: Path) -> None:
    whole = trained(run_dir=tmp_path / "here")
    far = trained(run_dir=tmp_path / "far", place=Elsewhere())
    assert far.summary["weights_sha256"] == whole.summary["weights_sha256"]
    run = RunFolder(tmp_path / "far")
    last = run.checkpoints / "step-00000006"
    assert {path.name for path in last.iterdir()} == {"checkpoint.json", "rank-0.pt", "rank-1.pt"}
    assert [read_log(run.events(rank))[0]["rank"] for rank in range(2)] == [0, 1]
    shutil.rmtree(last)  # as if it had been stopped after step 4
    run.set_status("stopped")
    again = syncline.resume(run.path, place=Elsewhere())
    assert again.summary["timed_steps"] == 2
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert again.losses()["step"].to_list() == list(range(6))  # the logs have both sessions


def test_nodes_with_folders_of_their_own_stop_and_resume_from_node_0s_alone(workplace: Path) -> None:
    port, run = free_port(), RunFolder(workplace / "a" / "run")
    with node(workplace, "a", 0, port, SLOW="0.1") as first, node(workplace, "b", 1, port, SLOW="0.1") as second:
        wait_until(lambda: run.checkpoint_step() or first.poll() is not None, 60, "a checkpoint")
        os.killpg(second.pid, signal.SIGINT)
        ends = [process.communicate(timeout=60) for process in (first, second)]
    assert (first.returncode, second.returncode) == (130, 130), ends
    assert read_log(run.events(1))[0]["rank"] == 1
    assert not list((workplace / "b").iterdir())
    (workplace / "c").mkdir()  # node 1 is another machine now
    port, resumed = free_port(), []
    for number, folder in enumerate("ac"):
        place = ("--nodes", "2", "--node-rank", str(number), "--rendezvous", f"127.0.0.1:{port}")
        resumed.append(
            subprocess.Popen(
                [str(SYNCLINE), "train", "run", "--resume", *place], cwd=workplace / folder, text=True,
                env=environment(workplace), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
    ends = [process.communicate(timeout=90) for process in resumed]
    assert [process.returncode for process in resumed] == [0, 0], ends
    alone = [str(SYNCLINE), "train", *TRAIN, "--workers", "2", "--run-dir", "run"]
    subprocess.run(alone, cwd=workplace / "alone", env=environment(workplace), check=True, capture_output=True)
    summaries = [RunFolder(workplace / folder / "run").summary() or {} for folder in ("a", "alone")]
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]
    assert summaries[0]["timed_steps"] < 40


def test_a_folder_that_is_gone_after_the_last_round_costs_nothing_at_home(tmp_path: Path) -> None:
    """A rank that has returned may be told to stop: its last round is then asked for once more."""
    (tmp_path / "home").mkdir()
    home = Home("127.0.0.1", "a secret of sixteen", tmp_path / "home", "now")
    log = tmp_path / "here" / "events" / "rank-1.blocks"
    log.parent.mkdir(parents=True)
    log.write_bytes(b"what it did")
    try:
        courier = Courier(tmp_path / "here", home.address, [1])
        courier.close()
        shutil.rmtree(tmp_path / "here")
        courier.close()
    finally:
        home.close()
    assert (tmp_path / "home" / "events" / "rank-1.blocks").read_bytes() == b"what it did"


def test_names_at_a_url_stay_inside_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Files:
        def invalidate_cache(self) -> None: ...

        def find(self, root: str) -> list[str]:
            return [f"{root}/run.json", f"{root}/logs/../../../.bashrc"]

    there = remote.Remote(f"file://{tmp_path}")
    monkeypatch.setattr(there, "_files", Files())
    assert there.names() == ["run.json"]


def test_home_serves_only_what_ranks_write_and_only_to_who_knows_the_secret(tmp_path: Path) -> None:
    home = Home("127.0.0.1", "a secret of sixteen", tmp_path, "now")
    far = FarFolder(home.address)
    try:
        content = bytes(range(256)) * 20_000  # in two pieces
        far.write("checkpoints/step-00000001/rank-0.pt", content)
        assert far.read("checkpoints/step-00000001/rank-0.pt") == content
        assert far.names("checkpoints/step-00000001") == ["rank-0.pt"]
        for name in ("../secret", "/etc/passwd", "run.json", "events/../run.json", ".lock", "events/..", "logs/a\nb"):
            with pytest.raises(PermissionError):
                far.read(name)
            with pytest.raises(PermissionError):
                far.write_end(name, 0, b"x")
        with pytest.raises(FileNotFoundError):
            far.read("events/rank-7.blocks")
        with pytest.raises(ConnectionError, match="cannot reach"):
            FarFolder(replace(home.address, token="another secret here")).names("events")
    finally:
        far.close()
        home.close()


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """An S3 on loopback, with one bucket."""
    for package in ("s3fs", "moto", "flask_cors"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    port = free_port()
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    keys = {
        "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }  # fmt: skip
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in keys.items():
                patch.setenv(name, value)
            wait_until(bucket_is_made, 60, "the S3 server")
            yield "s3://bucket"
    finally:
        server.kill()
        server.wait()


def bucket_is_made() -> bool:
    import s3fs

    try:
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
    except Exception:
        return False
    return True


@pytest.mark.parametrize("kind", ["file", "s3"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_run_at_a_url_is_stopped_resumed_to_the_bit_and_explained(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    import fsspec

    url = f"{request.getfixturevalue('s3') if kind == 's3' else f'file://{tmp_path}/bucket'}/deep/run"
    whole = trained(20, run_dir=tmp_path / "here")
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in PLAN.items()]
    slow = {**SETTINGS, "inject.rank": 0, "inject.delay_ms": 300}
    flags += [f"--set={key}={str(value).lower()}" for key, value in slow.items()]
    files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    command = [str(SYNCLINE), "train", "--run-dir", url, "--steps", "20", *flags]
    with subprocess.Popen(
        command, cwd=tmp_path, env=cli_environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            there = f"{root}/checkpoints/*/checkpoint.json"
            wait_until(lambda: files.glob(there) or process.poll() is not None, 90, "a checkpoint")
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, errors
    assert re.search(rf"Continue after step \d+ with: syncline train --resume {url}$", errors.strip()), errors
    assert load_run(url).info["status"] == "stopped"
    with pytest.raises(RunFolderError, match="is not empty"):
        trained(run_dir=url)
    again = syncline.resume(url)
    assert again.summary["timed_steps"] < 20
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert load_run(url).summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert syncline.explain(url).run == url
    assert not (tmp_path / "runs").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_what_is_wrong_with_a_url_is_said_before_anything_runs(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunFolderError, match=r"^cannot write to s3://nobodys/run: .*bucket does not exist"):
        trained(run_dir="s3://nobodys/run")
    with pytest.raises(RunFolderError, match=r"^s3://bucket/no is not a run folder"):
        load_run(f"{s3}/no")
    import fsspec

    def url_to_fs(*_: object, **__: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", url_to_fs)
    with pytest.raises(RunFolderError, match=r"pip install 'syncline\[s3\]'"):
        trained(run_dir=f"{s3}/run")
