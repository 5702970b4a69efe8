"""The launcher's pure parts: placement from the environment, kinds of errors, and the verdict on a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import launcher_programs as programs
import pytest
import torch.distributed as dist

from syncline.comm.torch_backend import _Start
from syncline.errors import (
    ContractError,
    DeadlineError,
    PeerLostError,
    PlanError,
    RankFailed,
    SynclineError,
    UsageError,
)
from syncline.launcher import outcome
from syncline.launcher.adopt import Placement, placement_from_environment
from syncline.launcher.here import host_ranks, run_ranks
from syncline.launcher.outcome import Ending, OutcomeFile, Patience, judge, kind_of, read_outcome

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job",
}
WELL = Ending(exit_code=0, last_alive=0.0, asked=False, forced=False)
TOLD_TO_STOP = Ending(exit_code=143, last_alive=5.0, asked=True, forced=False)


def test_no_launcher_means_no_placement() -> None:
    assert placement_from_environment({"MASTER_ADDR": "somewhere"}) is None


def test_placement_under_torchrun() -> None:
    place = placement_from_environment(TORCHRUN)
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (5, 8, 1, 4)
    assert (place.host_index, place.num_hosts, place.run_id) == (1, 2, "job")
    assert (place.master_addr, place.master_port, place.launcher) == ("10.0.0.1", 29500, "torchrun")


def test_hosts_follow_from_sizes_where_they_are_not_said() -> None:
    place = placement_from_environment({k: v for k, v in TORCHRUN.items() if "GROUP" not in k})
    assert place is not None
    assert (place.host_index, place.num_hosts) == (1, 2)


@pytest.mark.parametrize(
    "name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
)
def test_missing_variable_is_named(name: str) -> None:
    with pytest.raises(UsageError, match=f"but not {name}"):
        placement_from_environment({k: v for k, v in TORCHRUN.items() if k != name})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("RANK", "8"),
        ("RANK", "-1"),
        ("RANK", "one"),
        ("WORLD_SIZE", "0"),
        ("LOCAL_RANK", "4"),
        ("LOCAL_WORLD_SIZE", "9"),
        ("GROUP_RANK", "2"),
        ("GROUP_WORLD_SIZE", "1"),
        ("GROUP_WORLD_SIZE", "9"),
        ("MASTER_PORT", "70000"),
    ],
)
def test_contradiction_names_the_variable(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"variable {name} "):
        placement_from_environment({**TORCHRUN, name: text})


def chained(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("Connection closed by peer"), "own"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "own"),
        (ContractError("shapes differ"), "own"),
        (chained(ContractError("shapes differ"), DeadlineError("late")), "own"),
        (DeadlineError("late"), "communication"),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer"), "communication"),
        (chained(ValueError("step failed"), RuntimeError("Broken pipe")), "communication"),
        (dist.DistNetworkError("gone"), "communication"),
        (SystemExit(3), "own"),
    ],
)
def test_kind_of_error(error: BaseException, kind: str) -> None:
    assert kind_of(error) == kind


def test_first_final_state_stands(tmp_path: Path) -> None:
    outcome = OutcomeFile(tmp_path, 0)
    outcome.raised(ValueError("first"))
    outcome.stopped("SIGTERM")
    final = read_outcome(tmp_path, 0)
    assert final is not None
    assert (final.state, final.message, final.pid) == ("raised", "first", os.getpid())


def judged(log_dir: Path, endings: list[Ending], *, keeps_logs: bool) -> SynclineError:
    return judge(log_dir, dict(enumerate(endings)), keeps_logs=keeps_logs)


def test_own_failure_comes_before_earlier_echo(tmp_path: Path) -> None:
    OutcomeFile(tmp_path, 0).raised(DeadlineError("late"))
    OutcomeFile(tmp_path, 1).raised(ValueError("mine"))
    OutcomeFile(tmp_path, 2).raised(ValueError("mine too"))
    error = judged(tmp_path, [WELL, WELL, WELL], keeps_logs=False)
    assert str(error) == "[rank 1] ValueError: mine (1 other rank failed too)"


def test_process_killed_by_another_is_told_from_those_that_the_launcher_ended(tmp_path: Path) -> None:
    for rank in range(3):
        OutcomeFile(tmp_path, rank)
    OutcomeFile(tmp_path, 0).raised(DeadlineError("late"))
    by_us = Ending(exit_code=-9, last_alive=1.0, asked=True, forced=True)
    by_others = Ending(exit_code=-9, last_alive=3.0, asked=True, forced=False)
    error = judged(tmp_path, [WELL, by_us, by_others], keeps_logs=False)
    assert isinstance(error, RankFailed)
    assert error.rank == 2
    assert "SIGKILL" in str(error)
    assert "out of memory" in str(error)


def test_rank_that_never_started_is_blamed(tmp_path: Path) -> None:
    OutcomeFile(tmp_path, 0)
    error = judged(tmp_path, [TOLD_TO_STOP, Ending(1, 0.0, False, False)], keeps_logs=False)
    assert (error.rank, "before it could start" in str(error)) == (1, True)


def test_all_stopped_is_still_an_error(tmp_path: Path) -> None:
    OutcomeFile(tmp_path, 0).stopped("SIGINT")
    assert "from outside" in str(judged(tmp_path, [TOLD_TO_STOP], keeps_logs=False))


def test_usage_error_survives_an_unpicklable_attribute(tmp_path: Path) -> None:
    error = PlanError("bad key", action="Remove it.")
    error.__dict__["handle"] = (tmp_path / "open").open("w")
    OutcomeFile(tmp_path, 0).raised(error)
    error.__dict__["handle"].close()
    assert str(judged(tmp_path, [WELL], keeps_logs=False)) == "bad key Remove it."


def test_log_files_are_named_where_they_stay(tmp_path: Path) -> None:
    """Rank 0's output is on the terminal, and files without a word are not worth naming."""
    OutcomeFile(tmp_path, 0).finished()
    OutcomeFile(tmp_path, 1).raised(ValueError("mine"))
    for stream in ("stdout", "stderr"):
        (tmp_path / f"rank-1.{stream}.log").touch()
    assert str(judged(tmp_path, [WELL, WELL], keeps_logs=True)) == "[rank 1] ValueError: mine"
    (tmp_path / "rank-1.stderr.log").write_text("words")
    assert "rank-1.stderr.log" not in str(judged(tmp_path, [WELL, WELL], keeps_logs=False))
    error = judged(tmp_path, [WELL, WELL], keeps_logs=True)
    assert error.action == f"Its output is in {tmp_path}/rank-1.stderr.log."
    OutcomeFile(tmp_path, 0).raised(ValueError("mine"))
    OutcomeFile(tmp_path, 1).finished()
    assert judged(tmp_path, [WELL, WELL], keeps_logs=True).action == f"Other ranks' output is in {tmp_path}."


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_rank_of_another_launcher_ends_with_its_parent(number: int, tmp_path: Path) -> None:
    """The child tells its pid, watches its parent and sleeps; on_stop leaves a note."""
    child = (
        "import os, sys, time; from syncline.launcher import watch; watch.watch_parent();"
        "watch.on_stop(lambda: open('note', 'w').close()); print(os.getpid(), flush=True); time.sleep(600)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    with process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        victim = process.pid if number == signal.SIGKILL else pid
        os.kill(victim, number)
        deadline = time.monotonic() + 10
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.kill()
    assert (tmp_path / "note").exists()


def test_fork_server_ends_without_taking_torch_apart_and_ranks_end_as_ever() -> None:
    """The first exit function to be registered is the last to run: the server does not come to it, its child does."""
    program = (
        "import atexit, os, sys; atexit.register(os.write, 1, b'end of %s' % sys.argv[1].encode())\n"
        "import syncline.launcher.quick_end\n"
        "if sys.argv[1] == 'rank' and os.fork(): os.wait()\n"
    )
    said = {
        who: subprocess.run([sys.executable, "-c", program, who], capture_output=True, check=True, timeout=60).stdout
        for who in ("server", "rank")
    }
    assert said == {"server": b"", "rank": b"end of rank"}


@pytest.mark.parametrize(
    ("error", "longest"), [(DeadlineError("late"), 0.5), (PeerLostError("the connection broke"), 2.0)]
)
def test_cause_has_less_time_to_show_after_a_deadline(
    error: Exception, longest: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever was waited for has had the deadline."""
    now = [100.0]
    monkeypatch.setattr(outcome, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    OutcomeFile(tmp_path, 0).raised(error)
    OutcomeFile(tmp_path, 1)
    patience = Patience(tmp_path)
    assert not patience.is_over({0: 1, 1: None})
    now[0] += longest - 0.1
    assert not patience.is_over({0: 1, 1: None})
    now[0] += 0.2
    assert patience.is_over({0: 1, 1: None})


def test_outcome_file_is_plain_json(tmp_path: Path) -> None:
    OutcomeFile(tmp_path, 3).finished()
    assert json.loads((tmp_path / "outcomes" / "rank-3.json").read_text())["state"] == "finished"


def test_rank_that_is_stopped_at_the_start_is_named_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would name a key of its store."""
    monkeypatch.setattr(host_ranks, "_STOP_SECONDS", 200)  # for ranks that can answer
    with pytest.raises(RankFailed) as caught:
        run_ranks(programs.stop_at_start, (1, 2.0), workers=3, log_dir=None)
    assert "DeadlineError: " in str(caught.value)
    assert "rank 1 did not join the others within 2 s." in str(caught.value)
    assert "Rank 1 had been stopped (SIGSTOP, Ctrl-Z or a debugger)." in str(caught.value)


@pytest.mark.parametrize("frozen", [0, 2])
def test_rank_that_does_not_connect_is_named_by_those_that_waited(frozen: int) -> None:
    """As after torch's own error: ranks that give up say so, and the others are what they waited for."""
    store = dist.HashStore()

    def live(rank: int) -> str:
        place = replace(PLACE, rank=rank)
        if rank == frozen:
            return ""
        try:
            _Start(store, place, 10.0).wait_for_all("tried", 0.3, "did not connect to the others")
        except DeadlineError as error:
            return str(error)
        return "all came"

    with ThreadPoolExecutor() as pool:
        told = list(pool.map(live, range(4)))
    for rank in {0, 1, 2, 3} - {frozen}:
        host = "ab"[frozen // 2]
        expected = f"[rank {rank}] rank {frozen} on host {host} did not connect to the others within 10 s."
        assert told[rank].startswith(expected)


PLACE = Placement(0, 4, 0, 2, 0, 2, "127.0.0.1", 1, "syncline", "run", host_names=("a", "b"))
