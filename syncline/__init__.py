"""Syncline: data-parallel training you can see through.

Names are loaded on first use, so that `import syncline` and `syncline --help` do not wait for torch.
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "DataParallel": "syncline.data_parallel",
    "EventLog": "syncline.spans",
    "ShardedBatchSampler": "syncline.workload.sharding",
    "Sharding": "syncline.workload.sharding",
    "convert_sync_batch_norm": "syncline.data_parallel",
    "launch": "syncline.launcher.here",
    "record": "syncline.recording",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'syncline' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
