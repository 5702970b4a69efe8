"""Several nodes as one run: joining, misfits, losses, decisions.

Nodes are threads here, without ranks; the last tests run whole nodes as processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import SYNCLINE, USER_MODEL, CliServer, cli_environment, killed_at_end, wait_until

from syncline.errors import (
    ContractError,
    HostError,
    Interrupted,
    PeerLostError,
    RankFailed,
    SynclineError,
    UsageError,
)
from syncline.launcher import route
from syncline.launcher.adopt import placement_from_environment
from syncline.launcher.nodes import Node, coordinator
from syncline.launcher.nodes.coordinator import Coordinator, Limits
from syncline.launcher.nodes.membership import Membership
from syncline.launcher.nodes.token import Credential
from syncline.launcher.route import Route, find_route, parse_rendezvous
from syncline.launcher.starting import listening
from syncline.launcher.wire import Connection
from syncline.spans import read_log
from syncline.store import RunFolder

PLAN = {"model": "mlp", "workers": 4}
TOKEN = Credential("0123456789abcdef", "the test")


@dataclass
class Cluster:
    """Nodes in this process, on loopback. `says` changes what a node claims to be."""

    nodes: int
    limits: Limits = field(default_factory=lambda: Limits(join_timeout_s=20.0, silence_s=10.0, max_restarts=0))
    members: list[Membership] = field(default_factory=list)

    def __post_init__(self) -> None:
        listener = listening("127.0.0.1", 0)
        self.route = Route("127.0.0.1", listener.getsockname()[1], "127.0.0.1", "lo")
        self.coordinator = Coordinator(listener, self.hello(0), self.limits, TOKEN)
        self.pool = ThreadPoolExecutor(max_workers=20)

    def hello(self, number: int, **says: Any) -> dict[str, Any]:
        usual = {
            "say": "hello", "nodes": self.nodes, "node_rank": number, "host": f"h{number}",
            "address": f"10.0.0.{number}", "process": os.urandom(8).hex(), "versions": {"torch": "2"},
            "plan": PLAN,
        }  # fmt: skip
        return {**usual, **says}

    def join(self, number: int, **says: Any) -> Future[list[tuple[str, str]]]:
        first = number == 0 and not any(member._coordinator for member in self.members)
        chief = self.coordinator if first else None
        member = Membership(self.hello(number, **says), self.route, self.limits, chief, lambda: TOKEN)
        self.members.append(member)
        return self.pool.submit(member.join)

    def all_joined(self) -> list[Membership]:
        for future in [self.join(number) for number in range(self.nodes)]:
            future.result(20)
        return self.members

    def started(self) -> list[Membership]:
        members = self.all_joined()
        self.on_all(lambda member: member.next_attempt())
        return members

    def on_all(self, function: Callable[[Membership], Any]) -> list[Any]:
        return list(self.pool.map(function, self.members))


@contextlib.contextmanager
def cluster(nodes: int, **limits: Any) -> Iterator[Cluster]:
    made = Cluster(nodes, Limits(**{"join_timeout_s": 20.0, "silence_s": 10.0, "max_restarts": 0, **limits}))
    try:
        yield made
    finally:
        for member in reversed(made.members):
            member.leave()
        made.coordinator.close()
        made.pool.shutdown()


def ended(member: Membership, error: SynclineError | None = None, *, is_echo: bool = False) -> SynclineError:
    """The verdict that this node hears, after it has told of its own failure or of nothing."""
    if error is not None:
        member.again(error, is_echo=is_echo)
    wait_until(lambda: member.verdict is not None, 60, "a verdict")
    assert member.verdict is not None
    return member.verdict


@pytest.mark.parametrize("text", ["node0", "node0:", ":29500", "node0:x", "node0:0", "node0:65536"])
def test_rendezvous_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        parse_rendezvous(text)


def test_rendezvous_and_interface_are_found() -> None:
    assert parse_rendezvous("[fd00::1]:29500") == ("fd00::1", 29500)
    assert find_route("127.0.0.1:29500") == Route("127.0.0.1", 29500, "127.0.0.1", "lo")
    assert find_route("localhost:29500").interface == "lo"
    with pytest.raises(UsageError, match=r"cannot resolve the rendezvous host 'nowhere\.invalid'"):
        find_route("nowhere.invalid:29500")


def test_name_that_leads_back_to_this_machine_only_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_more: [(0, 0, 0, "", ("127.0.1.1", 0))])
    with pytest.raises(UsageError, match=r"'node0' resolves to 127\.0\.1\.1 here"):
        find_route("node0:29500")


@pytest.mark.parametrize(("nodes", "node_rank"), [(0, 0), (2, 2), (2, -1)])
def test_node_that_cannot_be_is_refused(nodes: int, node_rank: int) -> None:
    with pytest.raises(UsageError):
        Node(nodes, node_rank, "node0:29500")


def test_hosts_come_in_the_order_of_node_ranks_past_ten() -> None:
    with cluster(12) as nodes:
        order = [7, 11, 3, 0, 10, 1, 9, 2, 8, 5, 4, 6]
        tables = [future.result(20) for future in [nodes.join(number) for number in order]]
        assert tables == [[(f"h{number}", f"10.0.0.{number}") for number in range(12)]] * 12


def test_what_node_0_chooses_reaches_all_and_all_start_together() -> None:
    with cluster(3) as nodes:
        members = nodes.all_joined()
        members[0].share({"run": "runs/x"})
        assert nodes.on_all(lambda member: member.shared()) == [{"run": "runs/x"}] * 3
        attempts = nodes.on_all(lambda member: member.next_attempt())
        assert len(set(attempts)) == 1
        assert attempts[0].number == 0
        with socket.create_connection((attempts[0].address, attempts[0].port), timeout=5):
            pass
        assert not any(nodes.on_all(lambda member: member.all_finished() and member is members[0]))
        for member in members:
            wait_until(member.all_finished, 60, "all finished")
        assert [member.verdict for member in members] == [None] * 3


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ({"nodes": 4}, ["host h1 (node 1, 10.0.0.1)", "--nodes 4", "--nodes 2"]),
        ({"versions": {"torch": "1"}}, ["host h1", "torch 1", "node 0 has 2"]),
        ({"plan": {"model": "cnn", "workers": 4}}, ["host h1", "model = 'cnn', not 'mlp'"]),
        ({"node_rank": 0, "host": "twin"}, ["node rank 0", "host h0", "host twin"]),
    ],
)
def test_node_that_does_not_fit_ends_the_run_for_all_with_its_name(says: dict[str, Any], words: list[str]) -> None:
    with cluster(2) as nodes:
        first = nodes.join(0)
        wait_until(lambda: nodes.coordinator._seats[0].connection, 60, "node 0 seated")
        second = nodes.join(1, **says)
        for future in (first, second):
            with pytest.raises(UsageError) as caught:
                future.result(20)
            assert [word for word in words if word not in str(caught.value)] == []


def test_missing_nodes_are_named_and_the_wait_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(coordinator, "_FIRST_LINE_SECONDS", 0.3)
    with cluster(4, join_timeout_s=1.5) as nodes:
        futures = [nodes.join(number) for number in (0, 2)]
        for future in futures:
            with pytest.raises(HostError, match=r"waited \S+ s for node 1, node 3\."):
                future.result(20)
    assert "syncline: waiting for node 1, node 3\n" in capsys.readouterr().err


def test_rendezvous_where_nobody_listens_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(route, "_FIRST_LINE_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    limits = Limits(join_timeout_s=1.0, silence_s=10.0, max_restarts=0)
    route_there = Route("127.0.0.1", port, "127.0.0.1", "lo")
    member = Membership({"say": "hello", "node_rank": 1}, route_there, limits, None, lambda: TOKEN)
    with pytest.raises(UsageError, match=rf"node 0 at 127\.0\.0\.1 port {port} could not be reached .* refused"):
        member.join()
    assert f"waiting for node 0 at 127.0.0.1 port {port}: connection refused" in capsys.readouterr().err


def test_port_that_swallows_everything_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_answer(*_args: Any, **_more: Any) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", no_answer)
    monkeypatch.setattr(route, "SILENCE_SECONDS", 0.3)
    with pytest.raises(UsageError, match=r"no answer\. .*firewall"):
        route.connect(Route("10.0.0.9", 29500, "10.0.0.1", "eth0"), 600.0, lambda line: None)


def test_somebody_elses_server_is_not_taken_for_node_0() -> None:
    def greet(server: socket.socket) -> None:
        with server.accept()[0] as connection:
            connection.sendall(b"220 mail.example.org ESMTP\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:
        pool.submit(greet, server)
        limits = Limits(join_timeout_s=5.0, silence_s=10.0, max_restarts=0)
        route = Route("127.0.0.1", server.getsockname()[1], "127.0.0.1", "lo")
        with pytest.raises(UsageError, match="does not respond like node 0"):
            Membership({"say": "hello", "node_rank": 1}, route, limits, None, lambda: TOKEN).join()


def test_cause_comes_before_its_echoes_with_the_name_of_its_host() -> None:
    with cluster(3) as nodes:
        members = nodes.started()
        echoes = [nodes.pool.submit(ended, member, PeerLostError("gone"), is_echo=True) for member in members[:2]]
        time.sleep(0.3)
        cause = RankFailed("KeyError: 'mine'", rank=2, traceback_text="Traceback …")
        verdicts = [ended(members[2], cause), *(echo.result(20) for echo in echoes)]
        assert {str(verdict) for verdict in verdicts} == {"[rank 2 on host h2] KeyError: 'mine'"}
        assert all(isinstance(verdict, RankFailed) and verdict.traceback_text for verdict in verdicts)


def test_echoes_alone_end_the_run_too() -> None:
    with cluster(2) as nodes:
        members = nodes.started()
        told = nodes.pool.submit(ended, members[0], PeerLostError("gone."), is_echo=True)
        words = "gone. Still busy while the others waited: host h1 (node 1, 10.0.0.1)."
        assert [str(ended(members[1])), str(told.result(20))] == [words, words]


def test_usage_error_of_a_rank_keeps_its_exit_code_and_is_not_tried_again() -> None:
    with cluster(2, max_restarts=3) as nodes:
        members = nodes.started()
        verdict = ended(members[1], UsageError("no such data", action="Name another."))
        assert (verdict.exit_code, str(verdict)) == (2, "no such data Name another.")


def test_node_whose_connection_closes_is_lost_and_named() -> None:
    with cluster(3) as nodes:
        members = nodes.started()
        assert members[1]._connection is not None
        members[1]._connection.close()
        for member in (members[0], members[2]):
            assert str(ended(member)) == "host h1 (node 1, 10.0.0.1) is lost: its connection closed."
        assert members[1].must_stop()
        assert not members[1].again(SynclineError("stopped"), is_echo=True)
        assert str(members[1].verdict).startswith("the rendezvous, host h0 (node 0, 10.0.0.0), is lost")


def test_node_that_falls_silent_is_lost_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(3, silence_s=2.0) as nodes:
        members = nodes.started()
        monkeypatch.setattr(members[2], "_left", threading.Event())
        monkeypatch.setattr(members[2]._connection, "send", lambda *_: True)
        for member in members[:2]:
            assert str(ended(member)) == "host h2 (node 2, 10.0.0.2) is lost: it has been silent for 2 s."


def test_interrupt_on_one_node_ends_all_with_its_name() -> None:
    with cluster(3) as nodes:
        members = nodes.started()
        members[1].signals.append(signal.SIGINT)
        assert members[1].must_stop() in (True, False)
        for member in members:
            verdict = ended(member)
            assert isinstance(verdict, Interrupted)
            assert str(verdict) == "Stopped by Ctrl-C on host h1; every rank has ended."


def test_node_that_cannot_go_on_ends_all() -> None:
    with cluster(2) as nodes:
        members = nodes.all_joined()
        members[1].fail(UsageError("the disk is full."))
        assert (str(ended(members[0])), ended(members[0]).exit_code) == ("the disk is full.", 2)


def test_all_start_again_until_restarts_are_used_up(capsys: pytest.CaptureFixture[str]) -> None:
    with cluster(2, max_restarts=1) as nodes:
        members = nodes.started()
        waiting = nodes.pool.submit(members[0].again, SynclineError("stopped"), is_echo=True)
        assert members[1].again(ContractError("shapes"), is_echo=False)
        assert waiting.result(20)
        assert [attempt.number for attempt in nodes.on_all(lambda member: member.next_attempt())] == [1, 1]
        assert capsys.readouterr().err.count("restart 1 of 1") == 2
        assert "shapes" in str(ended(members[1], ContractError("shapes")))


def test_node_that_was_cut_off_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its old connection is not known to be dead at node 0 when the new one arrives."""
    with cluster(2, max_restarts=1) as nodes:
        members = nodes.started()
        members[1]._known.lost = "it has been silent for 10 s"
        assert members[1].must_stop()
        waiting = nodes.pool.submit(members[0].again, SynclineError("stopped"), is_echo=True)
        assert members[1].again(SynclineError("stopped"), is_echo=True)
        assert waiting.result(20)
        assert [attempt.number for attempt in nodes.on_all(lambda member: member.next_attempt())] == [1, 1]


def test_connection_that_this_end_closed_meanwhile_is_let_go() -> None:
    with cluster(2) as nodes, listening("127.0.0.1", 0) as server:
        connection = Connection(socket.create_connection(server.getsockname()))
        connection.close()
        nodes.coordinator._read(connection, 1)


def test_ranks_are_told_which_start_it_is_and_on_which_host_others_are() -> None:
    place = placement_from_environment(
        {
            "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
            "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
            "TORCHELASTIC_RESTART_COUNT": "3", "SYNCLINE_HOST_NAMES": "a b",
        }
    )  # fmt: skip
    assert place is not None
    assert place.restart == 3
    assert [place.name_of(rank) for rank in (1, 2)] == ["rank 1 on host a", "rank 2 on host b"]


TRAIN = (
    *("--model", "user_model:Net", "--data", "synthetic", "--global-batch", "20", "--steps", "40"),
    *("--set", "checkpoint.every=4", "--set", "evaluate=false", "--threads", "1", "--max-restarts", "1"),
)


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    for name in ("alone", "a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "user_model.py").write_text(USER_MODEL)
    return tmp_path


def environment(workplace: Path, **extra: str) -> dict[str, str]:
    path = os.pathsep.join([str(workplace), *filter(None, [os.environ.get("PYTHONPATH")])])
    return cli_environment(PYTHONPATH=path, **extra)


@contextlib.contextmanager
def node(workplace: Path, folder: str, number: int, port: int, **extra: str) -> Iterator[subprocess.Popen[str]]:
    """A node with a folder of its own."""
    place = ("--nodes", "2", "--node-rank", str(number), "--rendezvous", f"127.0.0.1:{port}")
    process = subprocess.Popen(
        [str(SYNCLINE), "train", *TRAIN, *place, "--run-dir", "run"],
        env=environment(workplace, **extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=workplace / folder,
        start_new_session=True,
    )
    with killed_at_end(process):
        yield process


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_node_that_is_killed_and_started_again_leaves_the_weights_as_they_would_be(
    workplace: Path, cli_server: CliServer
) -> None:
    """With separate folders: checkpoints, events and output of all ranks are on node 0, and nothing on node 1."""
    command = ("train", *TRAIN, "--workers", "2", "--run-dir", "run", "--json")
    untroubled = cli_server.run(command, workplace / "alone", environment(workplace))
    assert untroubled.returncode == 0, untroubled.stderr
    port, run = free_port(), RunFolder(workplace / "a" / "run")
    with node(workplace, "a", 0, port, SLOW="0.05") as first:
        with node(workplace, "b", 1, port, SLOW="0.05") as second:
            wait_until(lambda: run.checkpoint_step() or first.poll() is not None, 60, "a checkpoint")
            second.kill()
        with node(workplace, "b", 1, port) as second:
            out, errors = first.communicate(timeout=90)
            second_out, second_errors = second.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0), errors + second_errors
    name = socket.gethostname()
    assert f"host {name} (node 1, 127.0.0.1) is lost: its connection closed." in errors
    assert "All ranks start again from the last checkpoint, restart 1 of 1." in errors
    assert "node 0 of 2: 127.0.0.1 on lo" in out
    assert f"results are on host {name} (node 0)" in second_out
    summary = run.summary()
    assert summary is not None
    assert summary["weights_sha256"] == json.loads(untroubled.stdout)["weights_sha256"]
    assert summary["timed_steps"] < 40
    for rank in range(2):
        assert read_log(run.events(rank))[0]["rank"] == rank
    assert run.info()["status"] == "finished"
    files = {path.name for path in run.checkpoints.glob("step-00000040/*")}
    assert files == {"checkpoint.json", "rank-0.pt", "rank-1.pt"}
    assert (run.logs / "rank-1.stdout.log").exists()
    assert (run.logs / "outcomes" / "rank-1.json").exists()
    assert not list((workplace / "b").rglob("rank-*"))


def test_interrupt_of_one_node_ends_the_other(workplace: Path) -> None:
    port, run = free_port(), RunFolder(workplace / "a" / "run")
    with node(workplace, "a", 0, port, SLOW="0.1") as first, node(workplace, "b", 1, port, SLOW="0.1") as second:
        wait_until(lambda: run.checkpoint_step() or first.poll() is not None, 60, "a checkpoint")
        os.killpg(second.pid, signal.SIGINT)
        ends = [process.communicate(timeout=60) for process in (first, second)]
    assert (first.returncode, second.returncode) == (130, 130), ends
    for _, errors in ends:
        assert f"syncline: Stopped by Ctrl-C on host {socket.gethostname()}; every rank has ended." in errors
    assert run.info()["status"] == "stopped"
