"""`syncline cluster file slurm` on a real Slurm: slurmctld and two slurmd, each on an emulated host of its own.

Whatever happens to a test, the daemons and all their jobs end with their hosts.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import SYNCLINE, USER_MODEL, Cli, cli_environment, wait_until
from test_own_data import losses

from syncline.launcher.emulation import EmulatedCluster

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed: no {', '.join(MISSING)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd needs root"),
]

CONFIGURATION = """
ClusterName=test
SlurmctldHost=host0
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
NodeName=host[0-1] CPUs={cores} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
PLAN = """
model = "mlp"
data = "synthetic"
workers = 2
threads = 1
global_batch = 16
steps = 4
log_every = 1
evaluate = false
"""


@dataclass
class Slurm:
    hosts: EmulatedCluster
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        path = f"{SYNCLINE.parent}:{os.environ['PATH']}"
        return cli_environment(SLURM_CONF=str(self.folder / "slurm.conf"), PATH=path)

    def say(self, *command: object, cwd: Path | None = None, **extra: str) -> tuple[int, str]:
        """Exit code and output of a command on host0."""
        process = self.hosts.popen(
            0, [str(word) for word in command], cwd=cwd, env={**self.environment, **extra},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert process.stdout is not None
        text = process.stdout.read().decode()
        code = process.wait(60)
        process.close()
        return code, text

    def submit(self, folder: Path, *arguments: object, **extra: str) -> str:
        code, text = self.say("sbatch", "job.sh", *arguments, cwd=folder, **extra)
        assert code == 0, text
        return text.split()[-1]

    def state(self, job: str) -> str:
        code, text = self.say("scontrol", "show", "job", job)
        found = re.search(r"JobState=(\w+)", text)
        assert code == 0, text
        assert found is not None
        return found[1]

    def end_of(self, job: str, seconds: float = 120) -> str:
        """The state of a job that has ended on all nodes."""
        running = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
        wait_until(lambda: self.state(job) not in running, seconds, f"job {job} ends; {self.state(job)}")
        return self.state(job)

    def processes(self) -> list[str]:
        """Commands of Syncline and of jobs' steps on both hosts."""
        found = []
        for host in range(2):
            process = self.hosts.popen(host, ["sh", "-c", "cat /proc/[0-9]*/cmdline"], stdout=subprocess.PIPE)
            assert process.stdout is not None
            found += re.findall(r"syncline\0train|slurmstepd", process.stdout.read().decode(errors="replace"))
            process.wait(30)
            process.close()
        return found


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    text = CONFIGURATION.format(folder=folder, cores=os.cpu_count())
    (folder / "slurm.conf").write_text(text)
    with EmulatedCluster(2, [1e9, 1e9]) as hosts, (folder / "daemons.log").open("wb") as log:
        slurm = Slurm(hosts, folder)
        for host, daemon in ((0, "slurmctld"), (0, "slurmd"), (1, "slurmd")):
            hosts.popen(host, [daemon, "-D"], env=slurm.environment, stdout=log, stderr=log)
        wait_until(lambda: slurm.say("sinfo", "-hN")[1].count("idle") == 2, 60, "both nodes are ready")
        yield slurm


@pytest.fixture
def made(cli: Cli, tmp_path: Path) -> Path:
    """A folder with a plan and the job file that `cluster file` makes of it."""
    folder = tmp_path / "work"
    (folder / "plan.toml").write_text(PLAN)
    return remade(cli, folder)


def remade(cli: Cli, folder: Path) -> Path:
    done = cli("cluster", "file", "slurm", "--plan", "plan.toml", "--nodes", 2, "--hours", 0.1, cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "job.sh").write_text(done.stdout)
    return folder


def test_job_on_two_nodes_computes_what_one_machine_does(slurm: Slurm, made: Path, cli: Cli) -> None:
    job = slurm.submit(made)
    state = slurm.end_of(job)
    log = (made / f"syncline-{job}.log").read_text()
    assert state == "COMPLETED", log
    assert "2 nodes have joined" in log
    assert "progress and results are on host host0" in (made / f"syncline-{job}.node1.log").read_text()
    (run,) = (path for path in (made / "runs").iterdir() if path.is_dir())
    at_home = cli("train", "plan.toml", "--run-dir", "home", cwd=made)
    assert at_home.returncode == 0, at_home.stderr
    assert losses(run) == losses(made / "home")
    assert len(losses(run)) == 4


@pytest.fixture
def slow(made: Path, cli: Cli) -> Path:
    """The same with a user's own model, which says which processes it lives in, and many steps."""
    (made / "user_model.py").write_text(USER_MODEL)
    plan = PLAN.replace('"mlp"', '"user_model:Net"').replace("steps = 4", "steps = 120")
    (made / "plan.toml").write_text(f"{plan}checkpoint = {{every = 5}}\n")
    (made / "pids").mkdir()
    return remade(cli, made)


def begun(slurm: Slurm, folder: Path) -> str:
    job = slurm.submit(folder, PIDS=str(folder / "pids"), SLOW="0.1")
    wait_until(lambda: [*folder.glob("runs/*/checkpoints/step-*")], 120, "there is a checkpoint")
    return job


def words_of(folder: Path, job: str) -> str:
    """What Syncline said at the end of the job: one line."""
    log = (folder / f"syncline-{job}.log").read_text()
    (line,) = re.findall(r"^syncline: (.*)$", log, re.MULTILINE)
    return str(line)


def test_job_whose_rank_is_killed_names_it_and_leaves_nothing(slurm: Slurm, slow: Path) -> None:
    job = begun(slurm, slow)
    rank = (slow / "pids" / "1").read_text()
    assert slurm.hosts.popen(1, ["kill", "-KILL", rank]).wait(30) == 0
    assert slurm.end_of(job) == "FAILED"
    assert words_of(slow, job).startswith("[rank 1 on host host1] killed by SIGKILL.")
    wait_until(lambda: not slurm.processes(), 30, "all processes of the job end")


def test_job_that_is_cancelled_leaves_nothing_and_goes_on_later(slurm: Slurm, slow: Path) -> None:
    job = begun(slurm, slow)
    assert slurm.say("scancel", job)[0] == 0
    assert slurm.end_of(job) == "CANCELLED"
    assert re.match(r"Stopped by SIGTERM on host host[01]; every rank has ended\.", words_of(slow, job))
    wait_until(lambda: not slurm.processes(), 30, "all processes of the job end")
    (run,) = (path for path in (slow / "runs").iterdir() if path.is_dir())
    later = slurm.submit(slow, "--resume", run.relative_to(slow))
    state = slurm.end_of(later)
    assert state == "COMPLETED", (slow / f"syncline-{later}.log").read_text()
    assert len(losses(run)) == 120
