"""Method mpi: exact verbs, the same training as bucketed, blame, ends, and that nothing is left behind."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import mpi_programs as programs
import pytest
from conftest import Cli, any_alive, entries, is_alive, living_pids, read_quietly, wait_until
from helpers import expected_mean, gradients, integer_loss, integer_model, on_threads

from syncline import worker
from syncline.comm import Communicator
from syncline.comm.mpi_backend import connect_mpi
from syncline.errors import DeadlineError, PlanError, RankFailed, UsageError
from syncline.launcher.adopt import is_rank_variable, placement_from_environment
from syncline.launcher.here import run_ranks
from syncline.launcher.mpi import mpiexec_command, run_ranks_mpi
from syncline.plan import Plan, parse_plan
from syncline.rank import backend_of
from syncline.spans import EventLog
from syncline.store import create_run
from syncline.sync import make_sync
from syncline.voice import Voice

pytestmark = pytest.mark.xdist_group("measures")

MPIEXEC = Path(sys.executable).with_name("mpiexec")
HAS_MPIEXEC = MPIEXEC.exists() or shutil.which("mpiexec") is not None
HAS_MPI4PY = importlib.util.find_spec("mpi4py") is not None
needs_mpi = pytest.mark.skipif(not (HAS_MPIEXEC and HAS_MPI4PY), reason="mpi4py or mpiexec is not installed")

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "PMI_RANK": "5",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize("variables", [OPEN_MPI, MPICH, SLURM])
def test_placement_under_mpiexec(variables: dict[str, str]) -> None:
    place = placement_from_environment(variables)
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (5, 8, 1, 4)
    assert (place.host_index, place.num_hosts, place.launcher) == (1, 2, "mpi")
    assert (place.master_addr, place.master_port) == ("", 0)


def test_torchrun_wins_and_a_batch_script_is_no_rank() -> None:
    place = placement_from_environment({**MPICH, **TORCHRUN})
    assert place is not None
    assert (place.rank, place.world_size, place.master_port) == (0, 1, 29500)
    batch_script = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert placement_from_environment(batch_script) is None


@pytest.mark.parametrize(
    ("variables", "name", "text", "words"),
    [
        (MPICH, "PMI_SIZE", "", "but not PMI_SIZE"),
        (MPICH, "MPI_LOCALRANKID", "", "but not MPI_LOCALRANKID"),
        (MPICH, "PMI_RANK", "8", "variable PMI_RANK "),
        (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK", "4", "variable OMPI_COMM_WORLD_LOCAL_RANK "),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "many", "OMPI_COMM_WORLD_SIZE is 'many'"),
    ],
)
def test_wrong_variable_of_mpiexec_is_named(variables: dict[str, str], name: str, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        placement_from_environment({**variables, name: text})


def test_variables_of_mpiexec_are_not_passed_on() -> None:
    assert all(map(is_rank_variable, [*OPEN_MPI, *MPICH, "HYDI_CONTROL_FD", "PMIX_RANK"]))


def test_missing_mpi4py_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(PlanError, match=r"method mpi needs mpi4py: pip install 'syncline\[mpi\]'"):
        connect_mpi(timedelta(seconds=1))


def test_missing_mpiexec_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"mpiexec, which is not installed\. Install it with pip install mpich"):
        run_ranks_mpi(programs.late, workers=1, log_dir=None)


def test_mpiexec_of_open_mpi_may_share_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "mpiexec"
    fake.write_text("#!/bin/sh\necho 'mpiexec (Open MPI) 5.0.11'\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    command = mpiexec_command(4)
    assert command[:3] == [str(fake), "-n", "4"]
    assert "--oversubscribe" in command
    assert ("--allow-run-as-root" in command) == (os.geteuid() == 0)


def test_plan_takes_the_options_that_mean_something() -> None:
    options = {
        "bucket_cap_mb": 1.0,
        "collective": "ring",
        "overlap": True,
        "transfer_dtype": "bf16",
        "unused": "zero",
    }
    assert parse_plan({"method": "mpi", "options": options}).options_for("mpi") == options
    with pytest.raises(PlanError, match="method mpi has no option groups"):
        parse_plan({"method": "mpi", "options": {"groups": 2}})
    with pytest.raises(PlanError, match="method mpi averages in the memory of the CPU"):
        parse_plan({"method": "mpi", "device": "cuda"})


def test_method_averages_exactly_on_threads() -> None:
    def live(comm: Communicator, _: EventLog) -> dict[str, Any]:
        model = integer_model("cnn")
        sync = make_sync("mpi", comm)
        integer_loss(sync.attach(model), comm.rank).backward()
        sync.finish()
        return gradients(model)

    for found in on_threads(3, live):
        assert all(found[name].equal(mean) for name, mean in expected_mean("cnn", 3).items())


def test_method_is_refused_by_name_among_ranks_of_torch() -> None:
    for refusal in run_ranks(programs.make_mpi_sync_over_gloo, workers=2, log_dir=None, threads=1):
        assert refusal.startswith("PlanError: method mpi needs ranks that mpiexec started")
        assert "syncline train --method mpi" in refusal


@needs_mpi
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_verb_is_exact_and_what_cannot_work_is_refused(workers: int) -> None:
    for rank, found in enumerate(run_ranks_mpi(programs.every_verb, workers=workers, log_dir=None, threads=1)):
        assert found["place"] == (rank, workers, 0)
        assert "MPI cannot add up bfloat16" in found["half"]
        assert 'options.collective = "ring"' in found["half"]
        assert found["open to others"] == []
        assert found["segments"] == [], "shared memory that a killed rank would leave behind"
        if workers > 1:
            for number, dtype in ((0, "float32"), (1, "float64")):
                assert f"rank {number} calls all_reduce {dtype} [3] at " in found["contract"]


@needs_mpi
def test_wait_ends_at_the_deadline_without_burning_a_core() -> None:
    assert run_ranks_mpi(programs.late, workers=2, log_dir=None) == ["DeadlineError('the deadline passed.')", ""]


@needs_mpi
def test_rank_that_is_stopped_at_the_start_is_named_and_ended_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a deadline MPI's start would wait for ever."""
    with pytest.raises(DeadlineError, match=r"^MPI did not start within 2 s; missing: rank 1\. "):
        run_ranks_mpi(programs.stopped_at_start, workers=2, log_dir=tmp_path)


@needs_mpi
def test_rank_0_that_is_stopped_is_named_and_ended_at_the_deadline(tmp_path: Path) -> None:
    """Its store would answer nobody: the launcher's does."""
    with pytest.raises(RankFailed, match=r"\[rank 1\] DeadlineError: .* did not end .*; missing: rank 0\. "):
        run_ranks_mpi(programs.stopped_later, workers=2, log_dir=tmp_path)


@needs_mpi
def test_start_under_another_mpiexec_has_a_deadline_too(tmp_path: Path) -> None:
    program = "import mpi_programs; mpi_programs.stopped_at_start()"
    command = [*mpiexec_command(2), sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    before = mpich_segments()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    # MPICH's own, which nobody of ours watches there: a rank that ends while MPI starts leaves it behind.
    for segment in mpich_segments() - before:
        if not any(os.fsencode(segment) in read_quietly(maps) for maps in Path("/proc").glob("[0-9]*/maps")):
            segment.unlink(missing_ok=True)
    assert done.returncode != 0
    assert "in connect_mpi" in done.stderr


def mpich_segments() -> set[Path]:
    return set(Path("/dev/shm").glob("mpich_shm_*"))


def test_inherited_listener_is_kept_within_the_machine() -> None:
    with socket.create_server(("0.0.0.0", 0)) as listener:
        inherited = os.dup(listener.fileno())
        program = "from syncline.launcher.mpi.supervisor import keep_within_machine as keep; keep()"
        subprocess.run([sys.executable, "-c", program], pass_fds=[inherited], check=True, timeout=60)
        os.close(inherited)
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).startswith(b"lo\0")


@needs_mpi
def test_training_equals_bucketed_and_resumes_bit_for_bit(cli: Cli, tmp_path: Path) -> None:
    flags = {"model": "cnn", "data": "synthetic", "workers": 2, "threads": 1, "global_batch": 13, "steps": 6}
    settings: dict[str, Any] = {**flags, "checkpoint": {"every": 2}, "evaluate": False, "log_every": 1}
    plans = [Plan(**settings, method="mpi")]
    for name in ("whole", "broken"):
        create_run(tmp_path / "runs" / f"mpi-{name}", kind="train", plan=plans[0], label="")
    arguments = (plans, str(tmp_path / "runs"), 5)
    digests = run_ranks_mpi(programs.digests, arguments, workers=2, log_dir=tmp_path / "logs", threads=1)[0]
    assert len(set(digests["mpi"])) == 1

    (tmp_path / "work" / "plan.toml").write_text(plans[0].to_toml())
    done = cli("train", "plan.toml", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["weights_sha256"] == digests["mpi"][0]
    plan = plans[0].replace(method="bucketed")
    run = create_run(tmp_path / "runs" / "bucketed", kind="train", plan=plan, label="")
    control = run_ranks(worker.train, (plan, run, False, Voice()), workers=2, log_dir=None, threads=1)[0]
    losses = [[line["loss"] for line in summary["losses"]] for summary in (found, control)]
    assert len(losses[0]) == 6
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@needs_mpi
def test_another_mpiexec_runs_the_worker_and_an_error_on_one_rank_ends_all(tmp_path: Path) -> None:
    plan = Plan(model="mlp", data="synthetic", workers=2, threads=1, global_batch=8, steps=2, evaluate=False)
    (tmp_path / "mpi.toml").write_text(plan.replace(method="mpi").to_toml())
    command = [*mpiexec_command(2), sys.executable, "-m", "syncline.worker", "mpi.toml", "--run-dir", "run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "weights " in done.stdout
    # Only rank 0 sees that the run folder is taken; rank 1 waits to be told where it is.
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("syncline: ") == 1


def test_other_methods_on_several_hosts_of_mpiexec_need_a_place_to_meet() -> None:
    place = placement_from_environment(MPICH)
    assert place is not None
    with pytest.raises(PlanError, match="on several hosts where to meet, which method ddp needs"):
        backend_of(Plan(method="ddp", workers=8), place)


@needs_mpi
def test_output_of_rank_0_stays_and_others_go_to_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With a function inside a function, on more ranks than most laptops have cores; results by rank."""

    def say_rank() -> int:
        place = placement_from_environment()
        assert place is not None
        print("rank", place.rank)
        return place.rank

    assert run_ranks_mpi(say_rank, workers=4, log_dir=tmp_path) == [0, 1, 2, 3]
    assert capfd.readouterr().out == "rank 0\n"
    assert (tmp_path / "rank-3.stdout.log").read_text() == "rank 3\n"
    assert not (tmp_path / "mpiexec.log").exists()


@needs_mpi
def test_long_temporary_path_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / ("long" * 25)
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    assert len(run_ranks_mpi(os.getpid, workers=2, log_dir=None, threads=1)) == 2
    assert list(scratch.iterdir()) == []


@needs_mpi
def test_own_exception_is_blamed_while_others_are_in_a_collective() -> None:
    with pytest.raises(RankFailed, match="fault of rank") as caught:
        run_ranks_mpi(programs.raise_on, (1,), workers=3, log_dir=None)
    assert caught.value.rank == 1
    assert "in raise_on" in caught.value.traceback_text


@contextmanager
def launcher_process(
    function: str, workers: int, tmp_path: Path
) -> Iterator[tuple[subprocess.Popen[str], list[int], Callable[[], list[int]]]]:
    """A launcher, its ranks' pids, and a function that finds every process that it has led to."""
    ready, scratch = tmp_path / "ready", tmp_path / "scratch"
    ready.mkdir()
    scratch.mkdir()
    segments = entries(Path("/dev/shm"))
    process = subprocess.Popen(
        [sys.executable, programs.__file__, function, str(workers)],
        env={**os.environ, "TEST_READY": str(ready), "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )

    def family() -> list[int]:
        mark = f"TEST_READY={ready}".encode()
        return [pid for pid in living_pids() if mark in read_quietly(Path(f"/proc/{pid}/environ")).split(b"\0")]

    with process:
        try:
            wait_until(lambda: len(list(ready.glob("*.pid"))) == workers, 60, "all ranks ready")
            yield process, [int((ready / f"{rank}.pid").read_text()) for rank in range(workers)], family
            wait_until(lambda: not family(), 60, "nobody left")
            assert list(scratch.iterdir()) == []
            left = entries(Path("/dev/shm")) - segments
            assert [name for name in left if name.startswith(("mpich", "sm_segment", "ucx"))] == []
        finally:
            process.kill()


@needs_mpi
def test_killed_rank_is_blamed(tmp_path: Path) -> None:
    with launcher_process("all_reduce_for_ever", 3, tmp_path) as (process, pids, _):
        os.kill(pids[1], signal.SIGKILL)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert out.startswith("RankFailed: [rank 1] killed by SIGKILL"), out + err


@needs_mpi
def test_everyone_ends_when_mpiexec_is_killed(tmp_path: Path) -> None:
    with launcher_process("block_in_a_collective", 2, tmp_path) as (process, pids, family):
        (mpiexec,) = [pid for pid in family() if parent_of(pid) == process.pid]
        assert mpiexec not in pids
        os.kill(mpiexec, signal.SIGKILL)
        out, _ = process.communicate(timeout=60)
        assert out.startswith("RankFailed: mpiexec was killed by SIGKILL, and its ranks with it."), out


@needs_mpi
@pytest.mark.parametrize("function", ["block_in_a_collective", "never_get_into_mpi"])
def test_everyone_ends_when_the_launcher_is_killed(function: str, tmp_path: Path) -> None:
    with launcher_process(function, 2, tmp_path) as (process, pids, _):
        process.kill()
        wait_until(lambda: not any_alive(pids), 60, "all ranks gone")


@needs_mpi
def test_interrupt_ends_everything_with_one_line(tmp_path: Path) -> None:
    with launcher_process("block_in_a_collective", 2, tmp_path) as (process, pids, _):
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert (out, err) == ("Interrupted: Stopped by Ctrl-C; every rank has ended.\n", "")
        assert process.returncode == 130
        assert not any(map(is_alive, pids))


def parent_of(pid: int) -> int:
    return int(read_quietly(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()[1])
