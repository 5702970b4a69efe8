"""How much memory one sample of a model needs, measured in a child process with limited memory.

The child trains on growing batches and prints its peak after each; the slope is the bytes per sample. An
address-space limit makes sure that a wrong guess ends the child and nothing else. A second child checks the result:
with room for 1.5 times CHECKED samples, it must manage CHECKED and be refused twice as many.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from syncline.errors import SynclineError
from syncline.machine import available_bytes
from syncline.plan import Precision
from syncline.training.watching import peak_resident_bytes
from syncline.workload.models import build_model, usual_task
from syncline.workload.precision import forward_in

BATCHES = (8, 16, 32)
CHECKED = 24
SHARE = 0.8
"""Of what is free: the rest of the machine lives too."""
GROWTH = 4
NO_ROOM = ("memory", "could not create a primitive")
"""How torch says that it got no memory: its own allocator, and oneDNN's."""


def capacity(rank: Any) -> list[dict[str, Any]]:
    """Rows of the batches global_batch, x 4, x 4 … to the first that one worker has no memory for."""
    plan = rank.plan
    room = available_bytes() * SHARE
    measured = in_child(plan.model, round(room), BATCHES, plan.precision)
    if len(measured) < 2:
        raise SynclineError(
            f"there is not enough memory to train {plan.model} on {BATCHES[1]} samples.", action="Free some memory."
        )
    per_sample, process = fitted(measured)
    tried = in_child(plan.model, round(1.5 * CHECKED * per_sample), (CHECKED, 2 * CHECKED), plan.precision)
    holds = [batch for batch, _ in tried] == [CHECKED]
    rows = []
    for batch in ladder(plan.global_batch, per_sample, process, room):
        needed = process + batch * per_sample
        figures = {"needed_bytes": needed, "room_share": needed / room, "fits": needed <= room, "limit_holds": holds}
        known = {"bytes_per_sample": per_sample, "process_bytes": process, "room_bytes": room}
        rows.append({"point": {"batch_per_worker": batch, "global_batch": batch}, **figures, **known})
    return rows


def fitted(measured: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """(bytes per sample, bytes of the process without any) of (batch, peak) pairs."""
    slope, start = np.polyfit([batch for batch, _ in measured], [peak for _, peak in measured], 1)
    return float(slope), float(start)


def ladder(first: int, per_sample: float, process: float, room: float) -> list[int]:
    """first, x 4, … and the first one that does not fit."""
    batches = [first]
    while process + batches[-1] * per_sample <= room:
        batches.append(batches[-1] * GROWTH)
    return batches


def in_child(
    model: str, limit: int, batches: Sequence[int], precision: Precision = "float32"
) -> list[tuple[int, int]]:
    """(batch, peak bytes) of each batch within the limit, which counts only what the child allocates for batches."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "syncline.measure.capacity",
        model,
        precision,
        str(limit),
        *map(str, batches),
    ]
    child = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if child.returncode != 0:
        last = child.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise SynclineError(f"cannot measure the memory that {model} needs: {last[0]}", action="Check the model.")
    return [(result["batch"], result["peak"]) for result in map(json.loads, child.stdout.splitlines())]


def _main(name: str, precision: Precision, limit: int, batches: Sequence[int]) -> None:
    torch.set_num_threads(1)
    task = usual_task(name)
    model = build_model(name, seed=0, task=task).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(batch: int) -> None:
        inputs = torch.randn(batch, *task.input_shape).to(memory_format=torch.channels_last)
        task.loss(forward_in(precision, model, inputs), torch.zeros(batch, dtype=torch.int64)).backward()
        optimizer.step()
        optimizer.zero_grad()

    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    step(2)  # what any batch needs once: momentum, and torch's own code
    allowed = _address_space() + limit
    resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
    for batch in batches:
        try:
            step(batch)
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and not any(words in str(error) for words in NO_ROOM):
                raise
            return
        print(json.dumps({"batch": batch, "peak": peak_resident_bytes()}), flush=True)


def _address_space() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmSize:"))


if __name__ == "__main__":
    _main(
        sys.argv[1],
        "bf16" if sys.argv[2] == "bf16" else "float32",
        int(sys.argv[3]),
        [int(word) for word in sys.argv[4:]],
    )
