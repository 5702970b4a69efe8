"""Before anything is measured: is the machine idle enough? If not: go on and say so, wait, or refuse."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, get_args

from syncline.errors import PlanError, UsageError
from syncline.machine import MachineLoad, sample_load
from syncline.units import format_seconds
from syncline.voice import Voice

WhenBusy = Literal["go", "wait", "refuse"]
BUSY = 0.25
"""Share of the cores' time from which on the machine counts as busy: half a second is too short to see 10 %."""
WORTHLESS = 0.5
"""As accounting.doubts: from here on, answers refuse."""
PATIENCE_S = 3600.0
PAUSE_S = 5.0
TOLD_EVERY_S = 60.0


def make_ready(
    when_busy: str,
    voice: Voice,
    *,
    sample: Callable[[], MachineLoad | None] = sample_load,
    sleep: Callable[[float], None] = time.sleep,
    patience_s: float = PATIENCE_S,
) -> None:
    """Look at the machine's load, and do as asked where it is busy.

    go: warn; what is measured is marked. wait: until it is idle, at most `patience_s`. refuse: a UsageError.
    """
    words = get_args(WhenBusy)
    if when_busy not in words:
        raise PlanError(f"--when-busy {when_busy!r} is unknown.", action=f"Choose from {', '.join(words)}.")
    if when_busy == "go" and voice.show == "nothing":
        return  # nobody would hear it, and the run itself measures what others took
    load = sample()
    if not is_busy(load):
        return
    if when_busy == "refuse":
        action = "Try again when it is idle, or wait for that with --when-busy wait."
        raise UsageError(f"{judged(load)}.", action=action)
    if when_busy == "go":
        voice.warn(f"Warning: {judged(load)}. Going on; the answers will say so (--when-busy wait waits).")
        return
    voice.warn(f"{judged(load)}. Waiting until the machine is idle (Ctrl-C stops) ...")
    _wait(voice, sample, sleep, patience_s)


def is_busy(load: MachineLoad | None) -> bool:
    return load is not None and load.share > BUSY


def judged(load: MachineLoad | None) -> str:
    """load 25 on 2 cores, 100% in use: results would be worthless."""
    how = "worthless" if load is not None and load.share >= WORTHLESS else "doubtful"
    return f"{load}: results would be {how}"


def _wait(
    voice: Voice, sample: Callable[[], MachineLoad | None], sleep: Callable[[float], None], patience_s: float
) -> None:
    """Until two looks in a row find it idle."""
    waited, told, idle = 0.0, 0.0, 0
    while idle < 2:
        if waited >= patience_s:
            action = "End other programs, or go on with --when-busy go."
            raise UsageError(f"the machine was still busy after {format_seconds(waited)}.", action=action)
        sleep(PAUSE_S)
        waited += PAUSE_S
        load = sample()
        idle = 0 if is_busy(load) else idle + 1
        if idle == 0 and waited - told >= TOLD_EVERY_S:
            told = waited
            voice.warn(f"still waiting after {format_seconds(waited)}: {load}")
    voice.warn(f"idle after {format_seconds(waited)}; starting")
