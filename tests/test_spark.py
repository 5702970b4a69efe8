"""Ranks on a real Spark: one session with two executors for most tests, and a Spark of Syncline's own where its end
matters."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import MARK, SYNCLINE, Cli, cli_environment, killed_at_end, marked_processes, wait_until

import syncline
from syncline.errors import RankFailed, UsageError
from syncline.store import Run, RunFolder

pyspark = pytest.importorskip("pyspark", reason="pyspark is not installed")
if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
    pytest.skip("java is not installed", allow_module_level=True)

from syncline.launcher.engines import spark as engine  # noqa: E402
from syncline.launcher.engines.spark_driver import Driver  # noqa: E402

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(280)]

MASTER = "local-cluster[2,2,1024]"
PLAN: dict[str, Any] = {
    "model": "troubled:Net", "data": "synthetic", "workers": 2, "threads": 1, "global_batch": 20, "steps": 12,
    "settings": {"checkpoint.every": 4, "evaluate": False},
}  # fmt: skip
FLAGS = (
    *("--model", "troubled:Net", "--data", "synthetic", "--workers", "2", "--threads", "1", "--global-batch", "20"),
    *("--steps", "12", "--set", "checkpoint.every=4", "--set", "evaluate=false"),
)
MODEL = '''
"""A user's model that meets with what files of the current folder say: KIND-RANK-CALL."""
import os, signal, time
from pathlib import Path
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(3 * 32 * 32, 10), nn.Dropout(0.1))
        self.calls = 0

    def forward(self, images):
        self.calls += 1
        kill, wait = (Path(f"{kind}-{os.environ.get('RANK', 0)}-{self.calls}") for kind in ("kill", "wait"))
        if kill.exists():
            kill.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        while wait.exists():
            Path("waits").touch()
            time.sleep(0.05)
        return super().forward(images)
'''


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder, with the user's model in it."""
    folder = tmp_path_factory.mktemp("spark")
    (folder / "troubled.py").write_text(MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        yield folder


@pytest.fixture(scope="module")
def session(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A SparkContext of this process, as a user's session has one; two executors with two slots each. Spark keeps
    files of such a cluster where it is installed, so it is installed in a folder that goes."""
    home = tmp_path_factory.mktemp("home")
    for part in ("bin", "jars", "python"):
        (home / part).symlink_to(Path(pyspark.__file__).with_name(part))
    tempfile.gettempdir()  # is remembered for this process
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_HOME", str(home))
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("TMPDIR", str(home))  # torchrun, which TorchDistributor uses, leaves its folders
        driver = Driver(MASTER)
    connected = engine.connect(MASTER)
    try:
        wait_until(lambda: connected._slots()[0].total() == 4, 120, "both executors")
        yield driver.context
    finally:
        driver.close()
    shutil.rmtree(home)


@pytest.fixture(scope="module")
def at_home(workplace: Path) -> Run:
    """The same plan without Spark."""
    return syncline.train(**PLAN, run_dir=workplace / "runs" / "home")


def weights(run: Run) -> str:
    return str(run.summary["weights_sha256"])


def test_losses_are_those_of_a_local_run_to_the_bit(session: Any, at_home: Run, workplace: Path) -> None:
    run = syncline.train(**PLAN, run_dir=workplace / "runs" / "spark", place=syncline.Engine("spark"))
    assert run.losses().equals(at_home.losses())
    assert weights(run) == weights(at_home)


def test_a_killed_rank_starts_again_from_the_checkpoint(
    session: Any, at_home: Run, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workplace / "kill-1-7").touch()
    place = syncline.Engine("spark", MASTER)
    run = syncline.train(**PLAN, max_restarts=1, run_dir=workplace / "runs" / "restarted", place=place)
    said = capsys.readouterr().err
    assert "restart 1 of 1" in said
    assert "rank 1" in said
    assert weights(run) == weights(at_home)


def test_methods_are_compared(session: Any, workplace: Path) -> None:
    given = {**PLAN, "steps": 2}
    comparison = syncline.compare(
        **given, methods=["ddp", "ring"], warmup=1, run_dir=workplace / "runs" / "compared",
        place=syncline.Engine("spark"),
    )  # fmt: skip
    assert {row["method"] for row in comparison.rows} == {"ddp", "ring"}


def meet(trouble: str = "") -> tuple[int, int, str, int]:
    """Each rank's number, what all of them add up to, and its threads as Spark and torch have them."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")  # and leaves it: the next start must not find it
    rank, total = dist.get_rank(), torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    if rank == 1 and trouble == "raise":
        raise ArithmeticError("my own mistake")
    if rank == 1 and trouble:
        os.kill(os.getppid() if trouble == "kill Spark's worker" else os.getpid(), signal.SIGKILL)
    if trouble:
        dist.barrier()
        signal.pause()
    return rank, int(total), os.environ["OMP_NUM_THREADS"], torch.get_num_threads()


def test_results_come_back_by_rank(session: Any) -> None:
    results = syncline.launch(meet, workers=4, threads=2, engine="spark")
    assert results == [(rank, 10, "2", 2) for rank in range(4)]
    assert {result[2:] for result in syncline.launch(meet, workers=2, engine="spark")} == {("1", 1)}  # a slot's CPUs


@pytest.mark.parametrize(
    ("trouble", "words"),
    [("raise", "my own mistake"), ("kill", "gone without a word"), ("kill Spark's worker", "gone|exited|crashed")],
)
def test_the_rank_that_failed_is_named_and_the_session_stays(session: Any, trouble: str, words: str) -> None:
    with pytest.raises(RankFailed, match=words) as caught:
        syncline.launch(meet, trouble, workers=2, engine="spark")
    assert caught.value.rank == 1
    assert session.parallelize(range(4), 2).sum() == 6
    assert not session.statusTracker().getActiveJobsIds()


def test_too_few_slots(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "ROOM_SECONDS", 0.5)
    with pytest.raises(UsageError, match=r"no room for 5 workers: .* 4 free of 4"):
        syncline.launch(meet, workers=5, engine="spark")
    with pytest.raises(UsageError, match="2 workers would be on 1, not equally or not as asked"):
        engine.connect(None).layout(2, None, 2)
    with pytest.raises(UsageError, match="uses the Spark at local-cluster"):
        syncline.launch(meet, workers=2, engine="spark", address="spark://elsewhere:7077")


def test_tasks_that_cannot_start_are_told_in_sparks_words(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "set")
    monkeypatch.setattr(session, "pythonExec", "/no/such/python")
    with pytest.raises(syncline.errors.HostError, match=r"could not start worker .*/no/such/python"):
        syncline.launch(meet, workers=2, engine="spark")


def test_data_parallel_inside_torch_distributor(session: Any) -> None:
    from pyspark.ml.torch.distributor import TorchDistributor
    from pyspark.sql import SparkSession

    def train() -> tuple[int, float]:
        import torch

        import syncline

        rank = int(os.environ["RANK"])
        model = syncline.DataParallel(torch.nn.Linear(1, 1, bias=False))
        model(torch.tensor([[float(rank + 1)]])).sum().backward()
        return torch.distributed.get_world_size(), next(model.parameters()).grad.item()

    SparkSession(session)
    ended = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False).run(train)
    assert ended == (2, 1.5)  # the mean of both ranks' gradients


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--master", "spark://127.0.0.1:1"), "there is no Spark master at spark://127.0.0.1:1"),
        (("--master", "sc://localhost"), "Spark Connect"),
        (("--address", "auto"), "--address is not for engine spark, which takes --master"),
    ],
)
def test_a_master_that_cannot_be_used(cli: Cli, flags: tuple[str, ...], words: str) -> None:
    done = cli("train", "--engine", "spark", *flags)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def left_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith("torchinductor_")]  # torch's cache stays


def test_ctrl_c_leaves_nothing_and_the_run_goes_on_bit_for_bit(at_home: Run, workplace: Path, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    environment = cli_environment(**{MARK: mark, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)})
    run = RunFolder(workplace / "runs" / "stopped")
    before = {path.name for path in workplace.iterdir()}
    (workplace / "wait-0-9").touch()
    process = subprocess.Popen(
        [SYNCLINE, "train", *FLAGS, "--engine", "spark", "--run-dir", str(run.path)], env=environment, cwd=workplace,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    with killed_at_end(process):
        wait_until(lambda: (workplace / "waits").exists() or process.poll() is not None, 120, "the ninth step")
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    (workplace / "wait-0-9").unlink()
    (workplace / "waits").unlink()
    assert process.returncode == 130
    assert said.splitlines()[-1].endswith(f"with: syncline train --resume {run.path} --engine spark")
    assert "Traceback" not in said
    wait_until(lambda: not marked_processes(mark), 15, "every process gone")
    assert not left_in(tmp_path)
    resumed = subprocess.run(
        [SYNCLINE, "train", "--resume", str(run.path), "--engine", "spark", "--json"], env=environment, cwd=workplace,
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert json.loads(resumed.stdout)["weights_sha256"] == weights(at_home)
    assert {path.name for path in workplace.iterdir()} == before | {"runs"}
    assert not marked_processes(mark)
    assert not left_in(tmp_path)
