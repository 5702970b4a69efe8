"""The launcher: results, blame, ends, and that nothing is left behind."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import launcher_programs as programs
import pytest
from conftest import is_alive, killed_at_end, session_members, wait_until

import syncline
from syncline.errors import DataError, RankFailed, UsageError
from syncline.launcher import watch
from syncline.launcher.here import run_ranks
from syncline.machine import cores, default_threads, oversubscription

PROGRAM = Path(programs.__file__)


def rank_pids(ready: Path, workers: int) -> list[int]:
    wait_until(lambda: len(list(ready.glob("*.pid"))) == workers, 60, "all ranks ready")
    return [int((ready / f"{rank}.pid").read_text()) for rank in range(workers)]


@contextmanager
def launcher_process(
    function: str, workers: int, tmp_path: Path, *, log_dir: str = ""
) -> Iterator[tuple[subprocess.Popen[str], list[int], Path]]:
    """A launcher in a process group of its own, with its ranks' pids and the folder for its temporary files."""
    ready, scratch = tmp_path / "ready", tmp_path / "scratch"
    ready.mkdir()
    scratch.mkdir()
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), function, str(workers), log_dir],
        env={**os.environ, "TEST_READY": str(ready), "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with killed_at_end(process):
        yield process, rank_pids(ready, workers), scratch


def test_results_come_by_rank_with_the_environment_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_LATE", "yes")
    results = run_ranks(programs.rank_and_environment, workers=3, log_dir=None)
    assert [rank for rank, _ in results] == [0, 1, 2]
    environment = results[2][1]
    assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "3"
    assert environment["LOCAL_RANK"] == "2"
    assert environment["MASTER_ADDR"] == "127.0.0.1"
    assert environment["OMP_NUM_THREADS"] == str(default_threads(3))
    assert environment["SET_LATE"] == "yes"


def test_variables_are_those_of_a_real_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, with the same values but for those that name the one run."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in [name for name in os.environ if name.startswith("TORCH")]:
        monkeypatch.delenv(name)
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, pathlib\n"
        "pathlib.Path(os.environ['RANK'] + '.json').write_text(json.dumps(dict(os.environ)))\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    torchrun += ["--max-restarts=3", "--log-dir", str(tmp_path), str(script)]
    subprocess.run(torchrun, check=True, cwd=tmp_path)
    arguments = {"workers": 2, "threads": 1, "max_restarts": 3, "log_dir": tmp_path / "logs"}
    for rank, (_, ours) in enumerate(run_ranks(programs.rank_and_environment, **arguments)):
        theirs = json.loads((tmp_path / f"{rank}.json").read_text())
        assert ours.keys() - theirs.keys() == {"SYNCLINE_LAUNCHER", "GLOO_SOCKET_IFNAME"}
        # The first is for torchrun's own process; it also measures the terminal.
        assert theirs.keys() - ours.keys() <= {"TORCHELASTIC_SIGNALS_TO_HANDLE", "COLUMNS", "LINES"}
        of_one_run = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
        assert {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]} <= of_one_run
        assert theirs["TORCHELASTIC_USE_AGENT_STORE"] == "True"


def test_all_reduce_works_and_can_be_launched_again() -> None:
    for workers in (1, 2):
        assert run_ranks(programs.all_reduce_once, workers=workers, log_dir=None) == [workers] * workers


def test_launch_takes_lambdas_and_their_surroundings() -> None:
    factor = 7
    assert syncline.launch(lambda x: x * factor, 6, workers=2, threads=1) == [42, 42]


def test_launch_passes_keyword_arguments_on() -> None:
    assert syncline.launch(lambda a, *, function, b=0: a + b + function, 1, function=2, b=3, workers=2) == [6, 6]


def test_launch_keeps_what_every_rank_wrote(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the folder that the user names, or in one that a line names."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    say = functools.partial(syncline.launch, lambda: print("rank", os.environ["RANK"]), workers=2, threads=1)
    say(log_dir=str(tmp_path / "logs"))
    assert (tmp_path / "logs" / "rank-1.stdout.log").read_text() == "rank 1\n"
    assert capfd.readouterr().err == ""
    say()
    (folder,) = scratch.iterdir()
    assert capfd.readouterr().err == f"syncline: the output of ranks other than 0 is in {folder}\n"
    assert [path.name for path in folder.iterdir()] == ["rank-1.stdout.log"]
    assert (folder / "rank-1.stdout.log").read_text() == "rank 1\n"
    shutil.rmtree(folder)
    syncline.launch(os.getpid, workers=2, threads=1)
    assert list(scratch.iterdir()) == []


def test_error_of_launch_says_where_the_output_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(RankFailed) as caught:
        syncline.launch(programs.say_and_raise_on, 1, workers=2, threads=1)
    (folder,) = tmp_path.iterdir()
    assert f"Its output is in {folder}/rank-1.stderr.log" in str(caught.value)
    assert "a word before" in (folder / "rank-1.stderr.log").read_text()


def test_long_temporary_path_is_no_obstacle(tmp_path: Path) -> None:
    """Names of sockets are short; a folder for them elsewhere is private and goes away."""
    scratch = tmp_path / ("long" * 25)
    scratch.mkdir()
    script = tmp_path / "script.py"
    script.write_text(
        "import os, syncline\nfrom multiprocessing.util import get_temp_dir\n"
        "print(syncline.launch(os.getppid, workers=1, threads=1)[0] > 0, oct(os.stat(get_temp_dir()).st_mode)[-3:])\n"
        "print(get_temp_dir())\n"
    )
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(scratch)})
    assert done.stderr == ""
    works, folder = done.stdout.splitlines()
    assert works == "True 700"
    assert not Path(folder).exists()
    assert list(scratch.iterdir()) == []


def test_launch_from_another_thread() -> None:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.extend(syncline.launch(lambda: 1, workers=2, threads=1)))
    thread.start()
    thread.join()
    assert results == [1, 1]


def test_unguarded_script_launches_its_own_functions(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import syncline\nclass Thing:\n    pass\ndef work():\n    return Thing()\n"
        "print(all(type(thing) is Thing for thing in syncline.launch(work, workers=2, threads=1)))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_output_of_rank_0_stays_and_others_go_to_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(lambda: print("rank", os.environ["RANK"]), workers=2, log_dir=tmp_path)
    assert capfd.readouterr().out == "rank 0\n"
    assert (tmp_path / "rank-1.stdout.log").read_text() == "rank 1\n"


@pytest.mark.parametrize("attempt", range(2))
@pytest.mark.parametrize("culprit", range(3))
def test_own_exception_is_blamed_while_others_are_in_a_collective(culprit: int, attempt: int) -> None:
    with pytest.raises(RankFailed, match="fault of rank") as caught:
        run_ranks(programs.raise_on, (culprit,), workers=3, log_dir=None)
    assert caught.value.rank == culprit
    assert f"the fault of rank {culprit}" in caught.value.traceback_text
    assert "in raise_on" in caught.value.traceback_text
    assert "syncline/launcher" not in caught.value.traceback_text


def test_slow_culprit_is_blamed_although_others_fail_first() -> None:
    with pytest.raises(RankFailed, match="fault of rank") as caught:
        run_ranks(programs.raise_slowly_after_leaving_the_group, (1,), workers=3, log_dir=None)
    assert caught.value.rank == 1


def test_contract_error_comes_before_broken_connections() -> None:
    with pytest.raises(RankFailed, match="ContractError") as caught:
        run_ranks(programs.raise_contract_error_on, (2,), workers=3, log_dir=None)
    assert caught.value.rank == 2


def test_earliest_of_several_own_exceptions_counts_the_others(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="from rank") as caught:
        run_ranks(programs.raise_everywhere, workers=2, log_dir=tmp_path)
    assert caught.value.rank == 0


@pytest.mark.parametrize("culprit", range(3))
def test_killed_rank_is_blamed(culprit: int, tmp_path: Path) -> None:
    with launcher_process("all_reduce_for_ever", 3, tmp_path) as (process, pids, _):
        os.kill(pids[culprit], signal.SIGKILL)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 1
        assert out.startswith(f"RankFailed: [rank {culprit}] killed by SIGKILL"), out + err
        wait_until(lambda: not any(map(is_alive, pids)), 60, "all ranks gone")


def test_rank_that_somebody_terminated_is_blamed(tmp_path: Path) -> None:
    with launcher_process("all_reduce_for_ever", 2, tmp_path) as (process, pids, _):
        os.kill(pids[1], signal.SIGTERM)
        out, _ = process.communicate(timeout=30)
        assert out == f"RankFailed: [rank 1] killed by SIGTERM from process {os.getpid()}.\n"


@pytest.mark.parametrize(
    ("function", "argument", "words"),
    [
        (programs.exit_on, 3, "SystemExit: 3"),
        (programs.vanish_on, 3, "exit code 3"),
        (programs.vanish_on, 0, "exit code 0"),
        (programs.kill_self_on, signal.SIGSEGV, "SIGSEGV"),
    ],
)
def test_other_ways_to_leave_are_failures(function: Callable[..., None], argument: int, words: str) -> None:
    with pytest.raises(RankFailed, match=words) as caught:
        run_ranks(function, (1, argument), workers=2, log_dir=None)
    assert caught.value.rank == 1


def test_usage_error_of_a_rank_is_raised_as_it_was() -> None:
    with pytest.raises(DataError, match="No such data set") as caught:
        run_ranks(programs.refuse_data, (1,), workers=2, log_dir=None)
    assert caught.value.action == "Name another."
    assert caught.value.exit_code == 2


def test_ranks_end_when_the_launcher_is_killed(tmp_path: Path) -> None:
    with launcher_process("block_in_a_collective", 3, tmp_path) as (process, pids, scratch):
        process.kill()
        wait_until(lambda: not any(map(is_alive, pids)), 60, "all ranks gone")
        wait_until(lambda: not session_members(process.pid), 60, "fork server gone")
        assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("whole_group", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_everything_with_one_line(number: int, whole_group: bool, tmp_path: Path) -> None:
    with launcher_process("block_in_a_collective", 3, tmp_path) as (process, pids, scratch):
        send = os.killpg if whole_group else os.kill
        send(process.pid, number)
        with_impatience = number == signal.SIGINT and not whole_group
        if with_impatience:
            send(process.pid, number)
        out, err = process.communicate(timeout=60)
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        assert (out, err) == (f"Interrupted: Stopped by {name}; every rank has ended.\n", "")
        assert process.returncode == 130
        wait_until(lambda: not session_members(process.pid), 60, "nobody left")
        assert not any(map(is_alive, pids))
        assert list(scratch.iterdir()) == []


def test_interrupt_ends_ranks_that_linger_after_returning(tmp_path: Path) -> None:
    with launcher_process("linger", 2, tmp_path) as (process, pids, _):
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        assert out.startswith("Interrupted")
        assert not any(map(is_alive, pids))


def test_nothing_is_left_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(programs.all_reduce_once, workers=2, log_dir=None)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    open_files = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        run_ranks(programs.all_reduce_once, workers=2, log_dir=None)
        with pytest.raises(RankFailed):
            run_ranks(programs.raise_on, (1,), workers=2, log_dir=None)
    assert list(tmp_path.iterdir()) == []
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert len(os.listdir("/proc/self/fd")) <= open_files + 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net")
def test_every_socket_listens_on_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_LAUNCHER", str(os.getpid()))
    found = run_ranks(programs.listening_addresses, workers=2, log_dir=None)
    assert all(found)
    assert {address for addresses in found for address in addresses} == {"0100007F"}


def test_forked_children_of_a_rank_can_be_terminated() -> None:
    assert run_ranks(programs.signals_in_a_forked_child, workers=1, log_dir=None) == [-signal.SIGTERM]


def name_of_a_lock() -> str | None:
    import multiprocessing

    return multiprocessing.Lock()._semlock.name  # type: ignore[attr-defined,no-any-return]


def test_locks_of_a_rank_s_own_children_have_no_names_that_a_killed_rank_would_leave() -> None:
    """Such as those of a DataLoader: with a fork server they would be files of /dev/shm for as long as it lives."""
    assert run_ranks(name_of_a_lock, workers=2, log_dir=None) == [None, None]


def test_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"Port {port} is in use"):
            run_ranks(programs.all_reduce_once, workers=1, log_dir=None, port=port)


def test_chosen_port_is_the_one_that_ranks_see() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    results = run_ranks(programs.rank_and_environment, workers=1, log_dir=None, port=port)
    assert results[0][1]["MASTER_PORT"] == str(port)


@pytest.mark.parametrize("settings", [{"workers": 0}, {"workers": -1}, {"workers": 1, "threads": 0}])
def test_numbers_that_cannot_work_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="Cannot run"):
        syncline.launch(programs.all_reduce_once, **settings)


def test_function_that_cannot_be_sent_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(UsageError, match="cannot be sent"):
        syncline.launch(lambda: lock, workers=1)


def test_threads_fill_the_cores() -> None:
    assert default_threads(1) == cores()
    assert default_threads(10 * cores()) == 1
    assert oversubscription(1, cores()) is None
    assert "share" in (oversubscription(2, cores()) or "")


@pytest.mark.parametrize("number", [-359377216, 0, int(signal.SIGCHLD)])
def test_what_python_makes_of_an_interrupted_wait_is_no_signal(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen when a run was stopped and continued from outside (SIGSTOP, SIGCONT)."""
    found = types.SimpleNamespace(si_signo=number, si_pid=1)
    monkeypatch.setattr(signal, "sigtimedwait", lambda signals, seconds: found)
    assert watch._next_signal({signal.SIGTERM}) is None
    found.si_signo = int(signal.SIGTERM)
    assert watch._next_signal({signal.SIGTERM}) == (signal.SIGTERM, 1)
