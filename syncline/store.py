"""Run folders: what a run was asked to do, on what machine, what each rank did, and how it ended.

    runs/NAME/
      run.json          format version, kind, when, status (running, finished, failed, stopped)
      plan.toml         the resolved plan: running it again gives the same run
      machine.json      processor, cores, versions
      events/           one event log per rank (see spans.py)
      logs/             the ranks' output and outcomes
      checkpoints/      the newest one
      summary.json      the result, once there is one

Every file is written aside and renamed, so it is whole or absent. Logs grow line by line.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import tempfile
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from syncline.errors import RunFolderError
from syncline.plan import Plan, load_plan

FORMAT = 1
ROOT = Path("runs")


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def events(self, rank: int) -> Path:
        return self.path / "events" / f"rank-{rank}.jsonl"

    def plan(self) -> Plan:
        return load_plan(self.path / "plan.toml", {})

    def info(self) -> dict[str, Any]:
        return _read_json(self.path / "run.json")

    def summary(self) -> dict[str, Any] | None:
        path = self.path / "summary.json"
        return _read_json(path) if path.exists() else None

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_atomic(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    def set_status(self, status: str) -> None:
        write_atomic(self.path / "run.json", json.dumps({**self.info(), "status": status}, indent=2) + "\n")


def create_run(path: Path | None, *, kind: str, plan: Plan, label: str) -> RunFolder:
    """A new run folder, whole or not at all. Without a path: runs/DATE-KIND-LABEL."""
    now = datetime.now().astimezone()
    path = path or _free_name(ROOT / f"{now:%Y%m%d-%H%M%S}-{kind}-{label}")
    if path.is_dir() and any(path.iterdir()):
        raise RunFolderError(
            f"{path} is not empty.", action="Choose another --run-dir, or continue that run with --resume."
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise RunFolderError(
            f"cannot write the run folder {path}: {error.strerror}.", action="Choose another --run-dir."
        ) from error
    info = {"format": FORMAT, "kind": kind, "created": now.isoformat(timespec="seconds"), "status": "running"}
    write_atomic(aside / "run.json", json.dumps(info, indent=2) + "\n")
    write_atomic(aside / "plan.toml", plan.to_toml())
    write_atomic(aside / "machine.json", json.dumps(machine(), indent=2) + "\n")
    aside.chmod(0o755)
    with contextlib.suppress(FileNotFoundError):
        path.rmdir()
    aside.rename(path)
    return RunFolder(path)


def open_run(path: Path | None) -> RunFolder:
    """The run at a path, or the last one under runs/. A folder of a newer format is refused."""
    if path is None:
        known = list_runs()
        if not known:
            raise RunFolderError(f"there is no run in {ROOT.resolve()}.", action="Start one with `syncline train`.")
        return known[-1]
    run = RunFolder(path)
    if not (path / "run.json").exists():
        raise RunFolderError(f"{path} is not a run folder.", action="`syncline runs` lists them.")
    version = run.info().get("format", 0)
    if version > FORMAT:
        raise RunFolderError(
            f"{path} has format {version}, this version reads up to {FORMAT}.", action="Update Syncline."
        )
    return run


def list_runs(root: Path = ROOT) -> list[RunFolder]:
    """All runs under a folder, oldest first."""
    runs = [RunFolder(info.parent) for info in root.glob("*/run.json") if not info.parent.name.startswith(".")]
    return sorted(runs, key=lambda run: (run.info().get("created", ""), run.path.name))


def write_atomic(path: Path, text: str) -> None:
    """Write aside, then rename: a reader sees the old file or the new one, never half of it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def remove_tree(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "syncline": metadata.version("syncline"),
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _free_name(path: Path) -> Path:
    """The path, or the path with the first number that is free: two runs may start in one second."""
    taken, number = path, 2
    while taken.exists():
        taken, number = path.with_name(f"{path.name}-{number}"), number + 1
    return taken


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RunFolderError(f"cannot read {path}: {error}.", action="The run folder is damaged.") from error
    if not isinstance(content, dict):
        raise RunFolderError(f"{path} does not hold an object.", action="The run folder is damaged.")
    return content
