"""When ranks do not go on together: whose line of Python, which rank of the world, and what each was doing."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import threading
from inspect import currentframe
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest
import torch
from helpers import caught, integer_loss, integer_model, on_threads

import syncline
from syncline.comm import Communicator, instrumented, whereabouts
from syncline.comm.sites import Line, parse_dump, stack_of, users_part
from syncline.comm.threads import run_threads
from syncline.errors import CommunicationError, ContractError, DeadlineError, RankFailed
from syncline.launcher import emulation, mpi
from syncline.spans import EventLog
from syncline.sync import make_sync

HERE = Path(__file__).name


def line() -> int:
    frame = currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_contract_error_names_the_line_of_each_rank() -> None:
    lines = {}

    def live(comm: Communicator, _: EventLog) -> CommunicationError | None:
        if comm.rank == 0:
            lines[0] = line() + 1
            return caught(lambda: comm.all_reduce(torch.ones(3)))
        lines[1] = line() + 1
        return caught(lambda: comm.all_reduce(torch.ones(4)))

    for error in on_threads(2, live):
        assert isinstance(error, ContractError)
        for rank, size in enumerate((3, 4)):
            said = re.search(rf"rank {rank} calls all_reduce float32 \[{size}\] at (\S+):(\d+)", str(error))
            assert said is not None, str(error)
            assert (Path(said[1]).name, int(said[2])) == (HERE, lines[rank])


def test_bucket_that_differs_names_the_line_of_the_backward() -> None:
    """It is a thread of ours that sends; the line is of the thread that it works for."""
    lines = []

    def live(comm: Communicator, _: EventLog) -> CommunicationError | None:
        model = torch.nn.Linear(3, 2 + comm.rank, bias=False)
        sync = make_sync("bucketed", comm)
        sync.same_start = "nothing"
        loss = sync.attach(model)(torch.ones(1, 3)).sum()
        lines.append(line() + 1)
        return caught(lambda: (loss.backward(), sync.finish()))

    for error in on_threads(2, live):
        assert isinstance(error, ContractError)
        assert f"{HERE}:{lines[0]}" in str(error)


@pytest.mark.usefixtures("quick_stalls")
@pytest.mark.parametrize("method", ["all-reduce", "bucketed", "ring", "shared-memory"])
def test_hang_says_what_each_rank_was_doing(method: str) -> None:
    given_up = threading.Event()
    lines = {}

    def live(comm: Communicator, log: EventLog) -> CommunicationError | None:
        model = integer_model("mlp")
        sync = make_sync(method, comm)
        module = sync.attach(model)
        integer_loss(module, comm.rank).backward()
        sync.finish()
        log.step = 7
        if comm.rank == 1:
            lines["stuck"] = line() + 1
            given_up.wait(60)
            return None
        integer_loss(module, comm.rank).backward()
        error = caught(sync.finish)
        given_up.set()
        return error

    error = on_threads(2, live, deadline_s=4)[0]
    assert isinstance(error, DeadlineError)
    assert error.message.endswith("missing: rank 1.")
    title, own, stuck, *stack = "\n".join(error.__notes__).splitlines()
    assert title == "What each rank was doing:"
    assert re.match(r"  rank 0 waits in step 7 for \d\.\d s in ", own), own
    assert re.match(rf"  rank 1 is in its own code in step 7 for \d\.\d s, at \S*{HERE}:{lines['stuck']}; ", stuck)
    assert "its last operation was " in stuck
    assert any(f"{HERE}:{lines['stuck']} in live" in level for level in stack)


@pytest.mark.usefixtures("quick_stalls")
def test_members_of_a_part_are_named_by_their_numbers_in_the_world_with_their_host() -> None:
    given_up = threading.Event()

    def live(backend: Communicator) -> CommunicationError | None:
        log = EventLog(keep=False)
        named = {"deadline_s": 4.0, "name_of": lambda rank: f"rank {rank} on host {'ab'[rank > 1]}"}
        comm = instrumented(backend, log, **named)  # type: ignore[arg-type]
        part = comm.part("hosts", [[0, 1], [2, 3]])
        assert part is not None
        part.all_reduce(torch.ones(2))
        error = None
        if comm.rank == 2:
            error = caught(lambda: part.broadcast(torch.ones(2), root=1))
            given_up.set()
        given_up.wait(60)
        comm.close()
        return error

    error = run_threads(4, live, deadline_s=4.0)[2]
    assert isinstance(error, DeadlineError)
    assert error.rank == 2
    assert "broadcast root 3 float32 [2]" in error.message
    assert error.message.endswith("missing: rank 3 on host b.")
    assert [text.split(" is")[0] for text in error.__notes__[0].splitlines() if text.startswith("  rank 0")] == [
        "  rank 0 on host a"
    ]


def hold_the_interpreter() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")


def hang_on_rank_1() -> None:
    model = syncline.DataParallel(torch.nn.Linear(3, 2), method="bucketed", deadline_s=4)
    for step in range(3):
        if model.rank == 1 and step == 2:
            hold_the_interpreter()
        model(torch.ones(1, 3)).sum().backward()


def test_stack_of_a_rank_whose_interpreter_is_held_is_shown_and_kept(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as failed:
        syncline.launch(hang_on_rank_1, workers=2, threads=1, log_dir=tmp_path)
    text = failed.value.traceback_text
    assert "missing: rank 1." in str(failed.value)
    assert re.search(rf"rank 1 is busy, at \S*{HERE}:\d+\.", text), text
    assert f"{tmp_path / 'rank-1.stack.log'} has all of it" in text
    assert re.search(rf"{HERE}:\d+ in hold_the_interpreter\n.*{HERE}:\d+ in hang_on_rank_1", text), text
    assert "hold_the_interpreter" in (tmp_path / "rank-1.stack.log").read_text()
    assert not (tmp_path / "rank-0.stack.log").stat().st_size


def test_last_dump_of_a_thread_counts() -> None:
    dump = "\n".join(
        [
            "Thread 0x00000000000000ff (most recent call first):",
            '  File "old.py", line 1 in old',
            "",
            "Current thread 0x00000000000000ff (most recent call first):",
            '  File "/home/me/train.py", line 38 in slow',
            "Thread 0x0000000000000001 (most recent call first):",
            '  File "other.py", line 2 in other',
        ]
    )
    assert parse_dump(dump, 0xFF) == [Line("/home/me/train.py", 38, "slow")]
    assert parse_dump("", 0xFF) == []


def test_users_part_of_a_stack_is_without_torch_and_syncline() -> None:
    ours, torch_s = Line(syncline.__file__, 1, "ours"), Line(torch.__file__, 2, "backward")
    users = Line("/home/me/train.py", 3, "main")
    assert users_part([torch_s, ours, users, Line(threading.__file__, 4, "run")]) == [users]
    assert users_part([torch_s, ours]) == [ours]


def test_program_of_the_fork_server_is_not_the_users_line() -> None:
    ours, program = Line(syncline.__file__, 1, "loop"), Line("<string>", 1, "<module>")
    server = Line(forkserver.__file__, 2, "main")
    users = Line("<string>", 5, "train")
    assert users_part([ours, server, program]) == [ours]
    assert users_part([users, ours, server, program]) == [users]
    host = Line(emulation.__file__, 3, "live")
    assert users_part([ours, server, program, host, program]) == [ours]
    supervisor = Line(mpi.__file__, 4, "main")
    assert users_part([ours, supervisor, program]) == [ours]
    assert users_part([ours, users]) == [users]  # of `python -c`


class Clock:
    """Time passes in sleeps only."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Store(dict[str, str]):
    def clone(self) -> Store:
        return self

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def get(self, key: str) -> str:  # type: ignore[override]
        return self[key]


def asked(states: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, float, list[int]]:
    """Rank 0 asks ranks that do not answer, in these states: its words, how long it took, and who got a signal."""
    clock, store, signalled = Clock(), Store(), []

    def signal(pid: int, _number: int) -> None:
        signalled.append(pid)
        dump = f'Thread 0x01 (most recent call first):\n  File "train.py", line {pid} in slow\n'
        (folder / str(pid)).write_text(dump)

    monkeypatch.setattr(whereabouts, "time", clock)
    monkeypatch.setattr(os, "kill", signal)
    monkeypatch.setattr(whereabouts, "_state_of", lambda pid: states[pid - 1])
    for rank in range(1, len(states) + 1):
        (folder / str(rank)).touch()
        process = {"pid": rank, "host": whereabouts._host(), "owner": 1, "file": str(folder / str(rank))}
        store.set(f"process/{rank}", json.dumps(process))
    backend = SimpleNamespace(rank=0, ranks=range(len(states) + 1), store=store)
    words = whereabouts.Whereabouts(backend, EventLog(keep=False)).ask("rank {}".format)  # type: ignore[arg-type]
    return words, clock.now - 100.0, signalled


def test_silent_ranks_share_one_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, took, signalled = asked("RTRR", tmp_path, monkeypatch)
    assert signalled == [1, 3, 4]
    for rank in signalled:
        assert f"rank {rank} is busy, at train.py:{rank}." in words
    assert "rank 2 is stopped (SIGSTOP)." in words
    assert took <= whereabouts.ANSWERS_WITHIN_S + whereabouts.LOOK_EVERY_S / 10 + 1e-6


def test_stopped_and_ended_ranks_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, took, signalled = asked("TZ", tmp_path, monkeypatch)
    assert (took, signalled) == (0.0, [])
    assert "rank 1 is stopped (SIGSTOP)." in words
    assert "rank 2 has ended." in words


@pytest.mark.parametrize(
    ("states", "waiting", "missing", "late"),
    [
        ("SSS", [2], [1, 2, 3], [1, 3]),
        ("SSS", [1, 2, 3], [1, 2, 3], [1, 2, 3]),
        ("STS", [2, 3], [1, 2, 3], [2]),
        ("SSS", [], [1, 2, 3], [1, 2, 3]),
        # Rank 1 is a root that waits for rank 3, and rank 2 for the root, as this rank does.
        ("SSS", [1, 2], [1], [3]),
        ("SST", [1, 2, 3], [1], [3]),
        ("SSS", [1, 2, 3], [1], [1]),
        ("SSS", [2], [1], [1]),
    ],
)
def test_rank_that_waits_elsewhere_is_not_the_one_that_is_waited_for(
    states: str, waiting: list[int], missing: list[int], late: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store()
    monkeypatch.setattr(whereabouts, "_state_of", lambda pid: states[pid - 1])
    for rank in (1, 2, 3):
        store.set(f"process/{rank}", json.dumps({"pid": rank, "host": whereabouts._host()}))
        store.set(f"doing/{rank}", json.dumps({"waits": {"": 0}} if rank in waiting else {"last": 0}))
    backend = SimpleNamespace(rank=0, ranks=range(4), store=store)
    seen = whereabouts.Whereabouts(backend, EventLog(keep=False))  # type: ignore[arg-type]
    assert seen.late(missing) == late


def test_no_garbage_is_collected_while_the_interpreter_lists_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer that waited for another thread there would stop them all."""
    seen: list[bool] = []
    frames = sys._current_frames

    def watched() -> dict[int, FrameType]:
        seen.append(gc.isenabled())
        return frames()

    monkeypatch.setattr(sys, "_current_frames", watched)
    assert stack_of(threading.get_ident())
    assert seen == [False]
    assert gc.isenabled()
