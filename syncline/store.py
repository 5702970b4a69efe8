"""Run folders: what a run was asked to do, on what machine, what each rank did, and how it ended.

    runs/NAME/
      run.json          format version, kind, when, status (running, finished, failed, stopped)
      plan.toml         the resolved plan: running it again gives the same run
      machine.json      processor, cores, versions
      compute.json      what a step costs without synchronisation, layer by layer (see workload/recorded.py)
      events/           one event log per rank (see spans.py)
      logs/             the ranks' output and outcomes
      checkpoints/      the newest two, each with digests (see training/manifest.py)
      summary.json      the result, once there is one

Every file is written aside and renamed, so it is whole or absent. Logs grow block by block.

`RunFolder` is for those who write a run, `Run` (from `load_run`) for those who read it: each file once, when it is
first asked for.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from html import escape
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.errors import RunFolderError, UsageError
from syncline.events import NO_EVENTS, Events, read_events
from syncline.files import is_locked, locked, to_json, write_atomic
from syncline.folders import Folder, LocalFolder
from syncline.launcher.home import Address, FarFolder
from syncline.machine import bf16_instructions, cores, installed_bytes, processor
from syncline.marks import Mark, marks_of
from syncline.plan import Plan, stored_plan
from syncline.remote import fetched, is_url, shown
from syncline.spans import log_name
from syncline.stored import SUMMARIES, Info, Machine, Training, read_stored
from syncline.training.manifest import find_checkpoints
from syncline.workload.user_code import search_also

if TYPE_CHECKING:
    import polars

FORMAT = 1
ROOT = Path("runs")
LOCK = ".lock"
WORDLESS = "ended without a word"
"""The status of a run whose launcher was killed."""


@dataclass(frozen=True)
class RunFolder:
    path: Path
    made: tuple[Path, ...] = field(default=(), compare=False)
    """The folders that did not exist before the run, innermost first."""
    home: Address | None = None
    """Where processes that do not see the folder reach it; None where all of them do."""
    is_far: bool = False
    """This is only where such processes write what grows. The run folder itself is at home."""

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def files(self) -> Folder:
        """The run folder itself."""
        return FarFolder(self.home) if self.home is not None and self.is_far else LocalFolder(self.path)

    @property
    def checkpoint_files(self) -> Folder:
        far = self.home if self.is_far else None
        return FarFolder(far, "checkpoints") if far is not None else LocalFolder(self.checkpoints)

    def checkpoint_step(self) -> int | None:
        """The step after which the newest checkpoint was written, or None if there is none."""
        return max(find_checkpoints(self.checkpoint_files), default=None)

    def events(self, rank: int) -> Path:
        return self.path / "events" / log_name(rank)

    def plan(self) -> Plan:
        return stored_plan(self.path / "plan.toml")

    def info(self) -> dict[str, Any]:
        return read_stored(self.path / "run.json", Info)

    def status(self) -> str:
        """As run.json says; but a run that nobody keeps any more was killed before it could write how it ended."""
        status = str(self.info()["status"])
        return WORDLESS if status == "running" and not is_locked(self.path / LOCK) else status

    def machine(self) -> dict[str, Any]:
        """What the run ran on."""
        return read_stored(self.path / "machine.json", Machine)

    def summary(self) -> dict[str, Any] | None:
        path = self.path / "summary.json"
        return read_stored(path, SUMMARIES.get(self.info()["kind"], Training)) if path.exists() else None

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_atomic(self.path / "summary.json", to_json(summary, indent=2) + "\n")

    def write_compute(self, text: str) -> None:
        self.files.write("compute.json", text.encode())

    def set_status(self, status: str) -> None:
        """Also on a full disk: there, into the blocks that the file has."""
        path, content = self.path / "run.json", json.dumps({**self.info(), "status": status}, indent=2) + "\n"
        try:
            write_atomic(path, content)
        except OSError:
            with path.open("r+b") as file:
                file.write(content.encode())
                file.truncate()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process works on a run. The lock goes with the process, however it ends."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path / LOCK, while_waiting=_Glance().pass_by))
            except BlockingIOError:
                raise RunFolderError(f"another process is using {self.path}.", action="Wait until it ends.") from None
            yield

    def discard(self) -> None:
        """Take back a run that could not start: all is as it was before `create_run`."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.path.mkdir()
            for folder in self.made:
                folder.rmdir()


class _Glance:
    """Whoever lists runs holds a run's lock for a moment to see whether it is held: that passes."""

    def __init__(self) -> None:
        self._times = 0

    def pass_by(self) -> None:
        self._times += 1
        if self._times > 3:
            raise BlockingIOError
        time.sleep(0.02)


@dataclass(frozen=True)
class Run:
    """A run, read from its folder. A run that crashed or goes on still gives what it has."""

    path: Path

    @cached_property
    def folder(self) -> RunFolder:
        return RunFolder(self.path)

    @cached_property
    def plan(self) -> Plan:
        return self.folder.plan()

    @cached_property
    def info(self) -> dict[str, Any]:
        return self.folder.info()

    @cached_property
    def machine(self) -> dict[str, Any]:
        return self.folder.machine()

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The result; empty as long as there is none."""
        return self.folder.summary() or {}

    @property
    def kind(self) -> str:
        """train, compare, verify, probe, record or function."""
        return str(self.info.get("kind", ""))

    @property
    def status(self) -> str:
        """running, finished, failed, stopped, or "ended without a word"."""
        return self.folder.status()

    @cached_property
    def marks(self) -> list[Mark]:
        """What a reader must know beside the result: as noted when it ended; by the same rule for older runs."""
        noted = [Mark.parse(text) for text in self.summary.get("marks", ())]
        # Where another launcher placed the ranks, the plan does not know of several hosts, but their logs do.
        hosts = {info.host for info in self._logged.ranks.values()}
        machines = len(hosts) if self.plan.hosts == 1 and hosts else None
        link = self.summary.get("link")
        # A probe's summary says here which link it measured.
        check = {"note": "", **link} if isinstance(link, Mapping) else None
        ruled = marks_of(self.plan, self.machine.get("cores", 1), check, machines=machines)
        kinds = {mark.kind for mark in noted}
        return [*(mark for mark in ruled if mark.kind not in kinds), *noted]

    @cached_property
    def events(self) -> Events:
        """The event logs of all ranks, by method and step. Raises RunFolderError where there are none."""
        return read_events(self.path)

    def table(self) -> polars.DataFrame:
        """Every record of every rank as one tidy frame, times on rank 0's clock; empty where no rank wrote any."""
        return self._table

    @cached_property
    def _table(self) -> polars.DataFrame:
        return self._logged.table()

    @property
    def _logged(self) -> Events:
        try:
            return self.events
        except RunFolderError:
            return NO_EVENTS

    def losses(self) -> polars.DataFrame:
        """step, loss (mean over the global batch) and samples of every step of a training that all ranks finished."""
        import polars

        noted = self.noted_losses().sort("session", maintain_order=True)
        last = noted.unique(["rank", "step"], keep="last")  # a resumed run repeats steps
        total = polars.col("samples").sum()
        by_step = last.group_by("step").agg(
            (polars.col("value") * polars.col("samples")).sum().truediv(total).alias("loss"),
            total,
            polars.len().alias("ranks"),
        )
        return by_step.filter(polars.col("ranks") == polars.col("ranks").max()).drop("ranks").sort("step")

    def noted_losses(self) -> polars.DataFrame:
        """The rows of the table that are losses; of a long run, far fewer than all."""
        return self._logged.table("loss")

    def _repr_html_(self) -> str:
        plan = self.plan
        facts = {
            "run": shown(self.path), "kind": self.kind, "status": self.status, "model": plan.model, "data": plan.data,
            "method": plan.method, "workers": plan.workers, "global batch": plan.global_batch,
            "marks": "; ".join(map(str, self.marks)) or "none",
        }  # fmt: skip
        rows = "".join(f"<tr><th>{name}</th><td>{escape(str(value))}</td></tr>" for name, value in facts.items())
        return f"<table>{rows}</table>"


def load_run(path: Path | str | None = None, *, kind: str | None = None) -> Run:
    """The run at a path or URL, or the last one (of a kind) under runs/. A folder of a newer format is refused."""
    return Run(open_run(path, kind=kind).path)


def run_with_steps(path: Path | str | None) -> Run:
    """The run at a path or URL, or the newest under runs/ that takes steps: a probe has none."""
    runs = [run for run in list_runs() if run.info().get("kind") != "probe"] if path is None else []
    return Run(runs[-1].path) if runs else load_run(path)


def create_run(
    path: Path | None, *, kind: str, plan: Plan, label: str, more: Mapping[str, Any] | None = None
) -> RunFolder:
    """A new run folder, whole or not at all. Without a path: runs/DATE-KIND-LABEL. `more` goes into run.json."""
    now = datetime.now().astimezone()
    path = path or _free_name(ROOT / f"{now:%Y%m%d-%H%M%S}-{kind}-{label}")
    if path.is_dir() and any(path.iterdir()):
        raise RunFolderError(
            f"{path} is not empty.", action="Choose another --run-dir, or resume that run with --resume."
        )
    info = {"format": FORMAT, "kind": kind, "created": now.isoformat(timespec="microseconds"), "status": "running"}
    info["folder"] = os.getcwd()  # where a model or data of the user's own was found
    info |= more or {}
    made = tuple(folder for folder in (path, *path.parents) if not folder.exists())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _folder_aside(path) as aside:
            write_atomic(aside / "run.json", json.dumps(info, indent=2) + "\n")
            write_atomic(aside / "plan.toml", plan.to_toml())
            write_atomic(aside / "machine.json", json.dumps(machine(), indent=2) + "\n")
            aside.chmod(0o755)
            with contextlib.suppress(FileNotFoundError):
                path.rmdir()
            aside.rename(path)
    except OSError as error:
        raise RunFolderError(
            f"cannot write the run folder {path}: {_reason(error)}.", action="Choose another --run-dir."
        ) from error
    return RunFolder(path, made)


def _reason(error: OSError) -> str:
    if isinstance(error, FileExistsError | NotADirectoryError):
        return "a file is in the way"
    return error.strerror or str(error)


@contextlib.contextmanager
def _folder_aside(path: Path) -> Iterator[Path]:
    """A new folder beside the path, to be renamed to it; removed if that did not happen."""
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def open_run(path: Path | str | None, *, kind: str | None = None, checkpoints: bool = False) -> RunFolder:
    """The run at a path or URL, or the last one (of a kind) under runs/. A folder of a newer format is refused.

    From a URL, `checkpoints` are fetched only if asked for.
    """
    if is_url(path):
        path = fetched(str(path), checkpoints=checkpoints)
    if path is None:
        known = [run for run in list_runs() if kind in (None, run.info().get("kind"))]
        if not known:
            what = f"{kind} run" if kind else "run"
            action = f"Start one with `syncline {kind or 'train'}`."
            raise RunFolderError(f"there is no {what} in {ROOT.resolve()}.", action=action)
        path = known[-1].path
    path = Path(path)
    run = RunFolder(path)
    if not (path / "run.json").exists():
        raise RunFolderError(f"{path} is not a run folder.", action="`syncline runs` lists run folders.")
    version = run.info()["format"]
    if version > FORMAT:
        raise RunFolderError(
            f"{path} has format {version}; this version reads up to {FORMAT}.", action="Update Syncline."
        )
    return run


def resumable_run(path: Path | str | None) -> RunFolder:
    """The training run at a path or URL, or the last one under runs/; refused where nothing is left to do."""
    run = open_run(path, kind="train", checkpoints=True)
    info = run.info()
    if info["kind"] != "train":
        raise RunFolderError(f"{shown(run.path)} is a {info['kind']} run, which cannot be resumed.")
    if info["status"] == "finished":
        raise RunFolderError(f"{shown(run.path)} is finished: there is nothing to resume.", action="Start a new run.")
    if "folder" in info:
        search_also(Path(info["folder"]))
    return run


def list_runs(root: Path = ROOT, problems: list[str] | None = None) -> list[RunFolder]:
    """All runs under a folder that can be read, oldest first; `problems` receives what is wrong with the others."""
    created: dict[RunFolder, str] = {}
    for path in sorted(root.glob("*/run.json")):
        run = RunFolder(path.parent)
        if not run.path.name.startswith("."):
            try:  # one damaged folder must not hide the others
                created[run] = str(run.info()["created"])
                run.plan()
            except UsageError as error:
                created.pop(run, None)
                (problems if problems is not None else []).append(error.message)
    return sorted(created, key=lambda run: (created[run], run.path.name))


def machine() -> dict[str, Any]:
    return {
        "processor": processor(),
        "bf16": bf16_instructions(),
        "cores": cores(),
        "memory_bytes": installed_bytes(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "syncline": metadata.version("syncline"),
    }


def _free_name(path: Path) -> Path:
    """The path, or the path with the first number that is free: two runs may start in one second."""
    candidate, number = path, 2
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate
