"""Whoever reaches a run's ports without its token changes nothing: not by what they say, nor how slowly, nor how many
they are. And what a node says that has the token but talks nonsense costs that node its seat, never the run."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_nodes import TOKEN, Cluster, cluster

from syncline.errors import UsageError
from syncline.launcher import trust
from syncline.launcher.nodes import door, membership
from syncline.launcher.nodes.coordinator import Coordinator, Limits, Seat
from syncline.launcher.nodes.door import Door
from syncline.launcher.nodes.token import Credential, Tokens
from syncline.launcher.starting import listening
from syncline.launcher.trust import is_same_user, proof
from syncline.launcher.wire import Connection, Frame, Message, receive_frame, send_frame

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)


def frame(message: object, payload: bytes = b"") -> bytes:
    text = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack("!4sII", b"SYN1", len(text), len(payload)) + text + payload


def knock(seat: object = 1, nonce: object = "abc") -> dict[str, Any]:
    return {"say": "knock", "seat": seat, "nonce": nonce}


def hello(**says: Any) -> dict[str, Any]:
    usual = {
        "say": "hello", "nodes": 2, "node_rank": 1, "host": "evil", "address": "10.0.0.66", "process": "p",
        "versions": {"torch": "2"}, "plan": {"model": "mlp", "workers": 4},
    }  # fmt: skip
    return {**usual, **says}


SAID = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "random": secrets.token_bytes(6000),
    "bare hello": frame({"say": "hello"}),
    "whole hello": frame(hello()),
    "another plan": frame(hello(plan={"model": "x"})),
    "seat -1": frame(hello(node_rank=-1)),
    "seat 99": frame(hello(node_rank=99)),
    "versions as a list": frame(hello(versions=[])),
    "fatal": frame({"say": "fatal", "error": {}}),
    "deep": frame(b"[" * 4000),
    "a list": frame([1]),
    "too long": frame({"say": "knock", "seat": 1, "nonce": "a" * 5000}),
    "256 MB to come": struct.pack("!4sII", b"SYN1", 2, 2**28 - 1) + b"{}" + bytes(10_000),
    "knock at seat -1": frame(knock(-1)),
    "knock at seat true": frame(knock(True)),
    "knock with odd letters": frame(knock(1, "\ud800")),
    "knock and hello at once": frame(knock()) + frame(hello()),
}


def finish(nodes: Cluster) -> None:
    """The run comes to its end, and a good one."""
    wait_until(lambda: all(nodes.on_all(lambda member: member.all_finished())), 60, "all finished")


def visit(nodes: Cluster, said: bytes, wait_s: float = 5.0) -> bytes:
    """What a stranger who says this hears until the door shuts."""
    heard = b""
    with socket.create_connection((nodes.route.target, nodes.route.port), timeout=wait_s) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while part := stranger.recv(4096):
                heard += part
    return heard


def test_strangers_are_turned_away_and_counted_before_and_during_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    with cluster(2) as nodes:
        first = nodes.join(0)
        for said in SAID.values():
            assert b"proven" not in visit(nodes, said)
        nodes.join(1).result(20)
        assert first.result(20) == [("h0", "10.0.0.0"), ("h1", "10.0.0.1")]
        nodes.on_all(lambda member: member.next_attempt())
        for said in SAID.values():
            visit(nodes, said)
        finish(nodes)
    count = 2 * len(SAID)
    assert f"syncline: {count} connections, the last from 127.0.0.1, did not prove" in capsys.readouterr().err


@pytest.mark.parametrize("seat", [0, 1])
def test_proof_of_another_token_seat_or_time_is_refused(seat: int) -> None:
    with cluster(2) as nodes:
        nodes.join(0)

        def answer(says: str, at: int) -> Message:
            with socket.create_connection((nodes.route.target, nodes.route.port), timeout=5) as stranger:
                send_frame(stranger, knock(at))
                challenge = receive_frame(stranger)
                assert challenge is not None
                numbers = ("abc", challenge.message["nonce"])
                heard = proof(TOKEN.token, "node", 1 - at, *numbers)  # of somebody who takes the other seat
                words = {
                    "another token": proof("another token 0123", "node", at, *numbers),
                    "another seat": heard,
                    "an earlier one": proof(TOKEN.token, "node", at, "abc", "an earlier challenge"),
                    "node 0's own": proof(TOKEN.token, "node 0", at, *numbers),
                    "odd letters": "é" * 64,
                }  # fmt: skip
                send_frame(stranger, {"say": "proof", "proof": words[says]})
                reply = receive_frame(stranger)
                assert reply is not None
                return reply.message

        for says in ("another token", "another seat", "an earlier one", "node 0's own", "odd letters"):
            assert answer(says, seat) == {"say": "refused"}


def test_slow_strangers_and_a_crowd_of_them_hold_nobody_up() -> None:
    with cluster(2) as nodes, contextlib.ExitStack() as held:
        for number in range(door.MOST_GUESTS + 40):
            stranger = socket.create_connection((nodes.route.target, nodes.route.port), timeout=5)
            held.callback(stranger.close)
            stranger.sendall([b"", b"SYN1\0", frame(knock())][number % 3])
        assert len(nodes.all_joined()) == 2
        assert len(nodes.coordinator._door._guests) <= door.MOST_GUESTS


def test_stranger_who_says_nothing_has_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "PATIENCE_SECONDS", 0.3)
    with cluster(2) as nodes, socket.create_connection((nodes.route.target, nodes.route.port), 10) as stranger:
        assert stranger.recv(1) == b""
        assert "1 connection, from 127.0.0.1" in nodes.coordinator.turned_away


def joins(nodes: Cluster, credential: Credential) -> membership.Membership:
    member = membership.Membership(nodes.hello(1), nodes.route, nodes.limits, None, lambda: credential)
    nodes.members.append(member)
    member.join()
    return member


def test_node_with_another_token_is_told_where_it_had_it_from() -> None:
    with cluster(2) as nodes:
        nodes.join(0)
        with pytest.raises(UsageError, match=r"does not know the token from SYNCLINE_TOKEN\. .*node 0 prints"):
            joins(nodes, Credential("another token 0123", "SYNCLINE_TOKEN"))


def test_without_a_token_only_the_same_user_of_this_machine_may_join(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(2) as nodes:
        first = nodes.join(0)
        monkeypatch.setattr(Connection, "is_same_user", False)
        with pytest.raises(UsageError, match=r"has no token for the run .*SYNCLINE_TOKEN.*--token-file"):
            joins(nodes, Credential())
        monkeypatch.setattr(Connection, "is_same_user", True)
        monkeypatch.setattr(door, "is_same_user", lambda connected: False)
        with pytest.raises(UsageError):
            joins(nodes, Credential())
        monkeypatch.undo()
        joins(nodes, Credential())
        assert len(first.result(20)) == 2


def test_node_does_not_talk_to_somebody_at_the_address_of_node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """A door with another token that lets everybody in: it cannot prove itself in return."""
    monkeypatch.setattr(Door, "_is_proven", lambda *_: True)
    with cluster(2) as nodes, pytest.raises(UsageError, match="does not respond like node 0 of this run"):
        joins(nodes, Credential("another token 0123", "the test"))


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6, socket.AF_UNIX])
def test_kernel_says_whose_the_other_end_is(family: socket.AddressFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    if family == socket.AF_UNIX:
        near, far = socket.socketpair()
    else:
        try:
            server = socket.create_server(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0), family=family)
        except OSError:
            pytest.skip("this machine has no IPv6")
        with server:
            near = socket.create_connection(server.getsockname()[:2], timeout=5)
            far = server.accept()[0]
    with near, far:
        assert is_same_user(near)
        assert is_same_user(far)
        monkeypatch.setattr(trust.os, "geteuid", lambda: os.getuid() + 1)
        assert not is_same_user(near)


# Where the token is from.


def test_token_that_node_0_leaves_is_found_and_goes_with_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    first = Tokens("node0:29500", folder=tmp_path / "runs")
    with first.offered(said.append, is_local=False) as credential:
        (left,) = (tmp_path / "runs").iterdir()
        assert left.stat().st_mode & 0o777 == 0o600
        assert Tokens("node0:29500", folder=tmp_path / "runs").found().token == credential.token
        assert Tokens("node0:29501", folder=tmp_path / "runs").found().token == ""
        assert [credential.token in said[0], str(left) in said[0], credential.token in repr(credential)] == [1, 1, 0]
        left.chmod(0o640)
        assert Tokens("node0:29500", folder=tmp_path / "runs").found().token == ""
        left.chmod(0o600)
    assert list(tmp_path.iterdir()) == []
    with first.offered(said.append, is_local=True):
        assert (len(said), list(tmp_path.iterdir())) == (1, [])
    (tmp_path / "runs").touch()  # where no folder can be, the token is only printed
    with first.offered(said.append, is_local=False) as credential:
        assert said[1].endswith("in a file with --token-file")


def test_token_that_the_user_gives_wins_and_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o600)
    monkeypatch.setenv("SYNCLINE_TOKEN", "fedcba9876543210")
    assert Tokens("a:1", path).found() == Credential("0123456789abcdef", f"the file {path}")
    assert Tokens("a:1").found() == Credential("fedcba9876543210", "SYNCLINE_TOKEN")
    said: list[str] = []
    with Tokens("a:1", folder=tmp_path).offered(said.append, is_local=False) as credential:
        assert (credential.token, said, list(tmp_path.iterdir())) == ("fedcba9876543210", [], [path])
    path.chmod(0o644)
    with pytest.raises(UsageError, match=r"others can read the token file .*chmod 600"):
        Tokens("a:1", path).found()
    with pytest.raises(UsageError, match="cannot read the token file"):
        Tokens("a:1", tmp_path / "none").found()
    monkeypatch.setenv("SYNCLINE_TOKEN", "short")
    with pytest.raises(UsageError, match=r"SYNCLINE_TOKEN holds no token: that is 16 characters"):
        Tokens("a:1").found()


# Whatever is said.


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster(2) as nodes:
        nodes.started()
        yield nodes
        finish(nodes)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    said=st.binary(max_size=300)
    | st.binary(max_size=60).map(frame)
    | JSON.map(frame)
    | st.dictionaries(st.sampled_from(["say", "seat", "nonce", "proof"]), JSON | st.sampled_from(["knock", "proof"]))
    .map(frame)
)  # fmt: skip
def test_whatever_a_stranger_says_the_run_goes_on(running: Cluster, said: bytes) -> None:
    assert b"proven" not in visit(running, said)
    assert all(member.verdict is None for member in running.members)


@settings(max_examples=120, deadline=None)
@given(first=JSON, second=JSON)
def test_whatever_a_stranger_proves_is_refused(running: Cluster, first: Any, second: Any) -> None:
    with socket.create_connection((running.route.target, running.route.port), timeout=5) as stranger:
        send_frame(stranger, knock())
        assert receive_frame(stranger) is not None
        if first != "":  # the word of a node that has no token, which this process's user may say
            stranger.sendall(frame({"say": "proof", "proof": first, "more": second}))
            assert receive_frame(stranger) == Frame({"say": "refused"})


class Deaf:
    """A connection that leads nowhere."""

    def send(self, *_: object) -> bool:
        return True

    def close(self) -> None:
        return


WORDS = ["hello", "ready", "finished", "failed", "fatal", "interrupted", "values", "file", "bye", "beat"]
KEYS = ["attempt", "echo", "error", "by", "values", "name", "nodes", "node_rank", "host", "plan", "versions"]


@settings(max_examples=200, deadline=None)
@given(
    phase=st.sampled_from(["joining", "gathering", "running", "over"]),
    messages=st.lists(
        st.builds(
            lambda say, rest: {**rest, "say": say},
            st.sampled_from(WORDS) | st.text(max_size=5),
            st.dictionaries(st.sampled_from(KEYS), JSON),
        ),
        min_size=1,
        max_size=3,
    ),
    seated=st.booleans(),
)
def test_nonsense_of_a_node_with_the_token_never_ends_the_coordinator(
    book: Coordinator, phase: str, messages: list[Message], seated: bool
) -> None:
    book._seats = [Seat(number, connection=Deaf(), heard=time.monotonic()) for number in (0, 1)]  # type: ignore[arg-type]
    book._phase, book._attempt, book._failures = phase, 0 if phase == "running" else -1, []
    connection: Any = book._seats[1].connection if seated else Deaf()
    for message in messages:
        book._handle(connection, 1, {**message, "attempt": 0}, b"")
        book._look_around()
        book._decide_at = 0.0


@pytest.fixture(scope="module")
def book() -> Coordinator:
    """Node 0's book, without its threads and its store."""
    limits = Limits(join_timeout_s=20.0, silence_s=10.0, max_restarts=1)
    coordinator = Coordinator(listening("127.0.0.1", 0), hello(node_rank=0), limits, TOKEN)
    coordinator.close()
    coordinator._start = lambda: None  # type: ignore[method-assign]
    return coordinator
