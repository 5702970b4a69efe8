"""What became of each rank, in its own words: one small file per rank, `outcomes/rank-N.json`.

The rank writes it, because only the rank knows whether an exception was its own or the echo of another rank's
end. The launcher reads all of them afterwards and judges (verdict.py).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Literal

from syncline.errors import CommunicationError, ContractError, UsageError
from syncline.launcher.wire import pack, unpack

State = Literal["running", "finished", "raised", "stopped", "killed"]
Kind = Literal["", "own", "communication"]

_HERE = str(Path(__file__).parent)

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
    """The rank's side. The first final state stands: what the watcher hears later is only the launcher tidying up."""

    def __init__(self, log_dir: Path, rank: int) -> None:
        self._path = _path(log_dir, rank)
        self._outcome = Outcome(rank=rank, pid=os.getpid())
        self._lock = threading.Lock()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._write(self._outcome)

    def finished(self) -> None:
        self._settle(replace(self._outcome, state="finished"))

    def stopped(self, reason: str) -> None:
        self._settle(replace(self._outcome, state="stopped", reason=reason))

    def killed(self, signal_name: str, sender: int) -> None:
        self._settle(replace(self._outcome, state="killed", signal=signal_name, sender=sender))

    def raised(self, error: BaseException) -> None:
        final = replace(
            self._outcome,
            state="raised",
            kind=kind_of(error),
            type=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(type(error), error, user_frames(error.__traceback__))),
            usage_error=_packed(error),
        )
        self._settle(final)

    def _settle(self, outcome: Outcome) -> None:
        with self._lock:
            if self._outcome.state == "running":
                self._outcome = replace(outcome, time=time.time())
                self._write(self._outcome)

    def _write(self, outcome: Outcome) -> None:
        part = self._path.with_suffix(".part")
        with contextlib.suppress(OSError):  # a full disk or a removed folder must not hide the rank's real end
            part.write_text(json.dumps(asdict(outcome), indent=1))
            part.replace(self._path)


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


def forget_outcomes(log_dir: Path, ranks: Iterable[int]) -> None:
    """Remove what these ranks left in the same folder in an earlier run."""
    for rank in ranks:
        for old in _path(log_dir, rank).parent.glob(f"rank-{rank}.*"):
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


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__


def _is_communication(error: BaseException) -> bool:
    if isinstance(error, CommunicationError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    from torch.distributed import DistError

    return isinstance(error, DistError) or any(word in str(error).lower() for word in _CONNECTION_WORDS)


def _packed(error: BaseException) -> str:
    if not isinstance(error, UsageError):
        return ""
    try:
        return base64.b64encode(pack(error)).decode()
    except Exception:  # an error that carries something unpicklable still says its message
        return base64.b64encode(pack(UsageError(error.message, action=error.action))).decode()


def _path(log_dir: Path, rank: int) -> Path:
    return log_dir / "outcomes" / f"rank-{rank}.json"
