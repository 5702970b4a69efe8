"""Errors as messages between nodes: a node must end with the same words wherever the fault was."""

from __future__ import annotations

from syncline import errors
from syncline.errors import RankFailed, SynclineError
from syncline.launcher.frames import Message


def describe(error: SynclineError, host: str | None = None) -> Message:
    """`host` is where it happened, unless the error says so itself."""
    return {
        "kind": type(error).__name__,
        "message": error.message,
        "action": error.action,
        "rank": error.rank,
        "step": error.step,
        "host": error.host or host,
        "traceback": error.traceback_text if isinstance(error, RankFailed) else "",
    }


def restore(told: Message) -> SynclineError:
    kind = getattr(errors, str(told["kind"]), None)
    message, action = str(told["message"]), str(told["action"])
    error: SynclineError
    if kind is RankFailed:
        error = RankFailed(message, action=action, rank=told["rank"], traceback_text=str(told["traceback"]))
    elif isinstance(kind, type) and issubclass(kind, SynclineError):
        error = kind(message, action=action, rank=told["rank"], step=told["step"])
    else:
        error = SynclineError(message, action=action, rank=told["rank"], step=told["step"])
    error.host = told["host"]
    return error
