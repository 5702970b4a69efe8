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
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from syncline.errors import SynclineError, UsageError
from syncline.launcher.adopt import HOSTS_VARIABLE
from syncline.launcher.here.host_ranks import Share, make_task, run_task
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

LONGEST_SILENCE_S = 15.0
JOIN_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Node:
    """This node among the nodes of a run, as the user has said it."""

    nodes: int
    node_rank: int
    rendezvous: str
    join_timeout_s: float = JOIN_TIMEOUT_S

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise UsageError(f"Cannot run on {self.nodes} nodes.", action="Use at least one node.")
        if not 0 <= self.node_rank < self.nodes:
            raise UsageError(
                f"--node-rank {self.node_rank} is out of range for {self.nodes} nodes.",
                action=f"Number them from 0 to {self.nodes - 1}.",
            )


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
        self.files: Callable[[], Sequence[Path]] = lambda: ()
        """Event logs that are sent to node 0 at the end, however the run ends."""

    @property
    def is_first(self) -> bool:
        return self.node.node_rank == 0

    @property
    def interface(self) -> str:
        """What carries the ranks' traffic: the one on the way to the rendezvous, unless the user has chosen."""
        return os.environ.get("GLOO_SOCKET_IFNAME") or self.route.interface

    def first_rank(self, workers: int) -> int:
        return self.node.node_rank * (workers // self.node.nodes)

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
    deadline_s: float,
    max_restarts: int,
    say: Callable[[str], None],
) -> Iterator[JoinedNode]:
    """This node in its run. `plan` must be the same on every node. An error inside ends the run on all nodes."""
    route = find_route(node.rendezvous)
    say(f"node {node.node_rank} of {node.nodes}: {route.address} on {route.interface}, rendezvous {node.rendezvous}")
    # Late: with them comes torch, and a wrong address should be reported at once.
    from syncline.launcher.nodes.coordinator import Coordinator, Limits
    from syncline.launcher.nodes.membership import Membership

    limits = Limits(node.join_timeout_s, min(deadline_s, LONGEST_SILENCE_S), max_restarts)
    hello = _hello(node, route, plan)
    coordinator = Coordinator(_rendezvous_listener(route), hello, limits) if node.node_rank == 0 else None
    member = Membership(hello, route, limits, coordinator)
    files: Sequence[Path] = ()
    try:
        here = JoinedNode(node, route, member, member.join(), max_restarts)
        try:
            yield here
        finally:
            files = here.files()
    except BaseException as error:
        if member.verdict is None:
            member.fail(error)
        raise
    finally:
        member.leave(files)


def _hello(node: Node, route: Route, plan: Mapping[str, Any]) -> dict[str, Any]:
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
        "plan": dict(plan),
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
