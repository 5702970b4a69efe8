"""Counters, memory and profiler around real steps, as the event log and the run folder show them."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Cli
from helpers import on_processes, on_threads, small_mlp

from syncline.comm.communicator import Communicator
from syncline.comm.counters import TrafficCounter, read_interfaces
from syncline.errors import PlanError
from syncline.plan import Profile, parse_plan
from syncline.spans import EventLog, read_log
from syncline.sync import make_sync
from syncline.training.watching import StepWatch, note_memory, peak_resident_bytes


def test_sockets_are_counted_from_when_they_are_seen_until_they_close() -> None:
    counter = TrafficCounter()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        one.sendall(b"x" * 1000)
        assert len(other.recv(1000, socket.MSG_WAITALL)) == 1000
        before = counter.read()
        one.sendall(b"x" * 5000)
        other.sendall(b"y" * 70)
        assert len(other.recv(5000, socket.MSG_WAITALL)) == 5000
        assert len(one.recv(70, socket.MSG_WAITALL)) == 70
        moved = counter.read() - before
        assert (moved["sent"], moved["received"]) == (5070, 5070), "both ends are this process's"
        before = counter.read()
        other.close()
    assert (counter.read() - before)["sent"] == 0


def test_interfaces_are_read_without_loopback(tmp_path: Path) -> None:
    table = tmp_path / "dev"
    table.write_text(
        "Inter-|   Receive                            |  Transmit\n"
        " face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier\n"
        "    lo: 900 9 0 0 0 0 0 0 900 9 0 0 0 0 0 0\n"
        "  eth0: 120 2 0 0 0 0 0 0 340 3 0 0 0 0 0 0\n"
        "veth-1:7 1 0 0 0 0 0 0 8 1 0 0 0 0 0 0\n"
    )
    assert read_interfaces(str(table)) == (348, 127)
    assert read_interfaces(str(tmp_path / "missing")) == (0, 0)


def _counted_all_reduce(communicator: Communicator, log: EventLog) -> dict[str, Any]:
    watch, values = StepWatch(log), torch.ones(250_000)
    communicator.all_reduce(values)
    with watch.step(0):
        communicator.all_reduce(values)
    communicator.all_reduce(torch.ones(1))
    return next(record for record in log.records if record["kind"] == "counter")


def test_a_step_over_gloo_counts_its_own_bytes() -> None:
    for record in on_processes(2, _counted_all_reduce):
        assert 1_000_000 <= record["sent"] < 1_002_000
        assert 1_000_000 <= record["received"] < 1_002_000


@pytest.mark.parametrize(
    ("method", "inside"),
    [("all-reduce", False), ("bucketed", True), ("shared-memory", True)],
)
def test_memory_of_a_method(method: str, inside: bool) -> None:
    def live(communicator: Communicator, log: EventLog) -> dict[str, Any]:
        sync = make_sync(method, communicator, log=log)
        model = small_mlp()
        sync.attach(model)
        note_memory(log, model, sync)
        sync.detach()
        return log.records[-1]

    num_elements = sum(parameter.numel() for parameter in small_mlp().parameters())
    for record in on_threads(2, live):
        assert record["parameter_bytes"] == record["gradient_bytes"] == 4 * num_elements
        assert record["buffer_bytes"] == (4 * (num_elements + 4) if inside else 0)
        assert record["gradients_in_buffers"] is inside
        assert record["peak_resident_bytes"] >= 50_000_000


def test_peak_grows_with_what_is_touched() -> None:
    before = peak_resident_bytes()
    size = before + 64_000_000
    block = torch.ones(size // 4)
    assert peak_resident_bytes() >= size
    del block


def test_profiler_records_the_chosen_steps_of_the_chosen_rank(tmp_path: Path) -> None:
    for rank in (0, 1):
        log = EventLog(rank=rank, world_size=2)
        watch = StepWatch(log, Profile(steps=(1,), ranks=(1,)), tmp_path)
        for step in range(3):
            with watch.step(step):
                torch.ones(10, 10) @ torch.ones(10, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-1-step-1.json", "rank-1-step-1.trace.json.gz"]
    content = json.loads((tmp_path / "rank-1-step-1.json").read_text())
    calls = {one["name"]: one["calls"] for one in content["operators"]}
    assert calls["aten::matmul"] == 1


def test_profile_on_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(PlanError, match=r"profile\.ranks names rank 2, but the last of 2 workers is 1"):
        parse_plan({"workers": 2, "profile": {"steps": [1], "ranks": [2]}})


def test_train_with_profile_keeps_what_it_recorded(cli: Cli, tmp_path: Path) -> None:
    arguments = ("--model", "mlp", "--data", "synthetic", "--steps", 3, "--set", "evaluate=false", "--profile")
    done = cli("train", *arguments, "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "work" / "run"
    assert sorted(path.name for path in (run / "profile").glob("*[0-9].json")) == ["rank-0-step-2.json"]
    records = read_log(run / "events" / "rank-1.blocks")
    assert sum(record["kind"] == "counter" for record in records) == 3
    assert sum(record["kind"] == "memory" for record in records) == 1
