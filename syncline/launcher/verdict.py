"""Which rank broke the run: reads every rank's outcome and the way its process ended, and names one rank.

A rank's own exception and a death by signal come before a broken connection, which is how the others learn of it;
among equals the earliest counts.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from syncline.errors import RankFailed, SynclineError
from syncline.launcher.outcome import Outcome, has_finished, output_files, read_outcome, usage_error_of

_ECHO_SECONDS = 2.0
_MEMORY_HINT = "If nobody did that by hand, the machine has probably run out of memory."


@dataclass(frozen=True)
class Ending:
    """How one rank's process ended, as the launcher saw it.

    `last_alive` is when the launcher last saw it running; `asked` that the launcher told it to stop; `forced` that
    the launcher had to kill it.
    """

    exit_code: int | None
    last_alive: float
    asked: bool
    forced: bool


@dataclass(frozen=True)
class _Failure:
    rank: int
    is_echo: bool
    time: float
    message: str
    traceback: str = ""
    action: str = ""
    outcome: Outcome | None = None


def judge(log_dir: Path, endings: list[Ending], *, keeps_logs: bool, first_rank: int = 0) -> SynclineError:
    """The error that the run ends with. `endings` are of the ranks from `first_rank` on; `keeps_logs` says that the
    ranks' log files outlive the run."""
    found = [_failure(rank, read_outcome(log_dir, rank), end) for rank, end in enumerate(endings, first_rank)]
    failures = [failure for failure in found if failure is not None]
    if not failures:
        return RankFailed("All ranks were stopped from outside, before they finished.")
    first = min(failures, key=lambda failure: (failure.is_echo, failure.time))
    usage_error = usage_error_of(first.outcome) if first.outcome else None
    if usage_error is not None:
        return usage_error
    return _rank_failed(first, failures, _where_output_is(log_dir, first.rank) if keeps_logs else "")


class Patience:
    """How long a run that has begun to fail goes on: until its cause is known, or has had its time to show.

    A broken connection is an echo: the rank that caused it may still be on its way to say so. Ended at once, it would
    be one of those that the launcher stopped, and the wrong rank would be blamed.
    """

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._first_failure_seen: float | None = None

    def is_over(self, exit_codes: Mapping[int, int | None]) -> bool:
        """`exit_codes` by rank, None for those that live."""
        # An exit code of 0 is not enough: os._exit(0) in the middle gives one too.
        failed = [
            rank for rank, code in exit_codes.items()
            if code or (code == 0 and not has_finished(self._log_dir, rank))
        ]  # fmt: skip
        if not failed:
            return False
        if self._first_failure_seen is None:
            self._first_failure_seen = time.monotonic()
        only_echoes = all(is_echo(self._log_dir, rank) for rank in failed)
        waited = time.monotonic() - self._first_failure_seen
        return not only_echoes or None not in exit_codes.values() or waited > _ECHO_SECONDS


def is_echo(log_dir: Path, rank: int) -> bool:
    """Whether this rank only tells of another rank's end."""
    outcome = read_outcome(log_dir, rank)
    return outcome is not None and outcome.state == "raised" and outcome.kind == "communication"


def _failure(rank: int, outcome: Outcome | None, ending: Ending) -> _Failure | None:
    if outcome is not None and outcome.state == "raised":
        told = f"{outcome.type}: {outcome.message}" if outcome.message else outcome.type
        return _Failure(rank, outcome.kind == "communication", outcome.time, told, outcome.traceback, outcome=outcome)
    if outcome is not None and outcome.state == "killed":
        return _Failure(rank, False, outcome.time, f"killed by {outcome.signal} from process {outcome.sender}.")
    if outcome is not None and outcome.state == "stopped":
        return None
    return _wordless_failure(rank, outcome, ending)


def _wordless_failure(rank: int, outcome: Outcome | None, ending: Ending) -> _Failure | None:
    """A process that is gone although its outcome says that it runs, or that all was well."""
    code = ending.exit_code
    finished = outcome is not None and outcome.state == "finished"
    if (finished and code == 0) or ending.forced or (ending.asked and _obeyed(code)):
        return None
    when = "before it could start" if outcome is None else "after its function returned" if finished else ""
    if code is not None and code < 0:
        name = _signal_name(-code)
        hint = _MEMORY_HINT if name == "SIGKILL" else ""
        return _Failure(rank, False, ending.last_alive, f"killed by {name}{_spaced(when)}.", action=hint)
    told = f"ended with exit code {code} and without an exception{_spaced(when)}."
    return _Failure(rank, False, ending.last_alive, told)


def _rank_failed(first: _Failure, failures: list[_Failure], where: str) -> RankFailed:
    others = sum(not failure.is_echo for failure in failures) - (not first.is_echo)
    message = first.message
    if others:
        message += f" ({others} other rank{'s' if others > 1 else ''} failed too)"
    error = RankFailed(
        message, action=f"{first.action} {where}".strip(), rank=first.rank, traceback_text=first.traceback
    )
    if first.traceback:
        error.add_note(f"\nRank {first.rank}'s own traceback:\n{first.traceback.rstrip()}")
    return error


def _obeyed(code: int | None) -> bool:
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    return code in {-number for number in signals} | {128 + number for number in signals}


def _where_output_is(log_dir: Path, rank: int) -> str:
    """Rank 0's is on the terminal, the others' in files; those that stayed empty are not worth a look."""
    own = [path for path in reversed(output_files(log_dir, rank)) if path.is_file() and path.stat().st_size]
    others = [path for path in log_dir.glob("rank-*.std*.log") if path not in own and path.stat().st_size]
    if own:
        return f"Its output is in {own[0]}{', other output beside it' if others or own[1:] else ''}."
    return f"Other ranks' output is in {log_dir}." if others else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _spaced(words: str) -> str:
    return f" {words}" if words else ""
