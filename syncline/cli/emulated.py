"""A verb on emulated hosts: the same command as on real machines, started on each of them as one node of several."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import typer

from syncline.cli.nodes import EMULATED_VARIABLE
from syncline.errors import HostError
from syncline.launcher.emulation.cluster import EmulatedCluster
from syncline.launcher.emulation.links import parse_links
from syncline.launcher.emulation.process import HostProcess
from syncline.launcher.local import signals_noted
from syncline.plan import Plan

_PORT = 29500
_LOOK_SECONDS = 0.05
_END_SECONDS = 20.0
_DEFAULT_LINK = "1gbit"


def on_emulated_hosts(verb: str, plan: Plan, arguments: Sequence[str], *, resume: Path | None = None) -> None:
    """Run `syncline VERB` with this plan on the plan's hosts; exits as node 0 does. `arguments` are those of the verb
    that are not in the plan."""
    links = parse_links(plan.link or _DEFAULT_LINK, plan.hosts)
    with (
        signals_noted() as noted,
        tempfile.TemporaryDirectory(prefix="syncline-hosts-") as folder,
        EmulatedCluster(plan.hosts, links) as cluster,
    ):
        (Path(folder) / "plan.toml").write_text(plan.to_toml())
        what = ["--resume", str(resume)] if resume else [str(Path(folder) / "plan.toml")]
        command = [sys.executable, "-P", "-c", "from syncline.cli import main; main()", verb, *what, *arguments]
        with contextlib.ExitStack() as files:
            nodes = [_start(cluster, host, command, Path(folder), files) for host in range(plan.hosts)]
            code = _watch(cluster, nodes, noted)
    raise typer.Exit(code)


def _start(
    cluster: EmulatedCluster, host: int, command: list[str], folder: Path, files: contextlib.ExitStack
) -> HostProcess:
    """Node 0 has the terminal. The others end with the same words, so theirs are kept only for the case that it
    cannot speak any more."""
    place = ["--nodes", str(cluster.num_hosts), "--node-rank", str(host)]
    place += ["--rendezvous", f"{cluster.address(0)}:{_PORT}"]
    environment = {**os.environ, EMULATED_VARIABLE: "1"}
    if host == 0:
        return cluster.popen(host, [*command, *place], env=environment)
    errors = files.enter_context((folder / f"node-{host}.log").open("wb"))
    return cluster.popen(host, [*command, *place], env=environment, stdout=subprocess.DEVNULL, stderr=errors)


def _watch(cluster: EmulatedCluster, nodes: list[HostProcess], noted: list[int]) -> int:
    """Until all nodes have ended: node 0's exit code. A signal is for node 0, which tells the others."""
    told = 0
    first_end: float | None = None
    while any(node.poll() is None for node in nodes):
        for number in noted[told:]:
            nodes[0].send_signal(number)
        told = len(noted)
        if first_end is None and (nodes[0].poll() is not None or noted):
            first_end = time.monotonic()
        if first_end is not None and time.monotonic() - first_end > _END_SECONDS:
            break  # the cluster's end is theirs
        time.sleep(_LOOK_SECONDS)
    code = nodes[0].poll()
    if code is None:
        raise HostError(f"{cluster.name(0)} did not end in time, and was ended with all other hosts.")
    if code < 0:
        raise HostError(f"{cluster.name(0)} (node 0) was killed by {signal.Signals(-code).name}.")
    return code
