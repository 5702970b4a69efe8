"""Voice: where the words of a use case go. A library caller hears nothing, unless it asks to."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from syncline.units import format_bytes

Show = Literal["nothing", "progress", "all"]
"""What a use case shows while it runs: nothing, words and a progress bar on stderr, or words on stdout too."""


@dataclass(frozen=True)
class Voice:
    """Travels to ranks and hosts with the rest of their orders, so it holds no open file."""

    show: Show = "nothing"

    @property
    def has_lines(self) -> bool:
        """Whether results are told line by line on stdout; with `progress`, stdout is the caller's own."""
        return self.show == "all"

    @property
    def has_bar(self) -> bool:
        return self.show != "nothing"

    def say(self, text: str) -> None:
        if self.show != "nothing":
            print(text, file=sys.stdout if self.has_lines else sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        if self.show != "nothing":
            print(text, file=sys.stderr, flush=True)

    def fetched(self, what: str, done: int, total: int | None, unit: str = "bytes") -> None:
        """Progress on one line of the terminal. What is counted ends its line when all is done."""
        if self.has_bar and sys.stderr.isatty():
            count = format_bytes if unit == "bytes" else "{:,}".format
            of = f" of {count(total)}" if total else ""
            end = "\n" if unit != "bytes" and done == total else ""
            print(f"\r{what}: {count(done)}{of}   ", end=end, file=sys.stderr, flush=True)
