"""What is watched around steps without a timer inside them: traffic, torch's profiler, and memory at the end.

Traffic is counted in every step, the profiler records some. Both begin before the step's clock starts and end after
it has stopped, so their own work is not in the step's time; only the profiler makes the operations inside slower,
which is why a step that it recorded is marked.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from syncline.comm.counters import StepTraffic
from syncline.plan import Profile
from syncline.spans import EventLog
from syncline.sync import GradientSync


@dataclass(frozen=True)
class StepWatch:
    """One rank's. `folder` receives what the profiler recorded."""

    log: EventLog
    profile: Profile = field(default_factory=Profile)
    folder: Path | None = None
    traffic: StepTraffic = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "traffic", StepTraffic(self.log))

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        chosen = number in self.profile.steps and self.log.rank in self.profile.ranks
        with self._profiled(number) if chosen and self.folder is not None else nullcontext():
            self.traffic.begin()
            yield
            self.traffic.end()

    @contextmanager
    def _profiled(self, number: int) -> Iterator[None]:
        assert self.folder is not None
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # else it writes to the terminal at each start and stop
        with profile(activities=activities) as recorded:
            yield
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"rank-{self.log.rank}-step-{number}"
        recorded.export_chrome_trace(str(self.folder / f"{name}.trace.json.gz"))
        operators = [_operator(average) for average in recorded.key_averages()]
        content = {"rank": self.log.rank, "step": number, "operators": operators}
        (self.folder / f"{name}.json").write_text(json.dumps(content) + "\n")
        self.log.add("profile", name=name)


def _operator(average: Any) -> dict[str, Any]:
    """Self: without the operators that it calls, so that these add up."""
    return {
        "name": average.key,
        "calls": average.count,
        "self_us": average.self_cpu_time_total,
        "total_us": average.cpu_time_total,
    }


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
