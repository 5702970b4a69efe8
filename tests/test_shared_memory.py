"""Shared memory: right on real processes, nothing left behind, dead and missing ranks named, waiting costs little."""

from __future__ import annotations

import errno
import multiprocessing
import os
import platform
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import (
    INTEGER_MODELS,
    assert_same,
    caught,
    expected_mean,
    gradients,
    integer_loss,
    integer_model,
    on_processes,
    on_threads,
)
from torch import Tensor

import syncline
from syncline.collectives.schedule import chunk_bounds
from syncline.comm import Communicator, shared_memory
from syncline.comm.shared_memory import Barrier, Segment, check_one_host, count_hosts
from syncline.comm.threads import run_threads
from syncline.comm.torch_backend import adopt
from syncline.errors import CommunicationError, DeadlineError, PeerLostError, PlanError, RankFailed
from syncline.launcher.starting import start_fork_server
from syncline.launcher.trust import proof
from syncline.resolve import choose_method
from syncline.spans import EventLog
from syncline.sync import make_sync
from syncline.sync.after_backward import mean_in_rank_order
from syncline.sync.shared_memory import PIECE_BYTES, average_pieces, cut_slice


def named_segments() -> set[str]:
    """Files of the shared-memory mount that this process has mapped."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in maps if "/dev/shm/" in line}


def train_in_shared_memory(comm: Communicator, log: EventLog) -> dict[str, dict[str, Tensor]]:
    before, found = named_segments(), {}
    for name in INTEGER_MODELS:
        model = integer_model(name)
        sync = make_sync("shared-memory", comm, log=log)
        module = sync.attach(model)
        log.records.clear()
        for _ in range(2):
            model.zero_grad()
            integer_loss(module, comm.rank).backward()
            sync.finish()
        sent = {record["name"] for record in log.records if record["kind"] == "collective"}
        assert sent == {"shared_memory"}, "nothing else is sent"
        assert "memfd:syncline" in Path("/proc/self/maps").read_text()
        assert named_segments() == before
        found[name] = gradients(model)
        sync.detach()
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_mean_is_exact_on_processes_and_memory_has_no_name(world_size: int) -> None:
    for found in on_processes(world_size, train_in_shared_memory):
        for name, one in found.items():
            assert_same(one, expected_mean(name, world_size))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_slices_together_are_the_mean_in_rank_order_to_the_bit(dtype: torch.dtype, world_size: int) -> None:
    """Also where a slice is longer than the piece that is averaged at a time, and where slices are empty."""
    for count in (0, 1, 3, world_size * (PIECE_BYTES // dtype.itemsize) + 5):
        stream = torch.Generator().manual_seed(count)
        row = [torch.randn(count, generator=stream).to(dtype) for _ in range(world_size)]
        expected = mean_in_rank_order(row)
        for rank in reversed(range(world_size)):
            average_pieces(cut_slice(row, rank), world_size)
        assert all(torch.equal(buffer, expected) for buffer in row)


def test_rank_writes_its_own_slice_only() -> None:
    row = [torch.zeros(10), torch.full((10,), 2.0)]
    average_pieces(cut_slice(row, 1), 2)
    start, stop = chunk_bounds(10, 2)[1]
    assert row[0].tolist() == [1.0 if start <= index < stop else 0.0 for index in range(10)]


def test_segment_is_zeroed_and_seen_by_all() -> None:
    def live(comm: Communicator, _: EventLog) -> list[float]:
        segment = Segment(comm, 400)
        barrier = Barrier(segment, comm)
        values = segment.tensor(torch.float32, 100, 0)
        assert not values.any()
        barrier.wait("looking")
        values[comm.rank] = comm.rank + 1
        barrier.wait("writing")
        seen: list[float] = values[: comm.world_size].tolist()
        barrier.close()
        return seen

    assert on_threads(4, live) == [[1.0, 2.0, 3.0, 4.0]] * 4


# Who gets it.


def test_memory_goes_only_to_ranks_that_prove_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    name, secret = "\0syncline-test-of-strangers", "a secret"
    ready = threading.Event()

    def ask(says: Callable[[str], str]) -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.settimeout(10)
            stranger.connect(name)
            challenge = stranger.recv(200).decode()
            if challenge:
                stranger.sendall(says(challenge).encode())
            return stranger.recv(1)

    def live(comm: Communicator, _: EventLog) -> object:
        if comm.rank == 0:
            descriptor = shared_memory._allocate(4096)
            with shared_memory._listen(name) as server:
                ready.set()
                shared_memory._hand_out(server, descriptor, secret, comm)
            return os.fstat(descriptor).st_ino
        ready.wait(60)
        refused = [
            ask(lambda challenge: "1 " + proof("the socket's name", 1, challenge)),
            ask(lambda challenge: "1 " + proof(secret, 1, "another challenge")),
            ask(lambda challenge: "7 " + proof(secret, 7, challenge)),
            ask(lambda challenge: "é" * 99),
        ]
        with monkeypatch.context() as other_user:
            other_user.setattr(shared_memory, "is_same_user", lambda connection: False)
            refused.append(ask(lambda challenge: "1 " + proof(secret, 1, challenge)))
        assert refused == [b""] * 5
        return os.fstat(shared_memory._fetch(name, secret, comm)).st_ino

    first, second = on_threads(2, live)
    assert first == second


def test_refused_connection_is_tried_again_and_then_told() -> None:
    def live(comm: Communicator, _: EventLog) -> str:
        return str(caught(lambda: shared_memory._fetch("\0syncline-nobody", "a secret", comm)))

    (told,) = on_threads(1, live, deadline_s=0.3)
    assert "the shared memory of rank 0 could not be fetched within 0.3 s: Connection refused." in told


def test_rank_that_does_not_fetch_it_is_named() -> None:
    def live(comm: Communicator, _: EventLog) -> str:
        if comm.rank == 1:
            return ""
        with shared_memory._listen("\0syncline-nobody-comes") as server:
            return str(caught(lambda: shared_memory._hand_out(server, 0, "a secret", comm)))

    assert "handing out the shared memory did not end within 0.3 s" in on_threads(2, live, deadline_s=0.3)[0]


# Refused before training.


def test_ranks_on_different_hosts_are_refused_by_name() -> None:
    def live(comm: Communicator) -> str:
        comm.host_index = comm.rank // 2
        assert count_hosts(comm) == 2
        with pytest.raises(PlanError) as error:
            make_sync("shared-memory", comm)
        return error.value.message

    assert run_threads(3, live) == ["ranks 0 and 2 are not on one host, so they cannot share memory."] * 3


@pytest.mark.parametrize("kind", ["boot", "net", "pid"])
def test_launch_s_word_is_checked_against_boot_and_namespaces(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = shared_memory._identity

    def other_on_rank_1(host_index: int) -> list[int]:
        identity = original(0)
        identity[["host", "boot", "net", "pid"].index(kind)] += host_index
        return identity

    def live(comm: Communicator) -> None:
        comm.host_index = comm.rank
        with pytest.raises(PlanError, match="not on one host"):
            check_one_host(comm)

    monkeypatch.setattr(shared_memory, "_identity", other_on_rank_1)
    run_threads(2, live)


def test_too_little_memory_is_an_error_on_every_rank_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> int:
        raise OSError(errno.ENOMEM, "no")

    monkeypatch.setattr(shared_memory, "_allocate", refuse)

    def live(comm: Communicator, _: EventLog) -> CommunicationError | None:
        sync = make_sync("shared-memory", comm)
        return caught(lambda: sync.attach(integer_model("mlp")))

    for rank, error in enumerate(on_threads(3, live)):
        assert error is not None
        assert error.rank == rank
        assert "cannot allocate" in error.message
        assert os.strerror(errno.ENOMEM) in error.message
        assert "bucketed" in error.action


def test_memory_is_allocated_at_once() -> None:
    descriptor = shared_memory._allocate(10_000_000)
    try:
        assert os.fstat(descriptor).st_blocks * 512 >= 10_000_000
    finally:
        os.close(descriptor)


def test_weaker_memory_order_is_refused_and_auto_does_not_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(PlanError, match="memory order of x86; this is aarch64"):
        run_threads(2, lambda comm: make_sync("shared-memory", comm))
    assert choose_method(device="cpu", workers=2, num_hosts=1)[0] == "bucketed"


# Waiting.


def test_deadline_names_the_missing_rank() -> None:
    def live(comm: Communicator, _: EventLog) -> CommunicationError | None:
        model = integer_model("mlp")
        sync = make_sync("shared-memory", comm)
        integer_loss(sync.attach(model), comm.rank).backward()
        return None if comm.rank == 1 else caught(sync.finish)

    first, absent, third = on_threads(3, live, deadline_s=3)
    assert absent is None
    for rank, error in ((0, first), (2, third)):
        assert isinstance(error, DeadlineError)
        assert error.rank == rank
        assert "waiting for all gradients did not end within 3 s, at " in error.message
        assert error.message.endswith("; missing: rank 1.")


def wait_for_a_late_rank(comm: Communicator, _: EventLog) -> tuple[float, float]:
    model = integer_model("mlp")
    sync = make_sync("shared-memory", comm)
    integer_loss(sync.attach(model), comm.rank).backward()
    if comm.rank == 1:
        time.sleep(2)
    begin, used = time.monotonic(), time.process_time()
    sync.finish()
    return time.monotonic() - begin, time.process_time() - used


@pytest.mark.xdist_group("measures")
def test_waiting_leaves_the_core_to_others() -> None:
    waited, used = on_processes(2, wait_for_a_late_rank)[0]
    assert waited > 1
    assert used < 0.5 * waited


def kill_rank_1_in_mid_step() -> None:
    dist.init_process_group("gloo")
    comm = adopt(None, deadline=timedelta(seconds=90))
    sync = make_sync("shared-memory", comm)
    integer_loss(sync.attach(integer_model("mlp")), comm.rank).backward()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    sync.finish()


def test_launch_names_the_rank_that_was_killed() -> None:
    with pytest.raises(RankFailed) as error:
        syncline.launch(kill_rank_1_in_mid_step, workers=2)
    assert error.value.rank == 1
    assert "SIGKILL" in error.value.message


def lose_rank_1(rank: int, folder: Path) -> None:
    """Without a launcher that would end the others: the waiting rank has to notice by itself."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    comm = adopt(None, deadline=timedelta(seconds=90))
    sync = make_sync("shared-memory", comm)
    integer_loss(sync.attach(integer_model("mlp")), rank).backward()
    if rank == 1:
        time.sleep(0.5)  # the other one is asleep in its barrier by now
        os.kill(os.getpid(), signal.SIGKILL)
    error = caught(sync.finish)
    (folder / "error").write_text(f"{type(error).__name__}: {error}")
    os._exit(0)  # a broken group may take minutes to close


def started(function: Any, *args: Any) -> Any:
    start_fork_server()
    process = multiprocessing.get_context("forkserver").Process(target=function, args=args, daemon=True)
    process.start()
    return process


def test_dead_peer_is_noticed_within_seconds_by_the_rank_that_waits(tmp_path: Path) -> None:
    processes = [started(lose_rank_1, rank, tmp_path) for rank in range(2)]
    processes[0].join(40)  # the deadline would come after 90 s
    endings = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    assert endings == [0, -signal.SIGKILL]
    assert (
        tmp_path / "error"
    ).read_text() == "PeerLostError: [rank 0] rank 1 ended during waiting for all gradients."


def test_peers_are_watched_also_where_descriptors_are_many() -> None:
    """select knows only the first 1024; poll knows all."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1100
    if hard < wanted:
        pytest.skip("this user may not open 1100 files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(1030)]
    try:
        barrier = Barrier.__new__(Barrier)
        barrier._processes = {1: os.pidfd_open(os.getpid())}
        assert barrier._processes[1] > 1023
        assert not barrier._has_ended(1)
        assert not barrier._has_ended(2)
        barrier.close()
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_rank_that_detaches_is_not_waited_for() -> None:
    def live(comm: Communicator, _: EventLog) -> CommunicationError | None:
        sync = make_sync("shared-memory", comm)
        integer_loss(sync.attach(integer_model("mlp")), comm.rank).backward()
        return sync.detach() if comm.rank == 1 else caught(sync.finish)

    error, _ = on_threads(2, live, deadline_s=20.0)
    assert isinstance(error, PeerLostError)
    assert "rank 1 left during waiting for all gradients" in error.message
