"""Every error that Syncline raises on purpose.

SynclineError                what was wrong, where (rank, step) and what to do next
├── UsageError               the user's input; exit code 2, nothing was written
│   ├── PlanError            a key or value of the plan
│   ├── DataError            a data set that is missing, damaged or of the wrong kind
│   └── RunFolderError       a run folder that cannot be written, read or resumed
├── HostError                a host of the run never joined, was lost, or cannot be reached
├── RankFailed               a rank failed; carries that rank's own traceback
├── NotFiniteError           a rank's loss, gradient or weight is NaN or infinite
├── DriftError               ranks that should hold the same weights do not
├── Interrupted              the user asked to stop; exit code 130
└── CommunicationError       talking to other ranks failed
    ├── ContractError        ranks called different operations, shapes or dtypes
    ├── DeadlineError        a wait lasted longer than the deadline; names the missing ranks
    └── PeerLostError        a connection to another rank broke
"""

from __future__ import annotations


class SynclineError(RuntimeError):
    """Base of the tree. A RuntimeError, as errors of torch are, so that a script which catches those catches these.

    `action` is one sentence that tells the user what to do next."""

    exit_code = 1
    is_about_code = True
    """Where in the code it was raised helps to understand it."""

    def __init__(self, message: str, *, action: str = "", rank: int | None = None, step: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.action = action
        self.rank = rank
        self.step = step
        self.host: str | None = None
        """The name of the rank's host, where there are several."""

    def __str__(self) -> str:
        host = f" on host {self.host}" if self.host else ""
        where = [f"rank {self.rank}{host}"] if self.rank is not None else []
        if self.step is not None:
            where.append(f"step {self.step}")
        prefix = f"[{', '.join(where)}] " if where else ""
        suffix = f" {self.action}" if self.action else ""
        return f"{prefix}{self.message}{suffix}"

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions with keyword arguments do not pickle by themselves, and errors travel between ranks.
        return (_rebuild, (type(self), self.__dict__.copy()))


def _rebuild(kind: type[SynclineError], state: dict[str, object]) -> SynclineError:
    error = kind.__new__(kind)
    Exception.__init__(error, state["message"])
    error.__dict__.update(state)
    return error


class UsageError(SynclineError):
    exit_code = 2


class PlanError(UsageError):
    pass


class DataError(UsageError):
    pass


class RunFolderError(UsageError):
    pass


class HostError(SynclineError):
    pass


class RankFailed(SynclineError):
    """The rank that broke the run. `traceback_text` is that rank's own traceback, or empty if it was killed."""

    def __init__(self, message: str, *, action: str = "", rank: int | None = None, traceback_text: str = "") -> None:
        super().__init__(message, action=action, rank=rank)
        self.traceback_text = traceback_text


class NotFiniteError(SynclineError):
    is_about_code = False


class DriftError(SynclineError):
    is_about_code = False


class Interrupted(SynclineError):
    exit_code = 130


class CommunicationError(SynclineError):
    pass


class ContractError(CommunicationError):
    pass


class DeadlineError(CommunicationError):
    pass


class PeerLostError(CommunicationError):
    pass
