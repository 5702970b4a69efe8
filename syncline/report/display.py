"""What a person sees while a run goes on: lines on stdout, a progress bar on stderr where that is a terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from syncline.voice import Voice


class Display:
    """Shows steps and lines as far as the voice allows; on ranks other than 0 nothing at all."""

    def __init__(self, voice: Voice, *, rank: int = 0, unit: str = "step", counted: str = "images") -> None:
        self._has_bar = rank == 0 and voice.has_bar
        self._has_lines = rank == 0 and voice.has_lines
        self._unit = unit
        self.counted = counted
        """What a rate is of: images or tokens."""
        self._console = Console(stderr=True)
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        if self._has_bar and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                TextColumn("left"),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task(self._unit, total=None, figures="starting")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, step: int, total: int, loss: float, units_per_s: float) -> None:
        self.progress(step, total, f"loss {loss:.3f} (rank 0)  {units_per_s:.0f} {self.counted}/s")

    def progress(self, done: int, total: int, figures: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, figures=figures)

    def doing(self, what: str) -> None:
        """Something that is not a step takes its time."""
        if self._bar is not None:
            self._bar.update(self._task, figures=what)

    def line(self, text: str) -> None:
        if not self._has_lines:
            return
        if self._bar is not None and sys.stdout.isatty():
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, flush=True)
