"""Ranks as actors of Ray, one each, in a placement group.

Without an address, this process starts a Ray of its own on loopback, which ends with the run. On a cluster, each rank
reserves a CPU for each of its threads. Ray keeps no order among a group's actors: placing.py sorts them by node.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from syncline.errors import HostError, UsageError
from syncline.launcher.engines.rank_life import live
from syncline.launcher.engines.seam import Engine, Layout, Order
from syncline.launcher.starting import LOOPBACK
from syncline.machine import cores

PLACE_SECONDS = 60.0
"""How long a cluster may take to give the room that it has said to have."""
_CONNECT_SECONDS = 10.0
_RANK = "syncline_rank"
"""What a Ray of our own counts instead of CPUs: as at home, there may be more ranks than cores."""
_MOST_RANKS = 10_000
_DIED = "its process died: it was killed, its machine ran out of memory, or it crashed."
"""Ray says the same in a paragraph."""
_LONGEST_WORDS = 300
_LONGEST_BASE = 30
"""Characters of a folder below which Ray's sockets still have names."""


def connect(address: str | None) -> RayEngine:
    """Ray as this process has it already, or at the address, or at RAY_ADDRESS, or one of its own."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if ray.is_initialized():
        return RayEngine()
    where = address or os.environ.get("RAY_ADDRESS")
    return _join(where) if where else _own()


class RayEngine(Engine):
    name = "ray"

    def __init__(self, leaving: contextlib.ExitStack | None = None, *, is_own: bool = False) -> None:
        self._leaving = leaving or contextlib.ExitStack()
        self.is_own = is_own
        self.address = LOOPBACK if is_own else str(ray.util.get_node_ip_address())
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._calls: list[Any] = []

    def layout(self, workers: int, threads: int | None, hosts: int | None) -> Layout:
        """On as few nodes as possible, equally many on each; threads to fill them, unless their number is given."""
        if self.is_own:
            if hosts is not None:
                raise UsageError("a Ray of its own has one node.", action="Leave --hosts out, or give --address.")
            return Layout(1, threads)
        free = sorted(_free_cpus().values(), reverse=True)
        for count in [hosts] if hosts else range(1, workers + 1):
            if workers % count == 0 and count <= len(free):
                each = workers // count
                if free[count - 1] >= each * (threads or 1):
                    return Layout(count, threads or int(free[count - 1]) // each)
        raise _no_room(workers, threads or 1, hosts)

    def start(self, order: Order) -> None:
        hosts = order.hosts or 1
        each = order.workers // hosts
        need = {_RANK: 1.0} if self.is_own else {"CPU": float(order.threads)}
        bundles = [{name: amount * each for name, amount in need.items()}] * hosts
        self._group = placement_group(bundles, strategy="STRICT_SPREAD")
        if not self._group.wait(PLACE_SECONDS):
            self.stop()
            raise _no_room(order.workers, order.threads, hosts)
        options: dict[str, Any] = {
            "num_cpus": need.get("CPU", 0), "resources": {_RANK: 1} if self.is_own else None, "max_restarts": 0,
        }  # fmt: skip
        for number in range(order.workers):
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number // each)
            self._actors.append(_Actor.options(**options, scheduling_strategy=strategy).remote())
        self._calls = [actor.live.remote(order, number) for number, actor in enumerate(self._actors)]

    def lost(self) -> Mapping[int, str]:
        ended, _ = ray.wait(self._calls, num_returns=len(self._calls), timeout=0) if self._calls else ([], [])
        return {number: words for number in map(self._calls.index, ended) if (words := _how(self._calls[number]))}

    def stop(self) -> None:
        for actor in self._actors:
            with contextlib.suppress(Exception):  # one that is gone already
                ray.kill(actor)
        if self._group is not None:
            with contextlib.suppress(Exception):
                remove_placement_group(self._group)
        self._actors, self._calls, self._group = [], [], None

    def close(self) -> None:
        self.stop()
        self._leaving.close()


class _Rank:
    def live(self, order: Order, number: int) -> None:
        live(order, number, ray.get_runtime_context().get_node_id())


_Actor: Any = ray.remote(_Rank)


def _how(call: Any) -> str:
    """How an actor's call ended, in Ray's words; empty where it returned."""
    try:
        ray.get(call)
    except ray.exceptions.RayTaskError as error:
        return str(error.cause)
    except ray.exceptions.RayError as error:
        words = " ".join(str(error).split())
        return _DIED if "worker process has died" in words else words[:_LONGEST_WORDS]
    return ""


def _own() -> RayEngine:
    """A Ray for this process alone: nothing of it is reached from elsewhere, nothing of it stays."""
    base = tempfile.gettempdir()
    with contextlib.ExitStack() as leaving:
        folder = tempfile.mkdtemp(prefix="ray-", dir=base if len(base) <= _LONGEST_BASE else "/tmp")
        leaving.callback(shutil.rmtree, folder, ignore_errors=True)
        leaving.enter_context(_own_token())
        leaving.enter_context(_silent())
        leaving.callback(ray.shutdown)
        # Otherwise Ray takes an address of another interface instead of loopback, and listens there.
        with _quiet(), mock.patch.object(ray._private.ray_constants, "ENABLE_RAY_CLUSTER", False):
            ray.init(
                address="local", num_cpus=cores(), resources={_RANK: _MOST_RANKS}, include_dashboard=False,
                _temp_dir=folder, _node_ip_address=LOOPBACK, **_USUAL,
            )  # fmt: skip
        return RayEngine(leaving.pop_all(), is_own=True)


def _join(address: str) -> RayEngine:
    if address.startswith("ray://"):
        raise UsageError(
            f"{address} is for Ray's client, from outside of the cluster; ranks must reach this process.",
            action="Run this on a node of the cluster with --address auto, or with `ray job submit`.",
        )
    leaving = contextlib.ExitStack()
    leaving.enter_context(_silent())
    leaving.callback(ray.shutdown)
    try:
        _knock(address)
        with _quiet():
            ray.init(address=address, **_USUAL)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        leaving.close()
        raise HostError(
            f"there is no Ray cluster at {address}: {_in_a_line(error)}",
            action="Start one with `ray start --head`, or correct --address.",
        ) from None
    return RayEngine(leaving)


def _in_a_line(error: Exception) -> str:
    """What went wrong, as one sentence."""
    words = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())[:_LONGEST_WORDS]
    return f"{words.rstrip('.')}."


_USUAL: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}


def _silent() -> contextlib.AbstractContextManager[Any]:
    """Ray prints a paragraph on standard output for each process that ends, which has no switch. We say it once."""
    return mock.patch.object(ray._private.worker, "print_to_stdstream", return_value=None)


def _knock(address: str) -> None:
    """Ray itself would try for many minutes to reach an address at which nobody listens."""
    found = ray._private.services.canonicalize_bootstrap_address(address)
    if found is not None:
        host, _, port = found.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Ray sets a handler for SIGTERM; ours, and the user's, stay. Its hints on how to start Ray are not for here."""
    handler = signal.getsignal(signal.SIGTERM)
    log = logging.getLogger("ray")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _own_token() -> Iterator[None]:
    """What lets into a Ray of our own, unless the user has chosen. Ray's own would stay in the user's home folder."""
    if any(name.startswith("RAY_AUTH_") for name in os.environ):
        yield
        return
    os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
    _read_token_again()
    try:
        yield
    finally:
        del os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"]
        _read_token_again()


def _read_token_again() -> None:
    """Ray reads both variables once, and has no public way to make it look again. Before 2.52 it had no tokens."""
    if hasattr(ray._raylet, "AuthenticationTokenLoader"):
        ray._raylet.Config.initialize("")
        ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


def _free_cpus() -> dict[str, float]:
    """By node that is alive."""
    free = ray._private.state.available_resources_per_node()
    return {node["NodeID"]: free.get(node["NodeID"], {}).get("CPU", 0.0) for node in ray.nodes() if node["Alive"]}


def _no_room(workers: int, threads: int, hosts: int | None) -> UsageError:
    free = " and ".join(f"{amount:g}" for amount in sorted(_free_cpus().values(), reverse=True))
    where = f" on {hosts} nodes" if hosts and hosts > 1 else ""
    return UsageError(
        f"Ray has no room for {workers} workers of {threads} CPU{'s' if threads > 1 else ''} each{where}: "
        f"its nodes have {free or 'no'} CPUs free.",
        action="Use fewer --workers or --threads, or wait until other work there ends.",
    )
