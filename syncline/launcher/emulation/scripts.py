"""Run any script that torchrun could run, on the hosts of an emulated cluster."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from syncline.launcher.emulation.emulated_cluster import EmulatedCluster
from syncline.launcher.emulation.host_process import HostProcess

TORCH_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_PORT = 29500
_LOOK_SECONDS = 0.05
_ECHO_SECONDS = 1.0
_STOP_SECONDS = 8.0
_TAIL_LINES = 20


@dataclass(frozen=True)
class Failure:
    """The rank that failed first. `exit_code` is negative for a signal, as in subprocess."""

    host: int
    rank: int | None
    exit_code: int
    output: str = ""
    """The end of its stderr, if that was not on the terminal."""


def run_script(
    cluster: EmulatedCluster,
    command: Sequence[str],
    *,
    workers_per_host: int,
    log_dir: Path,
    show_all: bool,
    stop_requested: Callable[[], object],
) -> Failure | None:
    """The command as every rank, to its end on all hosts; None if all went well, or if it was asked to stop.

    Each rank finds what torchrun would have set. The first failure ends all ranks.
    """
    orders = {
        "num_hosts": cluster.num_hosts,
        "workers_per_host": workers_per_host,
        "run_id": uuid.uuid4().hex[:12],
        "meeting_point": f"{cluster.address(0)}:{_PORT}",
        "log_dir": str(log_dir),
        "show_all": show_all,
        "command": list(command),
        "torch_log_level": os.environ.get(TORCH_LOG_LEVEL),
    }
    agents = [_start_agent(cluster, host, orders) for host in range(cluster.num_hosts)]
    while not stop_requested():
        codes = [agent.poll() for agent in agents]
        if any(codes) or None not in codes:
            break
        time.sleep(_LOOK_SECONDS)
    _wait(agents, _ECHO_SECONDS)
    for agent in agents:
        agent.send_signal(signal.SIGTERM)
    _wait(agents, _STOP_SECONDS)
    return None if stop_requested() else _first_failure(agents, log_dir)


def _start_agent(cluster: EmulatedCluster, host: int, orders: dict[str, object]) -> HostProcess:
    own = {**orders, "host": host, "address": cluster.address(host)}
    # Agents leave one by one, and torch would print a C++ trace of each that finds the store of host 0 gone.
    quiet = {**os.environ, TORCH_LOG_LEVEL: "ERROR"}
    return cluster.call(host, _run_agent, own, env=quiet)


def _run_agent(orders: dict[str, object]) -> None:
    from syncline.launcher.emulation.agent import run_agent  # here: it loads torch

    run_agent(orders)


def _wait(agents: list[HostProcess], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(agent.poll() is None for agent in agents):
        time.sleep(_LOOK_SECONDS)


def _first_failure(agents: list[HostProcess], log_dir: Path) -> Failure | None:
    """By the moment at which its agent saw it end: the others fail because of it."""
    from syncline.launcher.emulation.agent import failure_file, output_file

    files = [failure_file(log_dir, agent.host) for agent in agents]
    told = [json.loads(path.read_text()) for path in files if path.is_file()]
    if told:
        first = min(told, key=lambda one: one["time"])
        tail = _tail(output_file(log_dir, first["rank"], "stderr"))
        return Failure(first["host"], first["rank"], first["exit_code"], tail)
    failed = [agent for agent in agents if agent.poll() != 0]
    return Failure(failed[0].host, None, failed[0].poll() or -signal.SIGKILL) if failed else None


def _tail(path: Path) -> str:
    if not path.is_file():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
