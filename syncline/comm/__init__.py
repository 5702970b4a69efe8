"""Stage 2: one seam, Communicator, between ranks."""

from __future__ import annotations

from syncline.comm.checked import Checked
from syncline.comm.communicator import Communicator
from syncline.comm.traced import Traced
from syncline.spans import EventLog

__all__ = ["Communicator", "instrumented"]


def instrumented(backend: Communicator, log: EventLog, *, deadline_s: float) -> Communicator:
    """The communicator that the product uses: every call compared across ranks and written to the log."""
    return Checked(Traced(backend, log), log, deadline_s=deadline_s)
