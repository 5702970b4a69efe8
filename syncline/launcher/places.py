"""Places: where the ranks of a run live. jobs.py knows nothing of a place but this seam.

Here            processes of this machine; mpiexec's own where the method needs them
Nodes           this machine is one of several that run the same command
EmulatedHosts   hosts on this machine, joined by links of a given rate
Engine          processes of a Ray or Spark cluster; see engines/
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.errors import HostError, PlanError
from syncline.launcher.here import run_ranks
from syncline.launcher.home import Address
from syncline.launcher.mpi import run_ranks_mpi
from syncline.launcher.nodes import JOIN_TIMEOUT_S, JoinedNode, Node, joined, plan_of_node_0
from syncline.launcher.starting import raise_if_interrupted, signals_noted, start_fork_server
from syncline.machine import check_memory, signal_name
from syncline.plan import Plan, parse_plan
from syncline.units import format_seconds
from syncline.voice import Voice
from syncline.words import MODELS

if TYPE_CHECKING:
    from syncline.launcher.emulation import EmulatedCluster, HostProcess
    from syncline.launcher.emulation.link_check import LinkCheck

PRELOAD = ("syncline.worker", "torch._dynamo")
"""What ranks need, loaded once before they are forked; the first optimiser that torch makes needs the second."""
OF_EACH_MACHINE = ("data_dir", "threads")
"""Plan keys that may differ from node to node."""
DEFAULT_LINK = "1gbit"
_PORT = 29500
_LOOK_SECONDS = 0.05
_END_SECONDS = 20.0
_MEMORY_OF_HOST = "/dev/shm"
_SMALL_MODEL_BYTES = 4e6


class Ranks(ABC):
    """The ranks of a run in their place, ready to start; or this node's share of them."""

    owns_run = True
    """Whether this process keeps the run's folder: its status and its summary."""
    link: LinkCheck | None = None
    """What the links of emulated hosts carried before the run."""
    how_to_resume = ""
    """What a user must add to the command that resumes the run."""

    def home(self, path: Path, created: str) -> Address | None:
        """Where ranks that do not see the run folder reach it from now on; None where all see it."""
        return None

    @abstractmethod
    def run(self, function: Callable[..., Any], args: Sequence[Any], plan: Plan, log_dir: Path | None) -> Any:
        """`function(*args)` on every rank of the plan, to its end; the first rank's result (on a node: of its own).

        Raises RankFailed, HostError, Interrupted, or a rank's own UsageError."""


class Place(ABC):
    """Where ranks run. Made by the user or by `place_for`; used for one run or for many, one after the other."""

    owns_run = True
    """False on a node that only helps another one's run."""

    def ranks_here(self, plan: Plan) -> int:
        """How many of the plan's ranks share this machine."""
        return plan.workers

    def opened(self) -> AbstractContextManager[None]:
        """What must be reached before a plan can be settled. Within, more of these blocks do nothing."""
        return nullcontext()

    def settled(self, plan: Plan) -> Plan:
        """The plan with what this place decides about it."""
        return plan

    def prepare(self, plan: Plan) -> None:
        """Start early what takes long to start. Nothing depends on it."""
        return

    @abstractmethod
    def joined(self, plan: Plan, voice: Voice) -> AbstractContextManager[Ranks]:
        """All hosts of the run are there, for as long as the block lasts."""


def place_for(plan: Plan) -> Place:
    """A plan with several hosts runs on emulated ones, unless the user says which node of several this is."""
    return EmulatedHosts() if plan.hosts > 1 else Here()


@dataclass(frozen=True)
class Here(Place):
    """This machine. Ranks meet on `port`; 0 means any free one."""

    port: int = 0

    def prepare(self, plan: Plan) -> None:
        if plan.method_row.world != "mpiexec":
            start_fork_server(PRELOAD)

    @contextmanager
    def joined(self, plan: Plan, voice: Voice) -> Iterator[Ranks]:
        yield _RanksHere(self.port)


class _RanksHere(Ranks):
    def __init__(self, port: int) -> None:
        self._port = port

    def run(self, function: Callable[..., Any], args: Sequence[Any], plan: Plan, log_dir: Path | None) -> Any:
        if plan.method_row.world == "mpiexec":
            return run_ranks_mpi(function, args, workers=plan.workers, log_dir=log_dir, threads=plan.threads)[0]
        results = run_ranks(
            function, args, workers=plan.num_ranks, log_dir=log_dir, threads=plan.threads,
            preload=PRELOAD, port=self._port, max_restarts=plan.max_restarts,
        )  # fmt: skip
        return results[0]


@dataclass(frozen=True)
class Nodes(Place):
    """This machine as one node of several: each runs the same command with its own number."""

    node: Node

    @property
    def owns_run(self) -> bool:  # type: ignore[override]
        return self.node.node_rank == 0

    def plan_of_node_0(self) -> Plan:
        """For a node that resumes: it need not have the run's folder. Data that is elsewhere here is looked for."""
        values = plan_of_node_0(self.node)
        if not Path(values.get("data_dir", "")).exists():
            del values["data_dir"]
        return parse_plan(values)

    def ranks_here(self, plan: Plan) -> int:
        return plan.workers // plan.hosts

    def prepare(self, plan: Plan) -> None:
        start_fork_server(PRELOAD)

    @contextmanager
    def joined(self, plan: Plan, voice: Voice) -> Iterator[Ranks]:
        if plan.link is not None:
            raise PlanError("the plan's link applies only to emulated hosts.", action="Remove it to use --nodes.")
        with _joined(self.node, plan, voice) as here:
            yield RanksOfNode(here)


class RanksOfNode(Ranks):
    how_to_resume = " on every node, with the same --nodes, --node-rank and --rendezvous"

    def __init__(self, here: JoinedNode) -> None:
        self.here = here
        self.owns_run = here.is_first

    def home(self, path: Path, created: str) -> Address | None:
        return self.here.serve(path, created)

    def run(self, function: Callable[..., Any], args: Sequence[Any], plan: Plan, log_dir: Path | None) -> Any:
        with _folder(log_dir) as folder:
            return _run_share(self.here, function, args, plan, folder)


@dataclass(frozen=True)
class EmulatedHosts(Place):
    """The plan's hosts, as network namespaces joined by the plan's links. Nothing of them outlives the run."""

    join_timeout_s: float = JOIN_TIMEOUT_S

    @contextmanager
    def joined(self, plan: Plan, voice: Voice) -> Iterator[Ranks]:
        from syncline.launcher.emulation import EmulatedCluster, parse_links
        from syncline.launcher.emulation.link_check import measure_links

        links = parse_links(plan.link or DEFAULT_LINK, plan.hosts)
        weights = _weights_bytes(plan)
        voice.say(check_memory(hosts=plan.hosts, ranks=plan.workers, weights_bytes=weights, replayed=plan.replayed))
        begin = time.monotonic()
        voice.doing(f"starting {plan.hosts} emulated hosts")
        with signals_noted() as signals, EmulatedCluster(plan.hosts, links, preload=PRELOAD) as cluster:
            up = format_seconds(time.monotonic() - begin)
            link = measure_links(cluster)
            voice.say(f"{plan.hosts} hosts up in {up}; {link.line}")
            yield _RanksOnHosts(cluster, link, signals, self.join_timeout_s, voice)
        raise_if_interrupted(signals)


class _RanksOnHosts(Ranks):
    def __init__(
        self, cluster: EmulatedCluster, link: LinkCheck, signals: list[int], join_timeout_s: float, voice: Voice
    ) -> None:
        self.link = link
        self._cluster = cluster
        self._signals = signals
        self._join_timeout_s = join_timeout_s
        self._voice = voice

    def run(self, function: Callable[..., Any], args: Sequence[Any], plan: Plan, log_dir: Path | None) -> Any:
        raise_if_interrupted(self._signals)
        token = secrets.token_hex(16)
        with _folder(log_dir) as folder:
            hosts = [self._start(host, token, function, args, plan, folder) for host in range(plan.hosts)]
            self._watch(hosts)
            return hosts[0].result()

    def _start(
        self, host: int, token: str, function: Callable[..., Any], args: Sequence[Any], plan: Plan, folder: Path
    ) -> HostProcess:
        """Host 0 has the terminal. The others end with the same words, so theirs are dropped."""
        cluster = self._cluster
        node = Node(cluster.num_hosts, host, f"{cluster.address(0)}:{_PORT}", self._join_timeout_s, token)
        output = None if host == 0 else subprocess.DEVNULL
        voice = self._voice if host == 0 else Voice()
        # Temporary files live in the host's own memory: whatever ends it, nothing is left of them.
        return cluster.call(
            host, _run_on_host, node, plan, voice, function, tuple(args), folder,
            env={**os.environ, "TMPDIR": _MEMORY_OF_HOST}, stdout=output, stderr=output,
        )  # fmt: skip

    def _watch(self, hosts: list[HostProcess]) -> None:
        """Until all hosts have ended. A signal is for host 0, which tells the others."""
        sent = 0
        first_end: float | None = None
        while any(host.poll() is None for host in hosts):
            for number in self._signals[sent:]:
                hosts[0].send_signal(number)
            sent = len(self._signals)
            if first_end is None and (hosts[0].poll() is not None or self._signals):
                first_end = time.monotonic()
            if first_end is not None and time.monotonic() - first_end > _END_SECONDS:
                break  # the cluster's end is theirs
            time.sleep(_LOOK_SECONDS)
        code = hosts[0].poll()
        if code is None:
            raise HostError(f"{self._cluster.name(0)} did not end in time; all hosts have been stopped.")
        if code < 0:
            raise HostError(f"{self._cluster.name(0)} (node 0) was killed by {signal_name(-code)}.")


def _run_on_host(
    node: Node, plan: Plan, voice: Voice, function: Callable[..., Any], args: tuple[Any, ...], folder: Path
) -> Any:
    """What runs on each emulated host: the same as on a machine that is a node."""
    start_fork_server(PRELOAD)  # before there are threads: it is then a fork of this process
    with _joined(node, plan, voice) as here:
        return _run_share(here, function, args, plan, folder)


def _run_share(here: JoinedNode, function: Callable[..., Any], args: Sequence[Any], plan: Plan, folder: Path) -> Any:
    results = here.run_ranks(
        function, args, workers=plan.workers, log_dir=folder, threads=plan.threads or 1, preload=PRELOAD
    )
    return results[0]


@contextmanager
def _joined(node: Node, plan: Plan, voice: Voice) -> Iterator[JoinedNode]:
    start = time.monotonic()
    whole = plan.model_dump(mode="json", exclude_none=True)  # as it will look on the other side
    with joined(
        node, whole, of_each=OF_EACH_MACHINE, deadline_s=plan.deadline_s, max_restarts=plan.max_restarts,
        say=voice.say,
    ) as here:  # fmt: skip
        if here.is_first:
            voice.say(f"{node.nodes} nodes have joined, after {format_seconds(time.monotonic() - start)}")
        else:
            voice.say(f"all nodes have joined; progress and results are on host {here.hosts[0][0]} (node 0)")
        yield here


@contextmanager
def _folder(log_dir: Path | None) -> Iterator[Path]:
    with contextlib.ExitStack() as stack:
        yield log_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="syncline-")))


def _weights_bytes(plan: Plan) -> float:
    """From the table of models; a user's own model counts as a small one."""
    return 4.0 * MODELS[plan.model].num_parameters if plan.model in MODELS else _SMALL_MODEL_BYTES
