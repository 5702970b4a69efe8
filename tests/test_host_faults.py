"""Training on emulated hosts: as on one machine, and when a link is cut, a host dies, or a host is slow.

Every run takes the path of real machines: a node on each host, over a link of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_server import run_command
from conftest import (
    SYNCLINE,
    USER_MODEL,
    CliServer,
    cli_environment,
    command_line,
    killed_at_end,
    living_pids,
    uses,
    wait_until,
)

from syncline.launcher.emulation import EmulatedCluster, HostProcess
from syncline.launcher.places import PRELOAD
from syncline.store import RunFolder

PLAN = (
    *("--model", "user_model:Net", "--data", "synthetic", "--threads", "1", "--global-batch", "20", "--steps", "40"),
    *("--set", "checkpoint.every=4", "--set", "evaluate=false", "--set", "deadline_s=10"),
)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "user_model.py").write_text(USER_MODEL)
    return folder


@pytest.fixture
def cluster() -> Iterator[EmulatedCluster]:
    with EmulatedCluster(2, [1e9, 1e9], preload=("syncline.cli.train", *PRELOAD)) as two_hosts:
        yield two_hosts


def environment(workplace: Path, **extra: str) -> dict[str, str]:
    path = os.pathsep.join([str(workplace), *filter(None, [os.environ.get("PYTHONPATH")])])
    return cli_environment(PYTHONPATH=path, **extra)


def start(cluster: EmulatedCluster, host: int, workplace: Path, run: RunFolder, *more: str, **extra: str) -> Node:
    return Node(cluster, host, workplace, run, more, extra)


class Node:
    """`syncline train` on one host, as somebody at that machine would start it, with torch loaded already."""

    def __init__(
        self,
        cluster: EmulatedCluster,
        host: int,
        workplace: Path,
        run: RunFolder,
        arguments: tuple[str, ...],
        extra: dict[str, str],
    ) -> None:
        self.log = run.path.with_name(f"{run.path.name}-node-{host}.log")
        place = ("--nodes", "2", "--node-rank", str(host), "--rendezvous", f"{cluster.name(0)}:29500")
        with self.log.open("ab") as log:
            self.process: HostProcess = cluster.call(
                host, run_command, ["train", *PLAN, *place, *arguments, "--run-dir", str(run.path)],
                env=environment(workplace, TMPDIR="/dev/shm", **extra), cwd=workplace,
                stdout=subprocess.DEVNULL, stderr=log,
            )  # fmt: skip

    @property
    def errors(self) -> str:
        return self.log.read_text()

    def end(self, seconds: float = 30) -> tuple[int, str]:
        """Exit code and the last line on stderr."""
        code = self.process.wait(seconds)
        return code, self.errors.splitlines()[-1]


def wait_for_step(run: RunFolder, step: int, *nodes: Node) -> None:
    def reached() -> bool:
        return (run.checkpoint_step() or 0) >= step or any(node.process.poll() is not None for node in nodes)

    wait_until(reached, 90, f"a checkpoint of step {step}")
    assert (run.checkpoint_step() or 0) >= step, [node.errors for node in nodes]


@pytest.fixture(scope="module")
def untroubled(workplace: Path, cli_server: CliServer) -> str:
    """The weights of a run on one machine that nothing happened to."""
    command = ("train", *PLAN, "--workers", "2", "--run-dir", "untroubled", "--json")
    done = cli_server.run(command, workplace, environment(workplace))
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["weights_sha256"])


def test_emulated_hosts_train_to_the_weights_of_one_machine(
    workplace: Path, untroubled: str, cli_server: CliServer
) -> None:
    command = ("train", *PLAN, "--hosts", "2", "--link", "1gbit,500mbit", "--run-dir", "hosts", "--json")
    done = cli_server.run(command, workplace, environment(workplace))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["weights_sha256"] == untroubled
    assert "node 0 of 2: 10.0.0.1 on eth0" in done.stderr
    plan = RunFolder(workplace / "hosts").plan()
    assert (plan.hosts, plan.workers, plan.link) == (2, 2, "1gbit,500mbit")
    assert [path.name for path in sorted((workplace / "hosts" / "events").iterdir())] == [
        "rank-0.blocks",
        "rank-1.blocks",
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_emulated_hosts_end_with_the_command_and_leave_nothing(number: int, workplace: Path, tmp_path: Path) -> None:
    run, scratch = RunFolder(tmp_path / "run"), tmp_path / "scratch"
    scratch.mkdir()
    command = [str(SYNCLINE), "train", *PLAN, "--hosts", "2", "--run-dir", str(run.path)]
    process = subprocess.Popen(
        command, env=environment(workplace, SLOW="0.1", TMPDIR=str(scratch)), stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, cwd=workplace, start_new_session=True,
    )  # fmt: skip
    with killed_at_end(process):
        wait_until(lambda: run.checkpoint_step() or process.poll() is not None, 90, "a checkpoint")
        os.killpg(process.pid, number)
        _, errors = process.communicate(timeout=30)
    wait_until(lambda: not users_of(run.path), 60, "every process gone")
    assert list(scratch.iterdir()) == []
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
        return
    assert process.returncode == 130, errors
    said = [line for line in errors.splitlines() if not line.startswith("Warning: ")]
    assert len(said) == 1, errors
    assert said[0].startswith("syncline: Stopped by Ctrl-C on host host0; every rank has ended.")
    assert said[0].endswith(f"with: syncline train --resume {run.path}")
    assert run.info()["status"] == "stopped"


def users_of(folder: Path) -> list[int]:
    """Living processes that were started for this run: by what they were told, or what they have open."""
    told = [pid for pid in living_pids() if str(folder) in command_line(pid)]
    return [*told, *(pid for pid in living_pids() if uses(pid, folder))]


def test_host_that_dies_and_link_that_is_cut_leave_the_weights_as_they_would_be(
    cluster: EmulatedCluster, workplace: Path, untroubled: str, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    options = ("--max-restarts", "2")
    first = start(cluster, 0, workplace, run, *options, SLOW="0.1")
    second = start(cluster, 1, workplace, run, *options, SLOW="0.1")
    wait_for_step(run, 8, first, second)
    cluster.kill(1)
    wait_until(lambda: "restart 1 of 2" in first.errors, 30, "node 0 noticed the dead host")
    assert "host host1 (node 1, 10.0.0.2) is lost: its connection closed." in first.errors
    second = start(cluster, 1, workplace, run, *options, SLOW="0.1")
    wait_for_step(run, 20, first, second)
    cluster.cut(1)
    wait_until(lambda: "restart 2 of 2" in first.errors, 30, "node 0 noticed the cut")
    wait_until(lambda: "Trying to reach it again" in second.errors, 30, "node 1 noticed the cut")
    cluster.restore(1)
    assert first.process.wait(60) == 0, first.errors
    assert second.process.wait(30) == 0, second.errors
    assert "host host1 (node 1, 10.0.0.2) is lost: it has been silent for 10 s." in first.errors
    summary = run.summary()
    assert summary is not None
    assert summary["weights_sha256"] == untroubled
    assert summary["timed_steps"] <= 20


def test_cut_link_is_named_on_both_sides(cluster: EmulatedCluster, workplace: Path, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    nodes = [start(cluster, host, workplace, run, SLOW="0.1") for host in range(2)]
    wait_for_step(run, 4, *nodes)
    cluster.cut(1)
    ends = [node.end() for node in nodes]
    assert ends[0] == (1, "syncline: host host1 (node 1, 10.0.0.2) is lost: it has been silent for 10 s.")
    assert ends[1][0] == 1
    assert ends[1][1].startswith("syncline: the rendezvous, host host0 (node 0, 10.0.0.1), is lost"), ends[1]
    assert run.info()["status"] == "failed"


def test_loss_of_the_rendezvous_host_is_named(cluster: EmulatedCluster, workplace: Path, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    nodes = [start(cluster, host, workplace, run, "--max-restarts", "3", SLOW="0.1") for host in range(2)]
    wait_for_step(run, 4, *nodes)
    cluster.kill(0)
    code, line = nodes[1].end()
    assert code == 1
    assert line.startswith("syncline: the rendezvous, host host0 (node 0, 10.0.0.1), is lost: "), line


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("ddp", "Still busy while the others waited: host host1 (node 1, 10.0.0.2)."),  # torch names nobody
        ("bucketed", "missing: rank 1 on host host1."),
    ],
)
def test_slow_host_is_named(
    method: str, words: str, cluster: EmulatedCluster, workplace: Path, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    slow = ("0", "60")
    nodes = [start(cluster, host, workplace, run, "--method", method, SLOW=slow[host]) for host in range(2)]
    for node in nodes:
        assert node.process.wait(90) == 1
        assert "[rank 0 on host host0] " in node.errors
        assert words in node.errors
