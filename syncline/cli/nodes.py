"""Where a run's ranks are: all on this machine, on this and other machines, or on emulated hosts."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syncline.cli import options
from syncline.errors import PlanError, RunFolderError
from syncline.launcher.nodes import JoinedNode, Node, joined
from syncline.machine import cores
from syncline.marks import marks_of
from syncline.plan import Plan
from syncline.store import RunFolder, create_run
from syncline.units import format_seconds

EMULATED_VARIABLE = "SYNCLINE_EMULATED_HOSTS"
"""Set for a node that is one of the hosts that `--hosts` emulates."""
OF_EACH_MACHINE = ("data_dir", "threads")
"""Plan keys that may differ from node to node."""


@dataclass(frozen=True)
class Where:
    """The flags that say where ranks run."""

    hosts: int | None
    workers_per_host: int | None
    link: str | None
    nodes: int | None
    node_rank: int | None
    rendezvous: str | None
    join_timeout_s: float

    def __post_init__(self) -> None:
        node_flags = {"--nodes": self.nodes, "--node-rank": self.node_rank, "--rendezvous": self.rendezvous}
        missing = [name for name, value in node_flags.items() if value is None]
        if 0 < len(missing) < len(node_flags):
            raise PlanError(f"{', '.join(missing)} is missing: a node needs {', '.join(node_flags)}.")
        if self.nodes is not None and (self.hosts is not None or (self.link is not None and not is_emulated())):
            raise PlanError("--hosts and --link are for emulated hosts, --nodes is for machines: give one of them.")
        if self.workers_per_host is not None and self.num_hosts is None:
            raise PlanError("--workers-per-host needs --hosts or --nodes.")
        if self.join_timeout_s <= 0:
            raise PlanError(f"--join-timeout {self.join_timeout_s:g} is no time to wait.", action="Give seconds.")

    @property
    def is_node(self) -> bool:
        return self.nodes is not None

    @property
    def adds_nothing(self) -> bool:
        """No flag changes the plan: only which of its nodes this is."""
        return self.hosts is None and self.workers_per_host is None and self.link is None

    @property
    def num_hosts(self) -> int | None:
        return self.nodes if self.nodes is not None else self.hosts

    def plan_flags(self, flags: Mapping[str, Any]) -> dict[str, Any]:
        """The other plan flags with these on top. --workers is the number on all hosts together."""
        own = {"hosts": self.num_hosts, "link": self.link}
        if self.workers_per_host is not None:
            if flags.get("workers") is not None:
                raise PlanError("--workers and --workers-per-host contradict each other: give one of them.")
            own["workers"] = (self.num_hosts or 1) * self.workers_per_host
        return {**flags, **own}

    def emulated_arguments(self, run_dir: Path | None, *, as_json: bool) -> list[str]:
        """What every verb hands on to its nodes on emulated hosts."""
        place = ["--run-dir", str(run_dir)] if run_dir is not None else []
        return [*place, "--join-timeout", str(self.join_timeout_s), *(["--json"] if as_json else [])]

    def joined(self, plan: Plan, *, quiet: bool) -> AbstractContextManager[JoinedNode | None]:
        """This node in its run, or None if this machine is all there is."""
        if self.nodes is None or self.node_rank is None or self.rendezvous is None:
            return nullcontext()
        if plan.link is not None and not is_emulated():
            raise PlanError("the plan's link is for emulated hosts: leave it out where machines are nodes.")
        node = Node(self.nodes, self.node_rank, self.rendezvous, self.join_timeout_s)
        return _joined(node, plan, quiet=quiet)


def is_emulated() -> bool:
    """Whether this process runs on an emulated host."""
    return EMULATED_VARIABLE in os.environ


def marks_beside(plan: Plan) -> list[str]:
    """What must stand beside a result."""
    return [mark.text for mark in marks_of(plan, cores(), link_check())]


def link_check() -> dict[str, Any] | None:
    """What the emulated links were asked for and what they carried (see LinkCheck); None elsewhere."""
    from syncline.launcher.emulation.honesty import LINK_VARIABLE

    found: dict[str, Any] | None = json.loads(os.environ.get(LINK_VARIABLE, "null"))
    return found if is_emulated() else None


@contextlib.contextmanager
def _joined(node: Node, plan: Plan, *, quiet: bool) -> Iterator[JoinedNode]:
    whole = plan.model_dump(mode="json", exclude_none=True)  # as it will look on the other side
    common = {key: value for key, value in whole.items() if key not in OF_EACH_MACHINE}

    def say(line: str) -> None:
        print(line, file=sys.stderr if quiet else sys.stdout, flush=True)

    start = time.monotonic()
    with joined(node, common, deadline_s=plan.deadline_s, max_restarts=plan.max_restarts, say=say) as here:
        if here.is_first:
            say(f"{node.nodes} nodes have joined, after {format_seconds(time.monotonic() - start)}")
        else:
            say(f"all nodes have joined; progress and results are on host {here.hosts[0][0]} (node 0)")
        yield here


def run_folder(
    here: JoinedNode | None, run_dir: Path | None, old: RunFolder | None, *, kind: str, plan: Plan, label: str
) -> RunFolder:
    """The run's folder on this machine. Node 0 chooses; the others use the same folder if they see it, and make one
    of the same name if they do not."""
    if here is None:
        return old or create_run(run_dir, kind=kind, plan=plan, label=label)
    if here.is_first:
        run = old or create_run(run_dir, kind=kind, plan=plan, label=label)
        here.member.share({"run": str(run.path), "created": run.info()["created"]})
        here.member.keep_files(run.path / "events")
        return run
    chosen = here.member.shared()
    first_rank = here.first_rank(plan.workers)
    run = RunFolder(Path(chosen["run"]), keeper=first_rank)
    more = {"created": chosen["created"], "node": here.node.node_rank}
    known = run.info() if (run.path / "run.json").exists() else {}
    if known.get("created") == chosen["created"] and "node" not in known:
        return RunFolder(run.path)
    if known.get("created") != chosen["created"]:
        if old is not None:
            raise RunFolderError(
                f"{run.path} on host {here.hosts[here.node.node_rank][0]} is not the run that node 0 continues.",
                action="Start every node in the folder that it was started in.",
            )
        made = create_run(run.path, kind=kind, plan=plan, label=label, more=more)
        run = RunFolder(made.path, made.made, first_rank)
    here.files = lambda: sorted((run.path / "events").glob("rank-*.jsonl"))
    return run


def kept(run: RunFolder, here: JoinedNode | None, *, resumed: bool = False) -> AbstractContextManager[None]:
    """The run's status is written by whoever made the folder."""
    is_guest = here is not None and not here.is_first and run.keeper == 0
    return nullcontext() if is_guest else options.running(run, resumed=resumed)
