"""torch's elastic agent on an emulated host: what `torchrun` would run there, for any command.

Called by scripts.py with its orders. Exits with 0, or with the exit code of the rank that failed first, which it also
writes down.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from syncline.launcher.adopt import placement_from_environment
from syncline.launcher.emulation.scripts import TORCH_LOG_LEVEL

_STOP_SECONDS = 5
_JOIN_SECONDS = 120


class RankFiles(LogsSpecs):
    """Each rank's output in files of its own, and on the terminal too where it is to be shown.

    Rank 0 alone keeps the terminal itself, unless all are shown: progress bars then work as ever.
    """

    def __init__(self, log_dir: Path, *, show_all: bool) -> None:
        super().__init__(str(log_dir))
        self._log_dir = log_dir
        self._show_all = show_all

    @property
    def root_log_dir(self) -> str:
        return str(self._log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        numbers = {local: _rank(env) for local, env in envs.items()}
        errors = {local: str(self._log_dir / f"rank-{rank}.error.json") for local, rank in numbers.items()}
        for local, error_file in errors.items():
            envs[local]["TORCHELASTIC_ERROR_FILE"] = error_file
        stdouts, stderrs = self._files(numbers, "stdout"), self._files(numbers, "stderr")
        if self._show_all:
            return LogsDest(stdouts, stderrs, dict(stdouts), dict(stderrs), errors)
        return LogsDest(stdouts, stderrs, error_files=errors)

    def _files(self, numbers: dict[int, int], stream: str) -> dict[int, str]:
        on_terminal = None if self._show_all else 0
        return {
            local: "" if rank == on_terminal else str(output_file(self._log_dir, rank, stream))
            for local, rank in numbers.items()
        }


def _rank(environment: dict[str, str]) -> int:
    place = placement_from_environment(environment)
    assert place is not None, "the agent sets what torchrun sets"
    return place.rank


def output_file(log_dir: Path, rank: int, stream: str) -> Path:
    return log_dir / f"rank-{rank}.{stream}.log"


def failure_file(log_dir: Path, host: int) -> Path:
    return log_dir / f"host-{host}.failure.json"


def _give_ranks_the_log_level(theirs: str | None) -> None:
    """The quiet one is for this process alone, which has read it by now."""
    del os.environ[TORCH_LOG_LEVEL]
    if theirs is not None:
        os.environ[TORCH_LOG_LEVEL] = theirs


def run_agent(orders: dict[str, Any]) -> NoReturn:
    sys.exit(_run(orders))


def _run(orders: dict[str, Any]) -> int:
    log_dir = Path(orders["log_dir"])
    _give_ranks_the_log_level(orders["torch_log_level"])
    logging.disable(logging.CRITICAL)  # what torch's agent logs, tracebacks too, is about itself
    config = LaunchConfig(
        min_nodes=orders["num_hosts"],
        max_nodes=orders["num_hosts"],
        nproc_per_node=orders["workers_per_host"],
        run_id=orders["run_id"],
        role="rank",
        rdzv_backend="static",
        rdzv_endpoint=orders["meeting_point"],
        rdzv_configs={"rank": orders["host"], "timeout": _JOIN_SECONDS},
        max_restarts=0,
        local_addr=orders["address"],
        logs_specs=RankFiles(log_dir, show_all=orders["show_all"]),
        log_line_prefix_template=f"host{orders['host']} rank ${{rank}}: ",
        shutdown_timeout=_STOP_SECONDS,
    )
    command = orders["command"]
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        told = {"host": orders["host"], "rank": rank, "exit_code": failure.exitcode, "time": failure.timestamp}
        failure_file(log_dir, orders["host"]).write_text(json.dumps(told))
        return failure.exitcode if failure.exitcode > 0 else 1
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0
