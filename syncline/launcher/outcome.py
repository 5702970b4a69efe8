"""What became of each rank, in its own words, and which rank broke the run.

A rank writes one small file, `outcomes/rank-N.json`, because only the rank knows whether an exception was its own or
the echo of another rank's end. The launcher reads all of them afterwards, looks at how each process ended, and names
one rank: a rank's own exception and a death by signal come before a broken connection, which is how the others learn
of it; among equals the earliest counts.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Literal

from syncline.errors import CommunicationError, ContractError, DeadlineError, RankFailed, SynclineError, UsageError
from syncline.files import write_atomic
from syncline.launcher.wire import pack, unpack
from syncline.machine import signal_name

State = Literal["running", "finished", "raised", "stopped", "killed"]
Kind = Literal["", "own", "communication"]

_HERE = str(Path(__file__).parent)

_ECHO_SECONDS = 2.0
_OVERDUE_SECONDS = 0.5
"""After a deadline: whoever was waited for has had that long to say why it does not come."""
_MEMORY_HINT = "If nobody did that by hand, the machine has probably run out of memory."

# Gloo, NCCL and the store report broken connections as plain RuntimeErrors: their words are all there is.
_CONNECTION_WORDS = (
    "gloo/",
    "[gloo]",
    "nccl",
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "connection was likely closed",
    "broken pipe",
    "socket timeout",
    "tcpstore",
    "store timeout",
    "wait timeout",
    "failed to recv",
    "failed to send",
)


@dataclass(frozen=True)
class Outcome:
    """A rank's last word. `time` is seconds since the epoch; `signal` and `sender` only where it was killed."""

    rank: int
    pid: int
    state: State = "running"
    time: float = 0.0
    kind: Kind = ""
    type: str = ""
    message: str = ""
    traceback: str = ""
    usage_error: str = ""
    signal: str = ""
    sender: int = 0
    reason: str = ""


class OutcomeFile:
    """The rank's side. The first final state counts: what the watcher hears later is only the launcher tidying up."""

    def __init__(self, log_dir: Path, rank: int) -> None:
        self._path = _path(log_dir, rank)
        self._outcome = Outcome(rank=rank, pid=os.getpid())
        self._lock = threading.Lock()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _write(self._path, self._outcome)

    def finished(self) -> None:
        self._settle(replace(self._outcome, state="finished"))

    def stopped(self, reason: str) -> None:
        self._settle(replace(self._outcome, state="stopped", reason=reason))

    def killed(self, signal_name: str, sender: int) -> None:
        self._settle(replace(self._outcome, state="killed", signal=signal_name, sender=sender))

    def raised(self, error: BaseException) -> None:
        self._settle(raising(self._outcome, error))

    def _settle(self, outcome: Outcome) -> None:
        with self._lock:
            if self._outcome.state == "running":
                self._outcome = replace(outcome, time=time.time())
                _write(self._path, self._outcome)


def raising(outcome: Outcome, error: BaseException) -> Outcome:
    """The outcome of a rank that raised this."""
    return replace(
        outcome,
        state="raised",
        kind=kind_of(error),
        type=type(error).__name__,
        message=str(error),
        traceback=_traceback(error),
        usage_error=_packed(error),
    )


def keep_outcome(log_dir: Path, outcome: Outcome) -> None:
    """By the launcher, for a rank that told it and wrote no file."""
    _folder(log_dir).mkdir(parents=True, exist_ok=True)
    _write(_path(log_dir, outcome.rank), outcome)


def output_files(log_dir: Path, rank: int) -> list[Path]:
    """Where a rank's stdout and stderr go; rank 0 stays on the terminal."""
    return [log_dir / f"rank-{rank}.{stream}.log" for stream in ("stdout", "stderr")] if rank else []


def read_outcome(log_dir: Path, rank: int) -> Outcome | None:
    """None if the rank died before it could write a word."""
    try:
        return Outcome(**json.loads(_path(log_dir, rank).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def has_finished(log_dir: Path, rank: int) -> bool:
    outcome = read_outcome(log_dir, rank)
    return outcome is not None and outcome.state == "finished"


def accept_exit(log_dir: Path, rank: int) -> None:
    """A script's rank ended with exit code 0 and without a word (os._exit): as under torchrun, that is a success."""
    outcome = read_outcome(log_dir, rank)
    if outcome is not None and outcome.state == "running":
        _write(_path(log_dir, rank), replace(outcome, state="finished", time=time.time()))


def forget_outcomes(log_dir: Path, ranks: Iterable[int]) -> None:
    """Remove what these ranks left in the same folder in an earlier run."""
    for rank in ranks:
        # With a dot: a file that its writer did not live to finish.
        for old in (*_folder(log_dir).glob(f"rank-{rank}.*"), *_folder(log_dir).glob(f".rank-{rank}.*")):
            old.unlink(missing_ok=True)


def usage_error_of(outcome: Outcome) -> UsageError | None:
    """The UsageError that the rank raised, as it was, or None if it raised something else."""
    if not outcome.usage_error:
        return None
    try:
        error = unpack(base64.b64decode(outcome.usage_error))
    except Exception:  # the error's class may be known to the rank only
        return UsageError(outcome.message)
    return error if isinstance(error, UsageError) else None


def kind_of(error: BaseException) -> Kind:
    """Whether this is the rank's own failure, or only how it learnt that another rank is gone."""
    causes = list(_causes(error))
    # Ranks that disagree on an operation have a bug of their own, although it shows while they talk.
    if any(isinstance(cause, ContractError) for cause in causes):
        return "own"
    return "communication" if any(_is_communication(cause) for cause in causes) else "own"


def user_frames(frames: TracebackType | None) -> TracebackType | None:
    """The traceback without the launcher's own frames at its top."""
    rest = frames
    while rest is not None and rest.tb_frame.f_code.co_filename.startswith(_HERE):
        rest = rest.tb_next
    return rest or frames


@dataclass(frozen=True)
class Ending:
    """How one rank's process ended, as the launcher saw it.

    `last_alive` is when the launcher last saw it running; `asked` that the launcher told it to stop; `forced` that
    the launcher had to kill it; `words` how it ended, where nobody can know an exit code.
    """

    exit_code: int | None
    last_alive: float
    asked: bool
    forced: bool
    words: str = ""


@dataclass(frozen=True)
class _Failure:
    rank: int
    is_echo: bool
    time: float
    message: str
    traceback: str = ""
    action: str = ""
    outcome: Outcome | None = None


def judge(log_dir: Path, endings: Mapping[int, Ending], *, keeps_logs: bool) -> SynclineError:
    """The error that the run ends with. `endings` by rank; `keeps_logs` says that the ranks' log files outlive the
    run."""
    ends = [_failure(rank, read_outcome(log_dir, rank), end) for rank, end in endings.items()]
    failures = [failure for failure in ends if failure is not None]
    if not failures:
        return RankFailed("All ranks were stopped from outside before they finished.")
    first = min(failures, key=lambda failure: (failure.is_echo, failure.time))
    usage_error = usage_error_of(first.outcome) if first.outcome else None
    if usage_error is not None:
        return usage_error
    finished = [rank for rank in endings if has_finished(log_dir, rank)]
    if first.is_echo and finished and "has finished" not in first.message:
        # Torch's own words name nobody. A rank that is done takes its connections with it.
        message = f"{first.message.rstrip()} ({_ranks_words(finished)} finished by then.)"
        first = replace(first, message=message)
    return _rank_failed(first, failures, _where_output_is(log_dir, first.rank) if keeps_logs else "")


class Patience:
    """How long a failing run continues: until its cause is known, or has had time to show.

    A broken connection is an echo: the rank that caused it may still be on its way to say so. If the
    launcher ended it at once, the wrong rank would get the blame.
    """

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._first_failure_seen: float | None = None

    def is_over(self, exit_codes: Mapping[int, int | None]) -> bool:
        """`exit_codes` by rank, None for those that live."""
        # An exit code of 0 is not enough: os._exit(0) in the middle of a function gives one too.
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
        longest = _OVERDUE_SECONDS if any(_is_overdue(self._log_dir, rank) for rank in failed) else _ECHO_SECONDS
        return not only_echoes or None not in exit_codes.values() or waited > longest


def is_echo(log_dir: Path, rank: int) -> bool:
    """Whether this rank only tells of another rank's end."""
    outcome = read_outcome(log_dir, rank)
    return outcome is not None and outcome.state == "raised" and outcome.kind == "communication"


def _is_overdue(log_dir: Path, rank: int) -> bool:
    """Whether this rank ended because a deadline had passed."""
    outcome = read_outcome(log_dir, rank)
    return outcome is not None and outcome.type == DeadlineError.__name__


def _failure(rank: int, outcome: Outcome | None, ending: Ending) -> _Failure | None:
    if outcome is not None and outcome.state == "raised":
        words = f"{outcome.type}: {outcome.message}" if outcome.message else outcome.type
        return _Failure(
            rank, outcome.kind == "communication", outcome.time, words, outcome.traceback, outcome=outcome
        )
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
    if ending.words:
        return _Failure(rank, False, ending.last_alive, ending.words)
    when = "before it could start" if outcome is None else "after its function returned" if finished else ""
    if code is not None and code < 0:
        name = signal_name(-code)
        hint = _MEMORY_HINT if name == "SIGKILL" else ""
        return _Failure(rank, False, ending.last_alive, f"killed by {name}{_spaced(when)}.", action=hint)
    words = f"ended with exit code {code} and without an exception{_spaced(when)}."
    return _Failure(rank, False, ending.last_alive, words)


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


def _ranks_words(ranks: list[int]) -> str:
    return f"rank {ranks[0]} had" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} had"


def _obeyed(code: int | None) -> bool:
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    return code in {-number for number in signals} | {128 + number for number in signals}


def _where_output_is(log_dir: Path, rank: int) -> str:
    """Rank 0's is on the terminal, the others' in files; those that stayed empty are not worth a look."""
    files = [path for path in reversed(output_files(log_dir, rank)) if path.is_file() and path.stat().st_size]
    others = [path for path in log_dir.glob("rank-*.std*.log") if path not in files and path.stat().st_size]
    if files:
        return f"Its output is in {files[0]}{'; other output is in the same folder' if others or files[1:] else ''}."
    return f"Other ranks' output is in {log_dir}." if others else ""


def _spaced(words: str) -> str:
    return f" {words}" if words else ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__


def _is_communication(error: BaseException) -> bool:
    return isinstance(error, CommunicationError) or is_about_connections(error)


def is_about_connections(error: BaseException) -> bool:
    """Whether torch means by this error that another rank is gone or late."""
    if isinstance(error, SynclineError) or not isinstance(error, RuntimeError):
        return False
    from torch.distributed import DistError

    return isinstance(error, DistError) or any(word in str(error).lower() for word in _CONNECTION_WORDS)


def _traceback(error: BaseException) -> str:
    if isinstance(error, SynclineError) and not error.is_about_code:
        return ""
    return "".join(traceback.format_exception(type(error), error, user_frames(error.__traceback__)))


def _packed(error: BaseException) -> str:
    if not isinstance(error, UsageError):
        return ""
    try:
        return base64.b64encode(pack(error)).decode()
    except Exception:  # an error that carries something unpicklable still says its message
        return base64.b64encode(pack(UsageError(error.message, action=error.action))).decode()


def _write(path: Path, outcome: Outcome) -> None:
    with contextlib.suppress(OSError):  # a full disk or a removed folder must not hide the rank's real end
        write_atomic(path, json.dumps(asdict(outcome), indent=1), durable=False)


def _path(log_dir: Path, rank: int) -> Path:
    return _folder(log_dir) / f"rank-{rank}.json"


def _folder(log_dir: Path) -> Path:
    return log_dir / "outcomes"
