"""Voice: where the words of a use case go. A library caller hears nothing, unless it asks to."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from syncline.units import format_bytes

Show = Literal["nothing", "bar", "progress", "all"]
"""What a use case shows while it runs: nothing, a progress bar on stderr, words there too, or words on stdout."""

ERASE_LINE = "\r\x1b[2K"


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

    @property
    def has_words(self) -> bool:
        return self.show in ("progress", "all")

    @property
    def without_words(self) -> Voice:
        """For the parts of a larger whole, which speaks itself: movement alone."""
        return Voice("bar") if self.has_bar else self

    def say(self, text: str) -> None:
        if self.has_words:
            self._clear()
            print(text, file=sys.stdout if self.has_lines else sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        if self.has_words:
            self._clear()
            print(text, file=sys.stderr, flush=True)

    def doing(self, what: str) -> None:
        """What takes its time just now: on a line of the terminal that whatever comes next writes over."""
        if self.has_bar and sys.stderr.isatty():
            print(f"{ERASE_LINE}{what} ...", end="\r", file=sys.stderr, flush=True)

    def _clear(self) -> None:
        if self.has_bar and sys.stderr.isatty():
            print(ERASE_LINE, end="", file=sys.stderr, flush=True)

    def fetched(self, what: str, done: int, total: int | None, unit: str = "bytes") -> None:
        """Progress on one line of the terminal. What is counted ends its line when all is done."""
        if self.has_bar and sys.stderr.isatty():
            count = format_bytes if unit == "bytes" else "{:,}".format
            of = f" of {count(total)}" if total else ""
            end = "\n" if unit != "bytes" and done == total else ""
            print(f"\r{what}: {count(done)}{of}   ", end=end, file=sys.stderr, flush=True)
