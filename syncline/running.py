"""Composition: a run while its ranks run.

Its owner makes the folder, holds the lock, and writes status and summary, once.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.errors import Interrupted, SynclineError, UsageError
from syncline.launcher.nodes import JoinedNode
from syncline.launcher.places import Place, Ranks, RanksOfNode
from syncline.machine import cores
from syncline.marks import marks_of
from syncline.plan import Plan
from syncline.reaching import reached
from syncline.remote import copied, shown
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
    voice: Voice = field(default_factory=Voice)
    resumes: bool = False
    """It goes on from a checkpoint, as the run's owner says."""

    def on_ranks(self, function: Callable[..., Any], plan: Plan, *args: Any) -> Any:
        """The first rank's result. `plan` says which ranks; it is the function's first argument too."""
        self.voice.doing(f"starting {plan.workers} worker{'' if plan.workers == 1 else 's'}")
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
    try:
        run.write_summary({"link": check, **summary, "marks": marks})
    except OSError as error:
        raise SynclineError(
            f"cannot write the result into {shown(run.path)}: {error.strerror}.",
            action=f"Make room, then `syncline train --resume {shown(run.path)}`."
            if run.info()["kind"] == "train"
            else "",
        ) from None


@contextmanager
def started(
    kind: str, plan: Plan, place: Place, voice: Voice, *, label: str, run_dir: Path | None,
    old: RunFolder | None = None,
) -> Iterator[Job]:  # fmt: skip
    """Whatever ends the ranks, the run folder says how it ended. A run that was refused leaves no trace."""
    with copied(old.path if old is not None else run_dir), place.joined(plan, voice) as ranks:
        if isinstance(ranks, RanksOfNode) and not ranks.owns_run:
            with _folder_of_node(ranks.here, plan) as (run, resumes):
                yield Job(plan, run, ranks, voice, resumes)
            return
        run = old or create_run(run_dir, kind=kind, plan=plan, label=label)
        with keeping(run, resumed=old is not None):
            served = replace(run, home=ranks.home(run.path, run.info()["created"]))
            if isinstance(ranks, RanksOfNode) and served.home is not None:
                about = {"path": served.home.path, "port": served.home.port, "created": served.home.created}
                ranks.here.member.share({"run": str(run.path), "resumes": old is not None, **about})
            yield Job(plan, served, ranks, voice, old is not None)


@contextmanager
def keeping(run: RunFolder, *, resumed: bool = False) -> Iterator[None]:
    """The owner's hold on a run: its lock, and its status from the first moment to the last."""
    before = run.info()["status"]
    with run.locked():
        if resumed:
            run.set_status("running")
        try:
            yield
        except UsageError:
            if resumed:
                _note(run, before)
            elif run.checkpoint_step() is not None:
                _note(run, "failed")  # it had begun: what is wrong came with a restart
            else:
                run.discard()
            raise
        except BaseException as error:
            _note(run, "stopped" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed")
            raise
        run.set_status("finished")


def _note(run: RunFolder, status: str) -> None:
    """How a failing run ended. If that cannot be written either, what made it fail is still what must be heard."""
    for part in run.checkpoints.glob(".step-*.part"):
        shutil.rmtree(part, ignore_errors=True)  # room on a full disk; nobody will finish it
    try:
        run.set_status(status)
    except (OSError, SynclineError) as error:
        warnings.warn(f"cannot note in {run.path} that the run {status}: {error}", stacklevel=2)


@contextmanager
def _folder_of_node(here: JoinedNode, plan: Plan) -> Iterator[tuple[RunFolder, bool]]:
    """Node 0's run folder on another node, whether it sees it or not; and whether the run is resumed."""
    chosen = here.member.shared()
    run = RunFolder(Path(chosen["run"]), home=here.address_of(chosen))
    # The fork server's folder goes with this process, however it ends.
    with reached(run, here.ranks(plan.workers), get_temp_dir()) as found:
        if found.is_far:
            here.member.known_as[str(found.path.resolve())] = str(chosen["path"])
        yield found, bool(chosen["resumes"])
