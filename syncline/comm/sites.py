"""Where in the user's own code a rank is: the innermost line of Python that is neither ours, nor torch's, nor the
language's. A stack is read once for each kind of call, and when somebody asks why nothing moves: never in a step."""

from __future__ import annotations

import gc
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

_OURS = str(Path(__file__).parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib"))
"""They lie below the language's own folder, and are a user's code as much as a script is."""
_LANGUAGE = (*(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")), "<frozen ")
_BELOW_STEPS = tuple(f"{_OURS}{folder}{os.sep}" for folder in ("comm", "sync", "collectives", "launcher"))
_STARTERS = (forkserver.__file__, *(f"{_OURS}launcher{os.sep}{place}{os.sep}" for place in ("emulation", "mpi")))
"""Run by a `python -c` that is not the user's."""
_DUMPED_LINE = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_DUMPED_THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)")
_looking = threading.Lock()


class Line(NamedTuple):
    """One level of a stack."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{shortened(self.file)}:{self.number} in {self.function}"

    @property
    def is_users(self) -> bool:
        if self.file.startswith((_OURS, _TORCH)):
            return False
        return self.file.startswith(_LIBRARIES) or not self.file.startswith(_LANGUAGE)

    @property
    def is_our_loop(self) -> bool:
        """Where all of a program is ours (`syncline train`), the line of our own loop says most."""
        return self.file.startswith(_OURS) and not self.file.startswith(_BELOW_STEPS)


def own_site(owner: int) -> str:
    """file:line of the caller's user; in a thread of ours, of the thread that it works for."""
    own = list(_levels(sys._getframe(1)))
    return site_of(own if any(line.is_users for line in own) else stack_of(owner) or own)


def site_of(stack: Sequence[Line]) -> str:
    """The line of a stack that is worth naming; empty if there is none."""
    lines = users_part(stack)
    return f"{shortened(lines[0].file)}:{lines[0].number}" if lines else ""


def users_part(stack: Sequence[Line]) -> list[Line]:
    """What helps a user of a stack: his own levels, or else those of our loop. The program of a fork
    server is neither."""
    users = [
        line for inner, line in zip([None, *stack], stack, strict=False)
        if line.is_users and not (inner and line.file == "<string>" and inner.file.startswith(_STARTERS))
    ]  # fmt: skip
    return users or [line for line in stack if line.is_our_loop]


def stack_of(thread: int) -> list[Line]:
    """What a thread of this process is doing, innermost first."""
    with _looking:
        # The interpreter lists frames under a lock that starting a thread needs too. Were garbage found meanwhile,
        # its finalizers could wait for another thread, and all would stand still (python/cpython#106883).
        collects = gc.isenabled()
        gc.disable()
        try:
            frame = sys._current_frames().get(thread)
        finally:
            if collects:
                gc.enable()
    return list(_levels(frame))


def parse_dump(text: str, thread: int) -> list[Line]:
    """The last stack of a thread in what faulthandler wrote, innermost first."""
    stack: list[Line] = []
    is_ours = False
    for text_line in text.splitlines():
        if header := _DUMPED_THREAD.match(text_line):
            is_ours = int(header[1], 16) == thread
            stack = [] if is_ours else stack
        elif is_ours and (match := _DUMPED_LINE.fullmatch(text_line)):
            stack.append(Line(match["file"], int(match["line"]), match["function"]))
    return stack


def shortened(file: str) -> str:
    """Relative to the current folder where it lies below it."""
    if file.startswith(_OURS):
        return f"syncline/{file.removeprefix(_OURS)}"
    try:
        return file.removeprefix(os.getcwd() + os.sep)
    except OSError:  # the folder is gone
        return file


def _levels(frame: FrameType | None) -> Iterator[Line]:
    while frame is not None:
        yield Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
