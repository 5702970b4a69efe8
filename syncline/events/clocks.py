"""Every rank's times on the clock of the lowest rank.

Ranks on one host read the same monotonic clock. Between hosts, ranks ping rank 0 (`comm/clock.py`) at the start and
at the end of a run; between those moments a clock is assumed to drift evenly. Times are nanoseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from syncline.blocks import Ints, Record


@dataclass(frozen=True)
class Alignment:
    """Add `offset_ns` (at `at_ns`, growing by `drift` per nanosecond) to a rank's time to have rank 0's."""

    source: Literal["same clock", "ping", "wall clock"]
    offset_ns: int = 0
    at_ns: int = 0
    drift: float = 0.0
    interval_ns: int = 0
    """The true offset lies this far or less from the one that is used: half the shortest round trip."""

    @property
    def is_same(self) -> bool:
        return self.source == "same clock"

    def apply(self, times_ns: Ints) -> Ints:
        if self.is_same:
            return times_ns
        drifted: Ints = np.rint((times_ns - self.at_ns) * self.drift).astype(np.int64)
        return times_ns + self.offset_ns + drifted


SAME_CLOCK = Alignment("same clock")


def align(header: Record, reference: Record, exchanges: Sequence[Record]) -> Alignment:
    """From the headers of a rank and of the reference rank, and the rank's clock records."""
    if header is reference or header.get("clock") == reference.get("clock"):
        return SAME_CLOCK
    if not exchanges:
        offset = _since_epoch(header) - _since_epoch(reference)
        return Alignment("wall clock", offset, header["monotonic_ns"])
    first, last = exchanges[0], exchanges[-1]
    passed = last["at"] - first["at"]
    drift = (last["offset"] - first["offset"]) / passed if passed > 0 else 0.0
    return Alignment("ping", first["offset"], first["at"], drift, max(first["interval"], last["interval"]))


def _since_epoch(header: Record) -> int:
    """What the monotonic clock must be given to tell the time of day."""
    return int(header["wall_ns"]) - int(header["monotonic_ns"])
