"""Composition: a run while its ranks run.

Its owner makes the folder, holds the lock, and writes status and summary, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.errors import Interrupted, RunFolderError, UsageError
from syncline.launcher.nodes import JoinedNode
from syncline.launcher.places import Place, Ranks, RanksOfNode
from syncline.machine import cores
from syncline.marks import marks_of
from syncline.plan import Plan
from syncline.store import RunFolder, create_run
from syncline.voice import Voice

if TYPE_CHECKING:
    from syncline.launcher.emulation.link_check import LinkCheck


@dataclass(frozen=True)
class Job:
    """A run that has its place and its folder, and whose ranks can start."""

    plan: Plan
    run: RunFolder
    ranks: Ranks

    def on_ranks(self, function: Callable[..., Any], plan: Plan, *args: Any) -> Any:
        """The first rank's result. `plan` says which ranks; it is the function's first argument too."""
        return self.ranks.run(function, (plan, *args), plan, self.run.logs)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """The result, with what must be known to read it. Only the run's owner writes it."""
        if self.ranks.owns_run and summary is not None:
            write_result(self.run, self.plan, summary, self.ranks.link)


def write_result(
    run: RunFolder, plan: Plan, summary: Mapping[str, Any], link: LinkCheck | None = None, machines: int | None = None
) -> None:
    """By whoever owns the run, once. `machines`: how many there are, where another launcher placed the ranks."""
    check = link.as_dict() if link is not None else None
    marks = [mark.text for mark in marks_of(plan, cores(), check, machines=machines)]
    run.write_summary({"link": check, **summary, "marks": marks})


@contextmanager
def started(
    kind: str, plan: Plan, place: Place, voice: Voice, *, label: str, run_dir: Path | None,
    old: RunFolder | None = None,
) -> Iterator[Job]:  # fmt: skip
    """Whatever ends the ranks, the run folder says how it ended. A run that was refused leaves no trace."""
    with place.joined(plan, voice) as ranks:
        if isinstance(ranks, RanksOfNode) and not ranks.owns_run:
            run, is_guest = _folder_of_node(ranks.here, old, kind=kind, plan=plan, label=label)
        else:
            run, is_guest = old or create_run(run_dir, kind=kind, plan=plan, label=label), False
            if isinstance(ranks, RanksOfNode):
                ranks.here.member.share({"run": str(run.path), "created": run.info()["created"]})
                ranks.here.member.keep_files(run.path / "events")
        with nullcontext() if is_guest else keeping(run, resumed=old is not None):
            yield Job(plan, run, ranks)


@contextmanager
def keeping(run: RunFolder, *, resumed: bool = False) -> Iterator[None]:
    """The owner's hold on a run: its lock, and its status from the first moment to the last."""
    before = run.info()["status"]
    try:
        with run.locked():
            if resumed:
                run.set_status("running")
            yield
    except UsageError:
        if resumed:
            run.set_status(before)
        else:
            run.discard()
        raise
    except BaseException as error:
        run.set_status("stopped" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed")
        raise
    run.set_status("finished")


def _folder_of_node(
    here: JoinedNode, old: RunFolder | None, *, kind: str, plan: Plan, label: str
) -> tuple[RunFolder, bool]:
    """The run's folder on a node that does not own it: node 0's own if this node sees it (then it is a guest there),
    otherwise one of the same name. In that case the node's event logs go to node 0 at the end."""
    choice = here.member.shared()
    first_rank = here.first_rank(plan.workers)
    run = RunFolder(Path(choice["run"]), keeper=first_rank)
    more = {"created": choice["created"], "node": here.node.node_rank}
    info = run.info() if (run.path / "run.json").exists() else {}
    if info.get("created") == choice["created"] and "node" not in info:
        return RunFolder(run.path), True
    if info.get("created") != choice["created"]:
        if old is not None:
            raise RunFolderError(
                f"{run.path} on host {here.hosts[here.node.node_rank][0]} is not the run that node 0 continues.",
                action="Start every node in the same folder as before.",
            )
        created = create_run(run.path, kind=kind, plan=plan, label=label, more=more)
        run = RunFolder(created.path, created.made, first_rank)
    here.files = lambda: sorted((run.path / "events").glob("rank-*.jsonl"))
    return run, False
