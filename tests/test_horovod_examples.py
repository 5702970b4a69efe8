"""Scripts in the style of Horovod's examples, unchanged under horovodrun, mpirun and horovod.run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from horovod_examples import EXAMPLES, run_example
from test_mpi import needs_mpi

from syncline.horovod import install
from syncline.horovod.runner import launch, run

MPIRUN = Path(sys.executable).with_name("mpirun")
COMMANDS = {
    "mnist.py": "--epochs 2 --fp16-allreduce",
    "synthetic_benchmark.py": "--fp16-allreduce --batches-per-allreduce 2 --num-iters 2",
    "imagenet.py": "--epochs 2",
    "elastic.py": "--epochs 2",
}


@pytest.fixture(autouse=True)
def _named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`import horovod` works in ranks, also where it is not installed; each test has a folder of its own."""
    monkeypatch.setattr(sys, "path", [sys.path[0], str(install.COMPAT), *sys.path[1:]])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(install.COMPAT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.chdir(tmp_path)


def horovodrun(ranks: int, name: str, capfd: pytest.CaptureFixture[str], *flags: str) -> str:
    words = [*flags, "python", str(EXAMPLES / name), *COMMANDS[name].split()]
    launch.run_commandline(["-np", str(ranks), *words])
    return capfd.readouterr().out


def lines_of(text: str) -> list[str]:
    """Without what depends on how fast the machine is."""
    return [line for line in text.splitlines() if "img/sec" not in line]


def check(name: str, out: str, ranks: int) -> None:
    if name == "synthetic_benchmark.py":
        assert re.search(rf"Total img/sec on {ranks} rank\(s\): \d+\.\d \+-\d+\.\d", out), out
        return
    losses = [float(text) for text in re.findall(r"loss (\d+\.\d+)", out)]
    assert len(losses) == 2, out
    assert losses[1] < losses[0]


@pytest.mark.parametrize("name", COMMANDS)
def test_script_runs_on_three_ranks(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    check(name, horovodrun(3, name, capfd), 3)


@needs_mpi
def test_scripts_print_the_same_under_horovodrun_mpirun_and_horovod_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, dict[str, str]] = {"horovodrun": {}, "horovod.run": {}, "mpirun": {}}
    for launcher in found:
        (tmp_path / launcher).mkdir()
    for name, arguments in COMMANDS.items():
        monkeypatch.chdir(tmp_path / "horovodrun")
        found["horovodrun"][name] = horovodrun(2, name, capfd)
        check(name, found["horovodrun"][name], 2)
        monkeypatch.chdir(tmp_path / "horovod.run")
        run(run_example, (name, *arguments.split()), num_proc=2)
        found["horovod.run"][name] = capfd.readouterr().out
    commands = [f"{name} {arguments}" for name, arguments in COMMANDS.items()]
    words = [str(MPIRUN), "-np", "2", sys.executable, run_example.__code__.co_filename, *commands]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tmp_path / "mpirun", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for part in re.split(r"^== (?=\w)", done.stdout, flags=re.MULTILINE)[1:]:
        name, _, text = part.partition("\n")
        found["mpirun"][name] = text
    for name in COMMANDS:
        assert lines_of(found["horovod.run"][name]) == lines_of(found["horovodrun"][name])
        assert lines_of(found["mpirun"][name]) == lines_of(found["horovodrun"][name])


def test_imagenet_script_goes_on_from_rank_0_s_checkpoint(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    whole = horovodrun(2, "imagenet.py", capfd).splitlines()
    (tmp_path / "checkpoint-2.pt").unlink()
    assert horovodrun(2, "imagenet.py", capfd).splitlines() == whole[1:]


DYING = """
import os, runpy, signal, sys
from pathlib import Path
import horovod.torch as hvd

commit = hvd.elastic.TorchState.commit

def commit_and_die(state):
    commit(state)
    if hvd.rank() == 1 and state.epoch == 1 and not Path("died").exists():
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)

hvd.elastic.TorchState.commit = commit_and_die
sys.path.insert(0, str(Path(sys.argv[1]).parent))
script, sys.argv = sys.argv[1], sys.argv[1:]
runpy.run_path(script, run_name="__main__")
"""


def test_elastic_script_outlives_a_rank(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    script = str(EXAMPLES / "elastic.py")
    launch.run_commandline(["-np", "2", "--min-np", "2", "python", "dying.py", script, "--epochs", "3"])
    out, err = capfd.readouterr()
    assert "[rank 1] killed by SIGKILL. Going on with 2 ranks from the last commit, reset 1 of at most 20." in err
    losses = dict(re.findall(r"epoch (\d): loss (\d+\.\d+) on 2 ranks", out))
    assert list(losses) == ["1", "2", "3"]
    assert float(losses["3"]) < float(losses["1"])
