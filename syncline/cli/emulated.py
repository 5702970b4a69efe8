"""A verb on emulated hosts: the same command as on real machines, started on each of them as one node of several."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from syncline.cli import Told
from syncline.cli.nodes import EMULATED_VARIABLE
from syncline.errors import HostError
from syncline.launcher.emulation import EmulatedCluster, HostProcess, parse_links
from syncline.launcher.emulation.honesty import LINK_VARIABLE, check_memory, measure_links
from syncline.launcher.starting import signals_noted
from syncline.plan import Plan
from syncline.units import format_seconds
from syncline.words import MODELS

_PORT = 29500
_LOOK_SECONDS = 0.05
_END_SECONDS = 20.0
DEFAULT_LINK = "1gbit"
_MEMORY_OF_HOST = "/dev/shm"
_SMALL_MODEL_BYTES = 4e6


def on_emulated_hosts(
    verb: str, plan: Plan, arguments: Sequence[str], *, resume: Path | None = None, takes_plan: bool = True
) -> None:
    """Run `syncline VERB` with this plan on the plan's hosts; exits as node 0 does. `arguments` are those of the verb
    that are not in the plan, or all of them if it takes none."""
    links = parse_links(plan.link or DEFAULT_LINK, plan.hosts)
    weights = _weights_bytes(plan)
    needed = check_memory(hosts=plan.hosts, ranks=plan.workers, weights_bytes=weights, replayed=plan.replayed)
    out = sys.stderr if "--json" in arguments else sys.stdout
    print(needed, file=out, flush=True)
    begin = time.monotonic()
    # The plan has no name in the file system, and hosts keep temporary files in a memory of their own: whatever ends
    # this process, nothing is left.
    with (
        signals_noted() as noted,
        tempfile.TemporaryFile("w") as planned,
        EmulatedCluster(plan.hosts, links) as cluster,
    ):
        planned.write(plan.to_toml())
        planned.flush()
        what = ["--resume", str(resume)] if resume else ["/dev/stdin"] if takes_plan else []
        command = [sys.executable, "-P", "-c", "from syncline.cli import main; main()", verb, *what, *arguments]
        up = format_seconds(time.monotonic() - begin)
        check = measure_links(cluster)
        print(f"{plan.hosts} hosts up in {up}; {check.line}", file=out, flush=True)
        extra = {EMULATED_VARIABLE: "1", LINK_VARIABLE: json.dumps(check.as_dict()), "TMPDIR": _MEMORY_OF_HOST}
        nodes = [_start(cluster, host, command, {**os.environ, **extra}, planned) for host in range(plan.hosts)]
        code = _watch(cluster, nodes, noted)
    raise Told(code)


def _start(
    cluster: EmulatedCluster, host: int, command: list[str], environment: dict[str, str], planned: IO[str]
) -> HostProcess:
    """Node 0 has the terminal. The others end with the same words, so theirs are dropped."""
    place = ["--nodes", str(cluster.num_hosts), "--node-rank", str(host)]
    place += ["--rendezvous", f"{cluster.address(0)}:{_PORT}"]
    output = None if host == 0 else subprocess.DEVNULL
    return cluster.popen(host, [*command, *place], env=environment, stdin=planned, stdout=output, stderr=output)


def _weights_bytes(plan: Plan) -> float:
    """As the table of models says; a model of the user's own is taken for a small one."""
    return 4.0 * MODELS[plan.model].num_parameters if plan.model in MODELS else _SMALL_MODEL_BYTES


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
