"""How much memory a rank takes: a `memory` record at the end of a run."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from torch import nn

from syncline.spans import EventLog
from syncline.sync import GradientSync


def note_memory(log: EventLog, model: nn.Module, sync: GradientSync) -> None:
    """The process's peak so far, and what the model's gradients and the method's buffers hold now."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    log.add(
        "memory",
        peak_resident_bytes=peak_resident_bytes(),
        parameter_bytes=sum(parameter.nbytes for parameter in model.parameters()),
        gradient_bytes=sum(parameter.nbytes for parameter in trained),
        buffer_bytes=sync.buffer_bytes,
        gradients_in_buffers=sync.holds_gradients,
    )


def peak_resident_bytes() -> int:
    """The most that this process had in memory at once, pages that it shares with others included."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
