"""Is the breakdown true? Steps whose parts are known: stated sleeps per layer, over a link of known rate.

    python benchmarks/ground_truth.py --save

Two emulated hosts (root or user namespaces are needed) train with `--compute sleep:`, so data, forward, backward and
update last what the file says, and gradients of known size cross a link of known rate. How long an all-reduce of that
size takes there is measured beforehand by itself, in plain torch, without any accounting of ours; beside it stands what
frames with 66 bytes of headers for 1448 would need at the link's rate.

What is exposed of it follows from when each bucket is ready: a bucket starts when it is ready on both ranks and the
one before it has passed. Each part must lie within 5 % of the truth; parts that should be nothing, below 5 % of the
step.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support import write_result

LINK_MBIT = 200
FRAMES = 1514 / 1448
LAYERS = 5
PARAMETERS = 1_250_000
"""Of each layer: 5 MB of gradients, about 209 ms on the link."""
DATA_MS, FORWARD_MS, BACKWARD_MS, UPDATE_MS = 60.0, 40.0, 100.0, 80.0
DELAY_MS = 200.0
WARMUP = 2
TOLERANCE = 0.05


@dataclass(frozen=True)
class Case:
    """A method, the gradients of which layers travel together, and how late rank 1 begins backward."""

    name: str
    method: str
    buckets: Sequence[int]
    """Layers in each bucket, in the order of backward."""
    options: dict[str, Any] = field(default_factory=dict)
    overlaps: bool = True
    delay_ms: float = 0.0


CASES = [
    Case("all-reduce, after backward", "all-reduce", [1] * LAYERS, overlaps=False),
    Case("ddp, a bucket a layer", "ddp", [1] * LAYERS, {"bucket_cap_mb": 4.0}),
    Case("bucketed, one bucket at the end", "bucketed", [LAYERS], {"overlap": False}, overlaps=False),
    Case("ddp, one bucket, rank 1 late", "ddp", [LAYERS], {"bucket_cap_mb": 1000.0}, delay_ms=DELAY_MS),
]


def ideal_ms(layers: int) -> float:
    return layers * PARAMETERS * 4 * 8 * FRAMES / (LINK_MBIT * 1e3)


def time_link() -> None:
    """On each rank: all-reduces of one layer and of all layers, nothing else going on; rank 0 prints medians."""
    dist.init_process_group("gloo")
    found = {}
    for layers in (1, LAYERS):
        values, times = torch.ones(layers * PARAMETERS), []
        for _ in range(7):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(values)
            times.append((time.perf_counter() - start) * 1e3)
        found[layers] = statistics.median(times[2:])
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def on_hosts(command: Sequence[str], folder: Path) -> str:
    """What rank 0 of two emulated hosts prints."""
    syncline = [str(Path(sys.executable).with_name("syncline")), "cluster", "run", "--hosts", "2", "--threads", "1"]
    link = [
        f"{layers * PARAMETERS * 4 / 1e6:.0f} MB {one:.0f} ms ({ideal_ms(layers):.0f} ideal)"
        for layers, one in wire_ms.items()
    ]
    lines = ["| case | rank | part | truth, ms | found, ms | error |", "|---|---|---|---|---|---|"]
    verdicts = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{case.name} …", file=sys.stderr, flush=True)
            rows, passed = compared(case, measured(case, given.steps, Path(folder)), wire_ms)
            print("\n".join(rows), file=sys.stderr, flush=True)
        lines += rows
        verdicts.append(passed)
    rate = f"{LINK_MBIT} Mbit/s between two emulated hosts, {given.steps} steps, means"
    verdict = "every part within 5 %" if all(verdicts) else "NOT every part within 5 %"
    write_result(
        "ground_truth",
        [f"{rate}: {verdict}.", f"All-reduce by itself: {', '.join(link)}.", "", *lines],
        save=given.save,
    )
    sys.exit(0 if all(verdicts) else 1)


if __name__ == "__main__":
    main()
