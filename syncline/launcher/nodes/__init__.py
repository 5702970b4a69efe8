"""Ranks on several nodes: each node runs this with its own number, and all of them run as one.

Node 0 listens at the rendezvous address; the others find it there. Each node starts its share of the ranks, in the
order of the nodes, as on one machine.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.errors import SynclineError, UsageError
from syncline.launcher.adopt import HOSTS_VARIABLE
from syncline.launcher.here.host_ranks import Share, make_task, run_task
from syncline.launcher.nodes.token import Tokens
from syncline.launcher.route import Route, find_route
from syncline.launcher.starting import (
    check_numbers,
    listening,
    log_folder,
    packed,
    signals_noted,
    start_fork_server,
    wait_for_fork_server,
)
from syncline.launcher.trust import is_loopback

if TYPE_CHECKING:
    from syncline.launcher.home import Address
    from syncline.launcher.nodes.membership import Membership

LONGEST_SILENCE_S = 15.0
JOIN_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Node:
    """This node among the nodes of a run, as the user has said it."""

    nodes: int
    node_rank: int
    rendezvous: str
    join_timeout_s: float = JOIN_TIMEOUT_S
    token: str = field(default="", repr=False)
    """The run's secret, where whoever starts all nodes has given it to them; otherwise it is looked for."""
    token_file: Path | None = None
    folder: Path | None = None
    """Where nodes that see the same files find node 0's token."""

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise UsageError(f"Cannot run on {self.nodes} nodes.", action="Use at least one node.")
        if not 0 <= self.node_rank < self.nodes:
            raise UsageError(
                f"--node-rank {self.node_rank} is out of range for {self.nodes} nodes.",
                action=f"Number them from 0 to {self.nodes - 1}.",
            )

    @property
    def tokens(self) -> Tokens:
        return Tokens(self.rendezvous, self.token_file, self.folder, self.token)


class JoinedNode:
    """A node whose run all others have joined too."""

    def __init__(
        self, node: Node, route: Route, member: Any, hosts: list[tuple[str, str]], max_restarts: int
    ) -> None:
        self.node = node
        self.route = route
        self.member = member
        self.hosts = hosts
        self._max_restarts = max_restarts
        self.at_end = contextlib.ExitStack()
        """What is closed when all nodes have left."""

    @property
    def is_first(self) -> bool:
        return self.node.node_rank == 0

    @property
    def interface(self) -> str:
        """What carries the ranks' traffic: the one on the way to the rendezvous, unless the user has chosen."""
        return os.environ.get("GLOO_SOCKET_IFNAME") or self.route.interface

    def ranks(self, workers: int) -> range:
        return Share(self.node.node_rank, self.node.nodes, workers // self.node.nodes).ranks

    def serve(self, path: Path, created: str) -> Address:
        """By node 0: the run folder, until all nodes have left."""
        from syncline.launcher.home import Home

        home = Home(self.route.target, self.member.credential().token, path, created)
        self.at_end.callback(home.close)
        return home.address

    def address_of(self, served: Mapping[str, Any]) -> Address:
        """By the other nodes: where node 0 serves it."""
        from syncline.launcher.home import Address

        token = self.member.credential().token
        return Address(self.route.target, int(served["port"]), token, str(served["path"]), str(served["created"]))

    def run_ranks(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        *,
        workers: int,
        log_dir: Path,
        threads: int,
        preload: Sequence[str] = (),
    ) -> list[Any]:
        """This node's share of all `workers` ranks, to the end of the run; their results. An error is the one that
        every node ends with."""
        ranks_here = workers // self.node.nodes
        check_numbers(ranks_here, threads)
        share = Share(self.node.node_rank, self.node.nodes, ranks_here)
        with signals_noted() as signals, log_folder(log_dir, share.ranks) as folder:
            self.member.signals = signals
            start_fork_server(preload)
            wait_for_fork_server()  # all nodes' ranks start at once only if no node still loads torch
            payload = packed(function, tuple(args))
            task = make_task(payload, threads, folder, temporary=False, environment=self._environment())
            try:
                return run_task(task, share, self.member, signals, self._max_restarts)
            except SynclineError as error:
                raise self.member.verdict or error from None

    def _environment(self) -> Mapping[str, str]:
        names = {"GLOO_SOCKET_IFNAME": self.route.interface, "NCCL_SOCKET_IFNAME": self.route.interface}
        return {**names, HOSTS_VARIABLE: " ".join(name for name, _ in self.hosts)}


@contextlib.contextmanager
def joined(
    node: Node,
    plan: Mapping[str, Any],
    *,
    of_each: Sequence[str] = (),
    deadline_s: float,
    max_restarts: int,
    say: Callable[[str], None],
) -> Iterator[JoinedNode]:
    """This node in its run. `plan` must be the same on every node, but for keys `of_each`. An error inside ends the
    run on all nodes."""
    route = find_route(node.rendezvous)
    say(f"node {node.node_rank} of {node.nodes}: {route.address} on {route.interface}, rendezvous {node.rendezvous}")
    # Late: with them comes torch, and a wrong address should be reported at once.
    from syncline.launcher.nodes.coordinator import Coordinator, Limits
    from syncline.launcher.nodes.membership import Membership

    limits = Limits(node.join_timeout_s, min(deadline_s, LONGEST_SILENCE_S), max_restarts)
    hello = _hello(node, route, plan, of_each)
    node.tokens.given()  # what is wrong with it is said at once, and not when node 0 answers
    with contextlib.ExitStack() as stack:
        if node.node_rank == 0:
            # First: a port that is in use is another run's, and so would be the token in the folder.
            listener = stack.enter_context(_rendezvous_listener(route))
            credential = stack.enter_context(node.tokens.offered(say, is_local=is_loopback(route.target)))
            coordinator = Coordinator(listener, hello, limits, credential)
            member = Membership(hello, route, limits, coordinator, lambda: credential)
        else:
            member = Membership(hello, route, limits, None, node.tokens.found)
        yield from _to_its_end(node, route, member, max_restarts)


def _to_its_end(node: Node, route: Route, member: Membership, max_restarts: int) -> Iterator[JoinedNode]:
    with contextlib.ExitStack() as stack:
        try:
            here = JoinedNode(node, route, member, member.join(), max_restarts)
            stack.enter_context(here.at_end)
            yield here
        except BaseException as error:
            if member.verdict is None:
                member.fail(error)
            raise
        finally:
            member.leave()


def plan_of_node_0(node: Node) -> dict[str, Any]:
    """What node 0 is about to run, whole: for a node that has no plan of its own."""
    from syncline.launcher.nodes.membership import ask_for_plan

    return ask_for_plan(node.node_rank, find_route(node.rendezvous), node.join_timeout_s, node.tokens.found)


def _hello(node: Node, route: Route, plan: Mapping[str, Any], of_each: Sequence[str]) -> dict[str, Any]:
    return {
        "say": "hello",
        "nodes": node.nodes,
        "node_rank": node.node_rank,
        "host": socket.gethostname(),
        "address": route.address,
        "process": uuid.uuid4().hex,
        "versions": {
            "syncline": metadata.version("syncline"),
            "torch": metadata.version("torch"),
            "Python": ".".join(platform.python_version_tuple()[:2]),
        },
        "plan": {key: value for key, value in plan.items() if key not in of_each},
        "own": {key: value for key, value in plan.items() if key in of_each},
    }


def _rendezvous_listener(route: Route) -> socket.socket:
    try:
        return listening(route.target, route.port)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        raise UsageError(
            f"the rendezvous {route.target} is not this machine, and node 0 must run there.",
            action="Start --node-rank 0 on the rendezvous host, or set --rendezvous to this machine's address.",
        ) from None
