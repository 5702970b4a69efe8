"""The errors that Horovod's scripts catch."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective failed: ranks disagreed, one was lost, or Horovod was shut down. Elastic training goes back to the
    last commit on it."""


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts came or went: ranks must meet anew. With `skip_sync`, state is the same everywhere already."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts has changed.")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Kept for scripts that catch it; never raised, because nothing is compiled against a version of torch."""
