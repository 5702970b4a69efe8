"""Stage 2: one interface between ranks, Communicator."""

from __future__ import annotations

from collections.abc import Callable

from syncline.comm.checked import Checked
from syncline.comm.communicator import Communicator
from syncline.comm.traced import Traced
from syncline.spans import EventLog

__all__ = ["Communicator", "instrumented"]


def instrumented(
    backend: Communicator,
    log: EventLog,
    *,
    deadline_s: float,
    name_of: Callable[[int], str] = "rank {}".format,
    name: str = "",
) -> Communicator:
    """The communicator that the product uses: every call compared across ranks and written to the log. `name_of` is
    what errors call a rank; `name` tells two of one backend apart."""
    return Checked(Traced(backend, log), log, deadline_s=deadline_s, name_of=name_of, name=name)
