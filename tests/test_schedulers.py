"""Ranks of Slurm's srun and of mpiexec: their place from the variables, and a place to meet that nobody told them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import cli_environment, killed_at_end
from test_mpi import MPICH, OPEN_MPI, needs_mpi

from syncline.errors import UsageError
from syncline.launcher.adopt import Placement, expand_hosts, expand_tasks, placement_from_environment
from syncline.launcher.mpi import mpiexec_command
from syncline.launcher.route import Meeting, find_meeting
from syncline.launcher.starting import listening
from syncline.plan import Plan

SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_JOB_NODELIST": "login,n[08-11]",
    "SLURM_STEP_NODELIST": "n[08-10]",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "3,2(x2)",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
PLAN = Plan(
    model="mlp", data="synthetic", workers=2, threads=1, global_batch=8, steps=2, evaluate=False, method="ddp"
)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("one", ["one"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[08-10],login,gpu[1,3]-ib", ["n08", "n09", "n10", "login", "gpu1-ib", "gpu3-ib"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_host_lists_are_expanded_in_order(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["n[1-", "n[a-b]", "n[1-x]", "n[]", "n[1-999999999]"])
def test_host_list_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="host list"):
        expand_hosts(text)


def test_task_counts_are_expanded() -> None:
    assert expand_tasks("4(x2),3") == [4, 4, 3]
    with pytest.raises(UsageError, match="task counts"):
        expand_tasks("4(y2)")


def place_of(variables: dict[str, str]) -> Placement:
    place = placement_from_environment(variables)
    assert place is not None
    return place


def test_placement_under_srun() -> None:
    place = place_of(SRUN)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (4, 7, 1, 2)
    assert (place.host_index, place.num_hosts, place.launcher) == (1, 3, "slurm")
    assert place.host_names == ("n08", "n09", "n10")
    assert place_of({**SRUN, "MASTER_ADDR": "n08", "MASTER_PORT": "29500"}).master_port == 29500


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("SLURM_STEP_NUM_TASKS", "", "but not SLURM_STEP_NUM_TASKS"),
        ("SLURM_PROCID", "7", "variable SLURM_PROCID "),
        ("SLURM_LOCALID", "2", "variable SLURM_LOCALID "),
        ("SLURM_NODEID", "3", "variable SLURM_STEP_TASKS_PER_NODE "),
    ],
)
def test_contradiction_names_slurms_variable(name: str, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        placement_from_environment({**SRUN, name: text})


def test_ranks_of_one_step_meet_on_its_first_host_and_other_steps_elsewhere() -> None:
    meetings = {
        find_meeting(place_of({**SRUN, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local), "SLURM_NODEID": host}))
        for rank, local, host in ((0, 0, "0"), (3, 0, "1"), (6, 1, "2"))
    }
    (meeting,) = meetings
    assert meeting is not None
    assert meeting.address == "n08"
    assert 1024 < meeting.port < 32768
    other = find_meeting(place_of({**SRUN, "SLURM_STEP_ID": "3"}))
    assert other is not None
    assert other.port != meeting.port


def test_ranks_of_one_host_meet_on_loopback() -> None:
    one_host = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "n08"}
    meeting = find_meeting(place_of(one_host))
    assert meeting is not None
    assert (meeting.address, meeting.interface()) == ("127.0.0.1", "lo")


def test_open_mpi_names_its_job_and_several_hosts_need_a_place_told() -> None:
    one_host = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "PMIX_NAMESPACE": "prterun-vm-17@1"}
    assert find_meeting(place_of(one_host)) == find_meeting(place_of({**one_host, "OMPI_COMM_WORLD_RANK": "7"}))
    assert find_meeting(place_of(one_host)) is not None
    assert find_meeting(place_of({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-vm-17@1"})) is None
    assert find_meeting(place_of(MPICH)) is None, "this process is no child of mpiexec"


def test_port_that_is_taken_is_named() -> None:
    with listening("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"Port {port} is in use"):
            Meeting("127.0.0.1", port).listen()


def test_srun_trains_without_a_meeting_point(tmp_path: Path) -> None:
    """Two ranks with the variables that srun would give them."""
    (tmp_path / "plan.toml").write_text(PLAN.to_toml())
    job = {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "here", "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2",
    }  # fmt: skip
    command = [sys.executable, "-m", "syncline.worker", "plan.toml", "--run-dir", "run"]
    ranks = [
        subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=cli_environment(**job, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)),
        )
        for rank in range(2)
    ]  # fmt: skip
    with killed_at_end(ranks[0]), killed_at_end(ranks[1]):
        ends = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ends
    assert "weights " in ends[0][0]


@needs_mpi
def test_mpiexec_trains_with_gloo_without_a_meeting_point(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN.to_toml())
    command = [*mpiexec_command(2), sys.executable, "-m", "syncline.worker", "plan.toml", "--run-dir", "run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "weights " in done.stdout
