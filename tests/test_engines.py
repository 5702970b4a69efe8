"""What all engines share, on an engine of this machine's processes: placing, the desk, blame, restarts."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

import syncline
from syncline.errors import HostError, Interrupted, PlanError, RankFailed, UsageError
from syncline.launcher import engines
from syncline.launcher.engines.driving import run_on
from syncline.launcher.engines.placing import Seat, placements
from syncline.launcher.engines.rank_life import live
from syncline.launcher.engines.seam import Engine, Order
from syncline.launcher.starting import LOOPBACK, main_module_hidden, start_fork_server

pytestmark = pytest.mark.timeout(120)


class Processes(Engine):
    """An engine of two hosts that deals processes out in turn."""

    name = "processes"
    address = LOOPBACK

    def __init__(self) -> None:
        self.started: list[BaseProcess] = []
        self.starts = 0
        self.words: dict[int, str] = {}

    def start(self, order: Order) -> None:
        self.starts += 1
        start_fork_server()
        context = multiprocessing.get_context("forkserver")
        hosts = [f"host-{number % 2}" for number in range(order.workers)]
        self.started = [context.Process(target=live, args=(order, *seat)) for seat in enumerate(hosts)]
        with main_module_hidden():
            for process in self.started:
                process.start()

    def lost(self) -> Mapping[int, str]:
        return self.words

    def stop(self) -> None:
        for process in self.started:
            process.kill()
            process.join()

    def close(self) -> None: ...


@pytest.fixture
def engine() -> Iterator[Processes]:
    made = Processes()
    yield made
    made.stop()


def who(broken: str = "", folder: str = "") -> tuple[str, ...]:
    import torch
    import torch.distributed as dist

    names = ("RANK", "LOCAL_RANK", "NODE_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "OMP_NUM_THREADS")
    found = tuple(os.environ[name] for name in names)
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    print(f"rank {found[0]} was here")
    if found[0] == "1" and (not folder or not Path(folder, "seen").exists()):
        if folder:
            Path(folder, "seen").touch()
        if broken == "raise":
            raise ArithmeticError("my own mistake")
        if broken == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if broken == "usage":
            raise UsageError("wrong from the start.")
    dist.barrier()
    dist.destroy_process_group()
    return (*found, str(torch.get_num_threads()))


def test_ranks_of_a_host_follow_each_other(
    engine: Processes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    results = run_on(engine, who, workers=4, threads=2, log_dir=tmp_path, needs_folder=True)
    placed = [result[:5] for result in results]
    assert placed == [(str(r), str(r % 2), str(r // 2), "2", "4") for r in range(4)]
    assert {result[5:] for result in results} == {("2", "2")}
    assert "rank 0 was here\n" in capfd.readouterr().out
    assert (tmp_path / "rank-3.stdout.log").read_text() == "rank 3 was here\n"
    assert not list(tmp_path.glob(".here-*"))


def test_the_rank_that_raised_is_named_with_its_host(engine: Processes, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="my own mistake") as caught:
        run_on(engine, who, ("raise",), workers=2, log_dir=tmp_path)
    assert caught.value.rank == 1
    assert "/host-1" in str(caught.value)
    assert 'raise ArithmeticError("my own mistake")' in caught.value.traceback_text
    assert "rank_life" not in caught.value.traceback_text


def test_a_rank_that_was_killed_is_named(engine: Processes, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 on host .*gone without a word"):
        run_on(engine, who, ("kill",), workers=2, log_dir=tmp_path)


def test_ranks_start_again(engine: Processes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run_on(
        engine, who, ("raise", str(tmp_path)), workers=2, threads=1, log_dir=tmp_path / "logs", max_restarts=1
    )
    assert engine.starts == 2
    assert [result[0] for result in results] == ["0", "1"]
    assert "restart 1 of 1" in capsys.readouterr().err


def test_a_users_mistake_is_not_tried_again(engine: Processes) -> None:
    with pytest.raises(UsageError, match="wrong from the start"):
        run_on(engine, who, ("usage",), workers=2, log_dir=None, max_restarts=3)
    assert engine.starts == 1


def test_a_signal_ends_all(engine: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait_for_ever() -> None:
        if os.environ["RANK"] == "0":
            print("all are here", flush=True)
        threading.Event().wait()

    class Writer:
        def write(self, text: str) -> None:
            signal.raise_signal(signal.SIGINT)

        def flush(self) -> None: ...

    monkeypatch.setattr(sys, "stdout", Writer())
    with pytest.raises(Interrupted, match="Ctrl-C"):
        run_on(engine, wait_for_ever, workers=2, log_dir=None)
    assert not any(process.is_alive() for process in engine.started)


def test_what_an_engine_cannot_start_is_told_in_its_words() -> None:
    class Full(Processes):
        def start(self, order: Order) -> None: ...

    engine = Full()
    engine.words = {1: "there is no python on that node"}
    with pytest.raises(HostError, match="could not start worker 1: there is no python"):
        run_on(engine, who, workers=2, log_dir=None)


def test_uneven_hosts() -> None:
    seats = [Seat(number, host, "same", f"10.0.0.{number}", 5) for number, host in enumerate("bab")]
    placed = placements(seats, run_id="x", restart=0, launcher="ray")
    assert [placed[number].rank for number in range(3)] == [0, 2, 1]
    assert [placed[number].local_world_size for number in range(3)] == [2, 1, 2]
    assert placed[1].host_names == ("same/b", "same/a")
    assert {place.master_addr for place in placed.values()} == {"10.0.0.0"}


def test_an_engine_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"there is no engine 'flink'\. Choose from ray"):
        syncline.launch(who, workers=2, engine="flink")
    monkeypatch.setitem(engines.ENGINES, "ray", engines.Row("no_such_package", "--address"))
    with pytest.raises(UsageError, match=r"pip install 'syncline\[ray\]'"):
        syncline.Engine("ray")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--address", "auto"), "--address needs --engine"),
        (("--engine", "ray", "--nodes", "2", "--node-rank", "0", "--rendezvous", "a:1"), "--engine starts ranks"),
        (("--engine", "flink"), "there is no engine 'flink'"),
    ],
)
def test_flags_that_contradict_each_other(cli, flags: tuple[str, ...], words: str) -> None:  # type: ignore[no-untyped-def]
    done = cli("train", *flags)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_method_of_mpiexec_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.ENGINES, "ray", engines.Row("json", "--address"))
    plan = syncline.load_plan(None, {"method": "mpi", "workers": 2})
    with pytest.raises(PlanError, match="starts its workers with mpiexec, not on ray"):
        syncline.Engine("ray").settled(plan)
