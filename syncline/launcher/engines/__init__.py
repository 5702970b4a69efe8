"""Engines: ranks as processes of a Ray or Spark cluster. One file for each, loaded only when it is asked for.

An engine starts processes and says which are gone (`Engine`, in seam.py). All else is the same for every engine:

    seam.py       what an engine does
    desk.py       where its processes report to the launcher: a connection each, open until they end
    placing.py    which process becomes which rank, from the hosts that they report
    rank_life.py  one process's way from its first word to its last
    driving.py    the launcher's side: place, watch, judge, restart; results by rank
    place.py      the place that `--engine` and `place=syncline.Engine("ray")` give to a run
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncline.errors import UsageError

if TYPE_CHECKING:
    from syncline.launcher.engines.seam import Engine


@dataclass(frozen=True)
class Row:
    """One engine: the package it needs, and what its address is called on the command line."""

    package: str
    flag: str


ENGINES = {"ray": Row("ray", "--address"), "spark": Row("pyspark", "--master")}


def check_engine(name: str) -> Row:
    """The engine's row; a UsageError if there is no such engine, or what it needs is not installed."""
    row = ENGINES.get(name)
    if row is None:
        raise UsageError(f"there is no engine {name!r}.", action=f"Choose from {', '.join(ENGINES)}.")
    if importlib.util.find_spec(row.package) is None:
        raise UsageError(
            f"engine {name} needs the package {row.package}, which is not installed.",
            action=f"Install Syncline with its extra: pip install 'syncline[{name}]', or '.[{name}]' in a clone.",
        )
    return row


def connect(name: str, address: str | None) -> Engine:
    """The engine, at this address or at its usual one; a UsageError or HostError if it cannot be reached."""
    check_engine(name)
    module = importlib.import_module(f"syncline.launcher.engines.{name}")
    engine: Engine = module.connect(address)
    return engine
