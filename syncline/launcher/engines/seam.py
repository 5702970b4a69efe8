"""The seam: all that an engine has to do for ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Order:
    """What every process of one start is given. Travels as a pickle; holds the secret that lets it report."""

    address: str
    port: int
    token: str = field(repr=False)
    workers: int
    threads: int
    hosts: int | None = None
    """On exactly so many, equally many on each; None where the engine may choose."""
    mark: str = ""
    """A file beside the launcher's logs: a process that sees it has the same run folder."""


@dataclass(frozen=True)
class Layout:
    """On how many hosts ranks go, and threads for each; None for as many as at home."""

    hosts: int = 1
    threads: int | None = None


class Engine(ABC):
    """A connection to an engine. Serves one start after the other, from one thread."""

    name: str
    address: str
    """This machine's address, as the engine's processes reach it."""
    start_timeout_s = 180.0
    """How long all processes of a start may take until they report."""
    is_own = False
    """It was started for this run, on this machine alone: ranks may share cores, as at home."""

    def layout(self, workers: int, threads: int | None, hosts: int | None) -> Layout:
        """Where so many ranks would go now. A UsageError if there is no room, in words that name what is missing."""
        return Layout(hosts or 1, threads)

    @abstractmethod
    def start(self, order: Order) -> None:
        """Have `order.workers` processes call `rank_life.live(order, number, host)`, numbers from 0, and return.

        `host` is a text that only processes of one machine have in common. A UsageError if there is no room.
        """

    @abstractmethod
    def lost(self) -> Mapping[int, str]:
        """The processes of the last start that will never report, or have ended, by number, and how in the engine's
        words. Looked at ten times a second; must not wait."""

    @abstractmethod
    def stop(self) -> None:
        """End what the last start has started, by force, and give its room back. Nothing to stop is no error."""

    @abstractmethod
    def close(self) -> None:
        """Leave the engine; end it if it was started for this run."""
