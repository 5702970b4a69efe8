"""Syncline: data-parallel training you can see through.

Names are loaded on first use, so that `import syncline` and `syncline --help` do not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from syncline.data_parallel import DataParallel, convert_sync_batch_norm
    from syncline.errors import SynclineError
    from syncline.jobs import compare, explain, probe, resume, train, verify
    from syncline.launcher.engines.place import Engine
    from syncline.launcher.here import launch
    from syncline.launcher.places import EmulatedHosts, Here, Nodes
    from syncline.metrics import gather, mean, sum
    from syncline.plan import Plan, load_plan
    from syncline.recording import record
    from syncline.saving import load, save
    from syncline.sharded_loader import Loader, loader
    from syncline.spans import EventLog
    from syncline.store import Run, load_run
    from syncline.studies import run_lab, scale, write_report
    from syncline.teaching import check_lab, grade_lab, write_sheet
    from syncline.workload.data.own import Data
    from syncline.workload.sharding import ShardedBatchSampler, Sharding

__version__ = "0.1.0"

_HOME = {
    "DataParallel": "data_parallel", "convert_sync_batch_norm": "data_parallel",
    "Data": "workload.data.own",
    "EmulatedHosts": "launcher.places", "Here": "launcher.places", "Nodes": "launcher.places",
    "Engine": "launcher.engines.place",
    "EventLog": "spans", "Plan": "plan", "Run": "store", "SynclineError": "errors",
    "ShardedBatchSampler": "workload.sharding", "Sharding": "workload.sharding",
    "compare": "jobs", "explain": "jobs", "probe": "jobs", "resume": "jobs", "train": "jobs", "verify": "jobs",
    "Loader": "sharded_loader", "loader": "sharded_loader", "load": "saving", "save": "saving",
    "gather": "metrics", "mean": "metrics", "sum": "metrics",
    "launch": "launcher.here", "load_plan": "plan", "load_run": "store", "record": "recording",
    "run_lab": "studies", "scale": "studies", "write_report": "studies",
    "check_lab": "teaching", "grade_lab": "teaching", "write_sheet": "teaching",
}  # fmt: skip

__all__ = [
    "Data", "DataParallel", "EmulatedHosts", "Engine", "EventLog", "Here", "Loader", "Nodes", "Plan", "Run",
    "ShardedBatchSampler", "Sharding", "SynclineError", "__version__", "check_lab", "compare",
    "convert_sync_batch_norm", "explain", "gather", "grade_lab", "launch", "load", "load_plan", "load_run",
    "loader", "mean", "probe", "record", "resume", "run_lab", "save", "scale", "sum", "train", "verify",
    "write_report", "write_sheet",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'syncline' has no attribute {name!r}")
    value = getattr(import_module(f"syncline.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
